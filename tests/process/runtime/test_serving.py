"""Weights behind HTTP: what is answered, what is refused, and that a lost replica loses no request."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve as ray_serve

from ray_yolo.api import YOLO
from ray_yolo.config.commands import ServeConfig
from ray_yolo.runtime import serving
from tests.support.serving import Body, Collectives, encoded
from tests.unit.runtime.test_serving import pictures, rows, weights

__all__ = ["pictures", "weights"]  # fixtures


class Stalled(Body):
    """A body that never arrives."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("not reached")


@pytest.mark.parametrize("kind", [Body, Stalled])
def test_a_server_that_stops_does_not_wait_for_ever(kind: type[Body], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be answered in time is refused with a status that clients try again."""
    monkeypatch.setattr(serving, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(serving, "REFUSAL_SECONDS", 0.0)

    async def main() -> int:
        door = serving.Ingress(ServeConfig(weights=""), replicas)
        held = asyncio.ensure_future(door(kind(encoded((64, 64))).request))
        await asyncio.sleep(0.1)
        left = await door.drain(0.2)
        assert held.done()
        answer = held.result()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        return left

    replicas = Collectives()
    replicas.release.clear()
    assert asyncio.run(main()) == 1


class Client:
    """HTTP with one connection for each thread, without a second try."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, content: bytes, path: str = "/predict", method: str = "POST") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, content)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


@pytest.fixture(scope="module")
def client(ray_session: None, weights: Path) -> Iterator[Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray_serve.start(http_options={"port": port})
    ray_serve.run(serving.app({"weights": str(weights), "confidence": 0.1, "num_replicas": 2, "batch_size": 4,
                             "max_bytes": 100_000, "max_pixels": 250_000, "max_waiting": 1000}), name="ray_yolo")
    yield Client(port)
    ray_serve.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_requests_are_answered_while_replicas_are_killed(
        client: Client, weights: Path, pictures: list[Path]) -> None:
    """The door asks another replica: the client tries nothing twice."""
    def ask(number: int) -> tuple[int, Any]:
        if number in (300, 600):
            names = ray.util.list_named_actors(all_namespaces=True)
            chosen = next(one for one in names if "#Model#" in one["name"] and one["name"] not in killed)
            killed.append(chosen["name"])
            ray.kill(ray.get_actor(**chosen))
        return client(files[number % len(files)])

    killed: list[str] = []
    files = [path.read_bytes() for path in pictures]
    expected = [np.asarray(result.boxes.data) for result in YOLO(weights).predict(pictures, confidence=0.1)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(1000)))
    assert len(set(killed)) == 2
    assert {status for status, _ in answers} == {200}
    for number, (_, answer) in enumerate(answers):
        assert np.allclose(rows(answer), expected[number % len(files)], rtol=1e-3, atol=1e-2)


@pytest.mark.ray
@pytest.mark.slow
def test_what_cannot_be_answered_is_refused_with_the_reason(client: Client, pictures: list[Path]) -> None:
    whole = pictures[1].read_bytes()
    for content, status in [
            (b"", 400), (b"%!PS-Adobe-3.0 EPSF-3.0", 415), (encoded((8, 8), "GIF"), 415), (bytes(100_001), 413),
            (encoded((600, 600)), 413), (encoded((8, 8)), 422), (whole[:-100], 422)]:
        got, answer = client(content)
        assert got == status, answer
        assert answer.keys() == {"error"}
    assert client(b"", "/nothing")[0] == 404
    assert client(b"", "/predict", "PUT")[0] == 405
    assert client(b"", "/health", "GET") == (200, {"status": "ok"})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_on_a_private_ray_until_it_is_stopped(
        weights: Path, pictures: list[Path], tmp_path: Path, number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base, (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "ray_yolo.serve", "--weights", str(weights)]
        environment = {**os.environ, "RAY_TMPDIR": base}
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while "POST picture files to" not in (text := (tmp_path / "log").read_text()):
                assert server.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.2)
            assert Client(8000)(pictures[0].read_bytes())[0] == 200
            (session,) = Path(base).iterdir()
            assert stat.S_IMODE(session.stat().st_mode) == 0o700
            server.send_signal(number)
            assert server.wait(60) == 128 + number
        finally:
            server.kill()
        assert list(Path(base).iterdir()) == []
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    assert f"*** {number.name}" not in text  # by Ray's core, which then aborts


@pytest.mark.slow
def test_a_command_that_is_stopped_loses_no_request(weights: Path, tmp_path: Path) -> None:
    """300 in flight at SIGTERM, as soon as the server is healthy. Each is answered, or refused with a status that
    clients try again; none gets 404 or 500. Until the end, new ones are refused so, and then there is no connection.
    The kernel resets a connection that waits to be accepted while the server closes its socket: nothing of it was read.
    """
    def ask(number: int) -> str:
        try:
            return str(client(content)[0])
        except ConnectionRefusedError:
            return "no server"
        except ConnectionResetError:
            return "reset"
        except (http.client.HTTPException, OSError) as error:
            return f"lost: {type(error).__name__}"

    def is_healthy() -> bool:
        with suppress(OSError, ValueError):  # no server yet, or Serve's own answer
            return client(b"", "/health", "GET")[0] == 200
        return False

    client, content = Client(8000), encoded((640, 640))
    with tempfile.TemporaryDirectory(dir="/tmp") as base, (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "ray_yolo.serve", "--weights", str(weights), "--max-waiting", "400",
                   "--imgsz", "640"]
        server = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "RAY_TMPDIR": base}, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 200
            while not is_healthy():  # a second or more before it prints its address
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            with ThreadPoolExecutor(330) as pool:
                held = [pool.submit(ask, number) for number in range(300)]
                time.sleep(0.5)
                server.send_signal(signal.SIGTERM)
                start, late = time.monotonic(), []
                while server.poll() is None:
                    late.append(pool.submit(ask, -1))
                    time.sleep(0.05)
                seconds = time.monotonic() - start
                counts = Counter(answer.result() for answer in held)
                refused = Counter(answer.result() for answer in late)
            assert server.wait(60) == 143
        finally:
            server.kill()
    print(f"held {dict(counts)}, later {dict(refused)}, {seconds:.1f} s")
    assert set(counts) <= {"200", "503"}
    assert counts["200"] > 0  # how many depends on the machine
    assert set(refused) <= {"200", "503", "no server", "reset"}
    assert refused["reset"] <= 2  # of twenty a second
    assert refused["503"] > 0
    assert seconds < 30
