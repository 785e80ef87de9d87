"""Other people's files through the real command: what it says, what it leaves alone, and that it runs none of them."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from ray_yolo.data.image_cache import SHARED_MEMORY
from tests.support.corpus import CASES, GOOD_ROW, GOOD_YAML, Case, png_header
from tests.support.desk import Desk
from tests.support.pictures import smooth_picture, write_image
from tests.unit.test_hostile import assert_refused, desk, desk_in, reader, reader_at, write_merged

__all__ = ["desk", "reader"]  # fixtures

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
