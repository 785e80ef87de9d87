"""Other people's files through the real command: what it says, what it leaves alone, and that it runs none of them."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch loads it with the first optimiser and makes a folder of its own: before anybody watches
import yaml
from torch.utils.data import DataLoader

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset import identity
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.engine.loading import LoadedDataset
from ray_yolo.engine.plan import Plan, ShardSampler
from ray_yolo.engine.team import train_dataset
from ray_yolo.runtime import trainer
from tests.support.corpus import CASES, GOOD_ROW, GOOD_YAML, Case, picture
from tests.support.desk import AcceptedError, Desk, Ended
from tests.support.jobs import make_spec
from tests.support.pictures import smooth_picture, write_image


@contextmanager
def desk_in(folder: Path, written: Callable[[], tuple[str, str]]) -> Iterator[Desk]:
    desk = Desk(folder, written)
    desk.prepare()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk.folder / "cwd")
        patch.setenv("HOME", str(desk.folder / "home"))
        patch.setenv("RAY_YOLO_CACHE", str(desk.cache))
        patch.setenv("MPLCONFIGDIR", str(desk.cache / "matplotlib"))
        yield desk
    signal.signal(signal.SIGTERM, before)


@contextmanager
def reader_at(desk: Desk) -> Iterator[Desk]:
    """A desk where the command ends as soon as it has read the data set."""
    read = trainer.read_dataset

    def stop(recipe: Recipe) -> None:
        desk.indices.append(read(recipe)[1])
        raise AcceptedError("read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "read_dataset", stop)
        yield desk


@pytest.fixture
def desk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    with desk_in(tmp_path, capfd.readouterr) as desk:
        yield desk


@pytest.fixture
def reader(desk: Desk) -> Iterator[Desk]:
    with reader_at(desk):
        yield desk


def assert_refused(ended: Ended, *named: str) -> None:
    """Exit 2 with one line on stderr that holds all of these, and nothing else done."""
    assert (ended.status, ended.out) == (2, ""), ended.err
    line, *more = ended.err.splitlines()
    assert more == []
    assert line.partition(": ")[0] in ("InputError", "ConfigError", "DatasetError", "CheckpointError", "StorageError")
    assert [name for name in named if name not in line] == [], line
    assert ended.deeds.started == ended.deeds.called == []


def write_merged(root: Path) -> tuple[Path, list[str]]:
    """Every hostile label and picture that is not refused in one data set, and the pictures that have to be read.

    The first one shows only in training that it is damaged.
    """
    cases = [case for case in CASES if case.kind != "yaml" and case.outcome != "refused"]
    cases.sort(key=lambda case: case.name != "sound chunks without pixels")
    for number, case in enumerate(cases):
        name, labels = f"{number:03d}", root / "labels" / f"{number:03d}.txt"
        labels.parent.mkdir(parents=True, exist_ok=True)
        if case.kind == "image":
            (root / "images").mkdir(parents=True, exist_ok=True)
            (root / "images" / f"{name}{case.suffix}").write_bytes(case.content)
        else:
            write_image(root / "images" / f"{name}.png", smooth_picture(48, 64, number))
        labels.write_bytes(case.content if case.kind == "label" else GOOD_ROW.encode())
    (root / "data.yaml").write_text(GOOD_YAML)
    return root / "data.yaml", [f"{number:03d}" for number, case in enumerate(cases) if case.outcome == "read"]


def microbatches(index: AnnotationIndex, num_workers: int, folder: Path) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """Everything that the workers forward in an epoch, by the images in it; each image belongs to one of them."""
    job = replace(make_spec(folder, num_images=1), train=index, val=index, names=index.names)
    plan = Plan(job.recipe, len(index))
    found: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for worker in range(num_workers):
        mine = replace(job, train=pickle.loads(pickle.dumps(index)))  # as it is sent to the workers
        sampler = ShardSampler(plan, worker, num_workers)
        sampler.start(0)
        load = train_dataset(mine, ImageStore(mine.train, 64)).load
        batches = list(DataLoader(LoadedDataset(load), sampler=sampler, collate_fn=identity, batch_size=None))
        assert batches, "every worker has a share"
        found |= {tuple(batch["indices"].tolist()): [batch["images"], batch["targets"]] for batch in batches}
    return found


def test_three_workers_accept_and_forward_what_one_does(reader: Desk) -> None:
    file, wanted = write_merged(reader.data)
    assert reader.train("--data", file).status == 0
    (index,) = reader.indices
    one, three = (microbatches(index, workers, reader.folder / str(workers)) for workers in (1, 3))
    assert sorted(Path(index.paths[image]).stem for images in three for image in images) == wanted
    assert one.keys() == three.keys()
    assert all(torch.equal(a, b) for images in one for a, b in zip(one[images], three[images], strict=True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("train", ["images", "images/**/*.png", "images/**", "**/*.png", "images/*/*/*.png"])
def test_links_that_run_in_circles_end_and_add_nothing(reader: Desk, train: str) -> None:
    images = reader.data / "images"
    write_image(images / "deep" / "er" / "a.png", smooth_picture(48, 64))
    for name in ("one", "two", "three", "deep/up"):
        (images / name).symlink_to(images)
    (images / "itself.png").symlink_to("itself.png")
    (images / "nowhere.png").symlink_to("nothing.png")
    (reader.data / "data.yaml").write_text(f"train: {train!r}\nval: images\nnames: [cat]\n")
    ended = reader.train("--data", reader.data, "--allow-empty")
    assert ended.status == 0, ended.err
    assert {os.path.realpath(path) for path in reader.indices[0].paths} == {str(images / "deep" / "er" / "a.png")}


TAGS = {
    "apply": "x: !!python/object/apply:os.mkdir ['MARK']", "new": "x: !!python/object/new:os.mkdir ['MARK']",
    "key": "? !!python/object/apply:os.mkdir ['MARK']\n: 1", "whole": "!!python/object/apply:os.mkdir ['MARK']",
    "nested": "x: [{y: !!python/object/apply:os.mkdir ['MARK']}]",
    "state": "x: !!python/object/apply:os.mkdir {args: ['MARK']}"}


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("flag", ["--data", "--hyp", "--config", "--model"])
def test_a_yaml_file_runs_no_code(desk: Desk, tag: str, flag: str) -> None:
    mark, file = desk.folder / "mark", desk.folder / "hostile.yaml"
    file.write_text(TAGS[tag].replace("MARK", str(mark)))
    yaml.unsafe_load(file.read_text())
    mark.rmdir()  # so the file would do it
    assert_refused(desk.train("--data", CASES[0].write(desk.data), flag, file), f"{file}:1: ")
    assert not mark.exists()


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_run_no_code(desk: Desk, zipped: bool) -> None:
    mark, file = desk.folder / "mark", desk.folder / "evil.pt"
    torch.save({"model": Evil(mark)}, file, _use_new_zipfile_serialization=zipped)
    torch.load(file, weights_only=False)
    mark.rmdir()
    ended = desk.train("--data", CASES[0].write(desk.data), "--weights", file, "--noplots")
    assert (ended.status, ended.err.splitlines()[-1].partition(" ")[0]) == (2, "CheckpointError:")
    assert "pickled objects, which are never loaded" in ended.err or "names posix.mkdir, which is" in ended.err
    assert not mark.exists()


def test_a_picture_that_only_a_program_could_draw_is_left_out(reader: Desk) -> None:
    postscript = Case("postscript", "image", picture("EPS"), "left out")
    ended = reader.train("--data", postscript.write(reader.data))
    assert ended.deeds.started == []
    assert [Path(path).stem for path in reader.indices[0].paths] == ["good1", "good2"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".", "..", ".x", "-", "a b", "a\nb", "é", "x" * 64, "~"])
def test_a_run_is_not_called_like_a_path(reader: Desk, name: str) -> None:
    before = reader.look()
    answer = "control characters" if "\n" in name else "folders go into --project"
    assert_refused(reader.train(f"--name={name}"), "--name", answer)
    assert reader.look() == before
    assert list(reader.storage.iterdir()) == []


@pytest.mark.parametrize("flag", ["--project", "--storage-path"])
def test_runs_that_cannot_be_written_are_refused_with_advice(desk: Desk, flag: str) -> None:
    data = CASES[0].write(desk.data)
    for place in (data, data / "below", Path("/proc/none"), Path("x" * 300)):
        assert_refused(desk.train("--data", data, flag, place), "give a --project and --storage-path")
