"""Weights behind HTTP: what is answered, what is refused, and that a lost replica loses no request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from ray_yolo.api import YOLO
from ray_yolo.cli import serve
from ray_yolo.config.commands import ServeConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, InputError
from ray_yolo.data.images import read_image
from ray_yolo.runtime import serving
from tests.support.pictures import smooth_picture
from tests.support.serving import Body, Collectives, ask_all, encoded
from tests.support.weights import make_weights

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    for number, (*size, suffix) in enumerate([(48, 64, "png"), (64, 64, "jpg"), (90, 64, "webp"), (48, 64, "bmp")]):
        Image.fromarray(smooth_picture(*size, seed=number)).save(folder / f"{number}.{suffix}")
    return sorted(folder.iterdir())


def rows(answer: dict[str, Any]) -> np.ndarray:
    found = answer["detections"]
    return np.array([[*one["box"], one["confidence"], one["class"]] for one in found], np.float32).reshape(-1, 6)


def test_an_answer_has_the_bits_of_predict(weights: Path, pictures: list[Path]) -> None:
    model = serving.Model(ServeConfig(weights=str(weights), batch_size=1, confidence=0.1))
    yolo, seen = YOLO(weights), 0
    for path in pictures:
        [answer] = model.detect_batch([path.read_bytes()])
        [result] = yolo.predict(path, confidence=0.1)
        assert np.array_equal(rows(answer), np.asarray(result.boxes.data))
        assert (answer["height"], answer["width"]) == result.orig_shape
        seen += len(result)
    assert seen > 4
    [problem] = model.detect_batch([b"\xff\xd8\xff"])
    assert isinstance(problem, str)


@pytest.mark.parametrize(("settings", "error"), [
    ({"classes": (99,)}, InputError), ({"imgsz": 100}, ConfigError), ({"weights": __file__}, CheckpointError)])
def test_bad_input_is_refused_before_ray_starts(weights: Path, monkeypatch: pytest.MonkeyPatch,
                                                settings: dict[str, Any], error: type[InputError]) -> None:
    monkeypatch.setattr(serving, "connect", lambda *_, **options: pytest.fail("Ray starts"))
    config = ServeConfig(weights=str(weights)).model_copy(update=settings)
    for refuse in (serving.check, serving.run):
        with pytest.raises(error):
            refuse(config)


def test_a_dry_run_has_the_checks_of_a_server(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        serve(["--weights", str(weights), "--classes", "99", "--dry-run"])
    assert serve(["--weights", str(weights), "--dry-run"]) == 0
    assert "imgsz: 64 " in capsys.readouterr().out


def test_a_replica_whose_model_has_failed_is_not_healthy(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model = serving.Model(ServeConfig(weights=str(weights)))
    model.check_health()
    monkeypatch.setattr(serving, "read_picture", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        model.detect_batch([b""])
    with pytest.raises(RuntimeError, match="illegal"):
        model.check_health()


def test_a_picture_is_decoded_from_memory_and_has_the_pixels_of_its_file(
        pictures: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [read_image(str(path)) for path in pictures]
    contents = [path.read_bytes() for path in pictures]
    monkeypatch.setattr("builtins.open", lambda *args: pytest.fail("a file is opened"))
    monkeypatch.setattr("os.open", lambda *args, **options: pytest.fail("a file is opened"))
    for content, pixels in zip(contents, expected, strict=True):
        assert np.array_equal(serving.read_picture(content), pixels)


def test_of_many_bodies_at_once_those_are_read_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded((64, 64)) + bytes(20_000)
    replicas, bodies = Collectives(), [Body(content, declared=number % 2 == 0) for number in range(300)]
    replicas.release.clear()
    answers = ask_all(bodies, replicas, max_waiting=30, batch_size=4, max_bytes=30_000)
    assert [status for status, _ in answers] == [200] * 38 + [503] * 262
    assert [body.read for body in bodies] == [len(content)] * 38 + [0] * 262
    monkeypatch.setattr(serving, "MOST_HELD", 10 * len(content) + 1000)
    replicas, bodies = Collectives(), [Body(content) for _ in range(50)]
    replicas.release.clear()
    answers = ask_all(bodies, replicas, max_bytes=30_000)
    assert [status for status, _ in answers] == [200] * 10 + [503] * 40


def test_a_body_that_says_that_it_is_too_long_is_not_read() -> None:
    declared, silent = Body(bytes(100_000)), Body(bytes(100_000), declared=False)
    assert [status for status, _ in ask_all([declared, silent], Collectives(), max_bytes=50_000)] == [413, 413]
    assert declared.read == 0
    assert silent.read <= 51_000


def test_a_picture_that_ends_replicas_ends_two_and_no_more_and_the_others_are_answered() -> None:
    deadly = encoded((64, 64)) + b"deadly"
    replicas = Collectives(deadly)
    bodies = [Body(deadly if number == 2 else encoded((64, 64)) + b"%d" % number) for number in range(8)]
    answers = ask_all(bodies, replicas)
    assert [status for status, _ in answers] == [200, 200, 422] + [200] * 5
    assert replicas.lost == 2
    assert [len(one) for one in replicas.together if deadly in one][1] == 1  # alone, so that it is known


def test_a_deadly_picture_that_comes_again_is_refused_at_once() -> None:
    async def main() -> list[int]:
        door = serving.Ingress(ServeConfig(weights=""), replicas)
        return [(await door(Body(deadly).request)).status_code for _ in range(5)]

    deadly = encoded((64, 64)) + b"deadly"
    replicas = Collectives(deadly)
    assert asyncio.run(main()) == [422] * 5
    assert replicas.lost == 2


def test_a_server_that_stops_answers_what_it_holds_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 requests are in flight, as many as were lost before."""
    monkeypatch.setattr(serving, "NOTICE_SECONDS", 0.05)
    health = Body(b"", path="/health")
    health.scope["method"] = "GET"

    async def main() -> None:
        door = serving.Ingress(ServeConfig(weights="", max_waiting=400), replicas)
        assert (await door(health.request)).status_code == 200
        held = [asyncio.ensure_future(door(Body(encoded((64, 64)) + b"%d" % number).request)) for number in range(300)]
        while len(replicas._waiting) < 300:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(door.drain(20.0))
        await asyncio.sleep(0.1)
        for late in (Body(encoded((64, 64))), health):
            answer = await door(late.request)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not draining.done()
        replicas.release.set()
        assert {(await answer).status_code for answer in held} == {200}
        assert await draining == 0

    replicas = Collectives()
    replicas.release.clear()
    asyncio.run(main())


def test_a_body_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Body):
        async def receive(self) -> dict[str, Any]:
            await asyncio.sleep(0.02)
            self.read += 1
            return {"type": "http.request", "body": self.content[self.read - 1:self.read], "more_body": True}

    monkeypatch.setattr(serving, "READ_SECONDS", 0.2)
    slow = Slow(encoded((64, 64)))
    assert [status for status, _ in ask_all([slow], Collectives())] == [408]
    assert 0 < slow.read < 20


def test_settings_come_from_arguments_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_WEIGHTS", "other.pt")
    monkeypatch.setenv("RAY_YOLO_IOU", "0.6")
    monkeypatch.setenv("RAY_YOLO_CLASSES", "0,2")
    made = serving.app({"weights": "best.pt", "num_replicas": "2"})._bound_deployment.init_args[0]
    assert (made.weights, made.iou, made.classes, made.num_replicas) == ("best.pt", 0.6, (0, 2), 2)
    monkeypatch.delenv("RAY_YOLO_WEIGHTS")
    with pytest.raises(ConfigError):
        serving.app({"iou": 2})


def test_the_file_for_a_cluster_has_settings_that_are_accepted() -> None:
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "cluster" / "serve.yaml").read_text()))
    [application] = config.applications
    assert application.import_path == "ray_yolo.serve:app"
    assert serving.app(application.args)
    assert config.http_options.host == "127.0.0.1"
