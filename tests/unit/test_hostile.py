"""Other people's files through the real command: what it says, what it leaves alone, and that it runs none of them."""

from __future__ import annotations

import importlib
import os
import pickle
import re
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
from ray_yolo.data.image_cache import SHARED_MEMORY, ImageStore
from ray_yolo.engine.build import train_dataset
from ray_yolo.engine.plan import Plan, ShardSampler
from ray_yolo.runtime import trainer
from tests.support.corpus import CASES, GOOD_ROW, GOOD_YAML, Case, picture, png_header
from tests.support.desk import AcceptedError, Desk, Ended
from tests.support.jobs import make_spec
from tests.support.pictures import smooth_picture, write_image

# Where the messages about data.yaml point; line 1 where nothing is said here.
LINES = {
    "bad path": 2, "tabs": 2, "open bracket": 2, "laughs": 2, "not utf-8": 2,
    "binary": 2, "gap in numbers": 3, "count of zero": 3, "one name as text": 3, "empty names": 3, "nested names": 3,
    "wrong count": 4, "python object": 4, "double key": 4, "deep": 4, "two documents": 4}
NO_LINE = {"no splits", "no train", "folder without images", "a single image that is none", "huge"}

# Names of files, as bytes because a file's name need not be text.
ODD_NAMES = (
    b"a b", b" first", b"last ", "ü 漢字 😀".encode(), "e\u0301".encode(), "\u00e9".encode(), b"new\nline", b"tab\t",
    b"carriage\rreturn", "separator\u2028".encode(), "\u202etxt.png".encode(), b"\x1b[31m", b"\xff\xfe", b"-rf",
    b"--help", b"quote'", b'quote"', b"back\\slash", b"$x$", b"$\\frac", b"[bold]", b"[a-z]", b"*", b"?", b"%s", b"{x}",
    b"~", b"`touch x`", b"|", b";", b"a.b.c", b"_", b"x" * 240)


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


def place_of(case: Case) -> str:
    """Where the message about a refused case has to point."""
    if case.name == "too few names":
        return "labels/good1.txt:1: "
    return "data.yaml: " if case.name in NO_LINE else f"data.yaml:{LINES.get(case.name, 1)}: "


@pytest.mark.timeout(900)
def test_every_hostile_file_is_read_left_out_or_refused_and_nothing_else_is_touched(
        tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failed = []
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            with desk_in(folder, capfd.readouterr) as desk, reader_at(desk):
                check_hostile_file(case, desk)
        except AssertionError as error:
            failed.append(f"{case.kind}: {case.name}: {error}")
    assert not failed, "\n".join(failed)


def check_hostile_file(case: Case, reader: Desk) -> None:
    file = case.write(reader.data)
    before = reader.look()
    ended = reader.train("--data", file)
    assert reader.look() == before
    assert list(reader.storage.iterdir()) == []
    assert ended.deeds.outside(reader.storage, reader.cache) == []  # storage is tried with a file
    if case.outcome == "refused":
        assert_refused(ended, f": {reader.data}/{place_of(case)}")
        return
    assert (ended.status, ended.out, ended.err) == (0, "", "AcceptedError: read\n")
    assert ended.deeds.started == ended.deeds.called == []
    names = [Path(path).stem for path in reader.indices[0].paths]
    assert names == ["good1", "good2"] + ["hostile"] * (case.kind != "yaml" and case.outcome == "read")


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


@pytest.mark.smoke
def test_a_training_on_everything_at_once_reports_what_it_leaves_out(desk: Desk) -> None:
    importlib.import_module("urllib3.util.connection")  # binds a socket, once, to see whether there is IPv6
    file, wanted = write_merged(desk.data)
    before = desk.look()
    ended = desk.train("--data", file, "--noplots")
    assert ended.status == 0, ended.err
    assert desk.look() == before
    assert ended.deeds.outside(desk.storage, desk.cache, SHARED_MEMORY) == []
    assert [start for start in ended.deeds.started if "git" not in start] == ended.deeds.called == []
    findings = (desk.run / "findings.txt").read_text().splitlines()
    twins = [line for line in findings if "has the same content as the training image" in line]
    assert len(twins) == len(wanted)  # both splits are the same images
    findings = [line for line in findings if line not in twins]
    of_a_row = re.compile(r"\.txt:\d+: ")
    without_image = [line for line in findings if line.endswith("(left out)")
                     and ("its image is left out" in line or not of_a_row.search(line))]
    stems = {Path(line.split(": ")[1]).name[:3] for line in without_image}
    stored = {path.stem for path in (desk.data / "images").iterdir()}
    assert stems == stored - set(wanted)
    assert f"WARNING: the check of the data set found {len(findings)} things" in ended.out
    assert f"({len(wanted)} images, {len(wanted)} for validation, 3 classes)" in ended.out
    table = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines() if line.strip()}
    rows = len([line for line in findings if line.startswith("train: ") and re.search(r"\.txt:\d+: .*left out", line)])
    assert table["train"][:6] == table["val"][:6]
    assert [table["train"][6], table["val"][6]] == ["0", str(len(wanted))]  # twins
    assert [int(table["train"][column]) for column in (0, 4, 5)] == [len(wanted), len(stored) - len(wanted), rows]


def microbatches(index: AnnotationIndex, num_workers: int, folder: Path) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """Everything that the workers forward in an epoch, by the images in it; each image belongs to one of them."""
    job = replace(make_spec(folder, num_images=1), train=index, val=index, names=index.names)
    plan = Plan(job.recipe, len(index))
    found: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for worker in range(num_workers):
        mine = replace(job, train=pickle.loads(pickle.dumps(index)))  # as it is sent to the workers
        sampler = ShardSampler(plan, worker, num_workers)
        sampler.start(0)
        batches = list(DataLoader(train_dataset(mine, ImageStore(mine.train, 64)), sampler=sampler, collate_fn=identity,
                                  batch_size=plan.loader_batch(num_workers, worker)))
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


def test_a_file_may_be_called_anything(desk: Desk) -> None:
    for number, stem in enumerate(ODD_NAMES):
        name = os.fsdecode(stem)
        write_image(desk.data / "images" / "plain.png", smooth_picture(48, 64, number)).rename(
            desk.data / "images" / f"{name}.png")
        (desk.data / "labels").mkdir(exist_ok=True)
        (desk.data / "labels" / f"{name}.txt").write_text(GOOD_ROW + "1 0.5 0.5 0 0\n")
    (desk.data / "images" / "  damaged.png").write_bytes(png_header(64, 48))  # as training finds out
    (desk.data / "data.yaml").write_text(GOOD_YAML.replace("[cat, dog, owl]", "[$\\frac, '[bold]', '%s {x}']"))
    before = desk.look()
    ended = desk.train("--data", desk.data)
    assert ended.status == 0, ended.err
    assert desk.look() == before
    assert ended.deeds.outside(desk.storage, desk.cache, SHARED_MEMORY) == []
    assert f"({len(ODD_NAMES) + 1} images, " in ended.out
    findings = (desk.run / "findings.txt").read_text().splitlines()
    twins = [line for line in findings if "has the same content as the training image" in line]
    assert len(twins) == len(ODD_NAMES) + 1, "both splits are the same images"
    assert len(findings) - len(twins) == 2 * len(ODD_NAMES), "each on a line of its own, for both splits"
    for text in (ended.out, *findings):
        assert not any(mark in text for mark in "\x1b\u202e\r\t")
    assert (desk.run / "val_batch2_pred.jpg").exists()
    assert (desk.run / "val_batch0_pred.jpg").exists()


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
