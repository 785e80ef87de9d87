"""Two versions of a data set: every image is in exactly one pair, or is an addition or a removal."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_yolo import cli
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.instruments.dataset_check import read_readable_splits
from ray_yolo.labels.versions import ChangeKind, ImageChange, compare_versions, images_of
from tests.support import run_log
from tests.support.jobs import make_dataset


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of two equal versions of six training and eleven validation images."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_dataset(old, 6)
    shutil.copytree(old, new)
    return old, new


def changes(old: Path, new: Path) -> list[ImageChange]:
    images = []
    for folder in (old, new):
        description = read_description(folder)
        splits, problems = read_readable_splits(description)
        assert problems == []
        images.append(images_of(splits, description.root))
    return compare_versions(*images)


def kinds(found: Sequence[ImageChange]) -> list[tuple[ChangeKind, str, str]]:
    return [(change.kind, change.old_path, change.path) for change in found]


def test_equal_versions_have_no_changes(versions: tuple[Path, Path]) -> None:
    assert changes(*versions) == []


def test_an_image_that_was_moved_is_neither_added_nor_removed(versions: tuple[Path, Path]) -> None:
    _, new = versions
    for kind, suffix in (("images", "png"), ("labels", "txt")):
        (new / kind / "train" / f"002.{suffix}").rename(new / kind / "val" / f"moved.{suffix}")
    [change] = changes(*versions)
    assert (change.kind, change.old_split, change.split) == ("moved", "train", "val")
    assert (change.old_path, change.path) == ("images/train/002.png", "images/val/moved.png")
    assert change.classes == ()


def test_added_removed_and_replaced_images(versions: tuple[Path, Path]) -> None:
    old, new = versions
    (new / "images" / "train" / "000.png").unlink()
    shutil.copy(old / "images" / "train" / "003.png", new / "images" / "train" / "added.png")  # a copy, not a move
    shutil.copy(old / "images" / "train" / "004.png", new / "images" / "train" / "005.png")
    assert kinds(changes(*versions)) == [
        ("removed", "images/train/000.png", ""), ("replaced", "images/train/005.png", "images/train/005.png"),
        ("added", "", "images/train/added.png")]


def test_a_label_that_was_changed_names_its_class(versions: tuple[Path, Path]) -> None:
    _, new = versions
    file = new / "labels" / "train" / "001.txt"
    rows = file.read_text().splitlines()
    number = rows[0][0]
    file.write_text("\n".join([f"{1 - int(number)}{rows[0][1:]}", *rows[1:]]))
    [change] = changes(*versions)
    assert (change.kind, change.path, change.classes) == ("relabelled", "images/train/001.png", ("bright", "dark"))
    assert change.boxes == change.old_boxes == len(rows)
    assert change.labels != change.old_labels


def test_the_order_of_rows_and_the_numbers_of_classes_are_no_labels(versions: tuple[Path, Path]) -> None:
    _, new = versions
    (new / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [bright, dark]\n")
    for file in new.glob("labels/*/*.txt"):
        rows = [f"{1 - int(row[0])}{row[1:]}" for row in file.read_text().splitlines()]
        file.write_text("\n".join(reversed(rows)))
    assert changes(*versions) == []


def test_a_crowd_is_a_label_too(versions: tuple[Path, Path]) -> None:
    splits, _ = read_readable_splits(read_description(versions[0]))
    plain = splits["train"]
    with_crowd = replace(plain, crowds=np.array([[0, 1, 0, 0, 9, 9, 81.0]]))
    one, other = (images_of({"train": index}, versions[0]) for index in (plain, with_crowd))
    assert kinds(compare_versions(one, other)) == [("relabelled", "images/train/000.png", "images/train/000.png")]


def test_the_page_has_every_class_with_the_precisions_of_two_runs(
        versions: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = versions
    file = new / "labels" / "train" / "001.txt"
    rows = file.read_text().splitlines()
    before = [row[0] for each in old.glob("labels/*/*.txt") for row in each.read_text().splitlines()]
    file.write_text("\n".join([*rows, "1 0.5 0.5 0.25 0.25"]))
    for name, value in (("now", 0.75), ("then", 0.5)):
        metrics = {"labels": 1, "precision": 1.0, "recall": 1.0, "mAP50": 1.0}
        per_class = [{"name": "bright", **metrics, "mAP50-95": value}]
        run_log.write(tmp_path / name / "events.jsonl", [
            run_log.run(), run_log.start(), run_log.epoch(0, per_class=per_class)])
    assert cli.checks(["--data", str(new), "--against", str(old), "--runs", str(tmp_path / "now"),
                       str(tmp_path / "then")]) == 0
    page = capsys.readouterr().out.splitlines()
    assert [line.split() for line in page[1:4]] == [
        ["Split", "before", "after", "added", "removed", "moved", "replaced", "relabelled"],
        ["train", "6", "6", "0", "0", "0", "0", "1"], ["val", "11", "11", "0", "0", "0", "0", "0"]]
    bright = str(before.count("1"))
    more = str(before.count("1") + 1)
    assert ["bright", bright, more, "1", "0.5000", "0.7500", "0.2500"] in [line.split() for line in page]
    folder = tmp_path / "runs" / "checks" / "exp"
    with (folder / "classes.csv").open() as table:
        classes = {row["class"]: row for row in csv.DictReader(table)}
    assert (classes["bright"]["AP_change"], classes["dark"]["AP_change"]) == ("0.25", "")
    with (folder / "changes.csv").open() as table:
        [row] = list(csv.DictReader(table))
    assert (row["kind"], row["path"], row["classes"]) == ("relabelled", "images/train/001.png", "bright")
    assert (int(row["old_boxes"]), int(row["boxes"])) == (len(rows), len(rows) + 1)


@pytest.mark.parametrize("words", [["--against", "a"], ["--data", "a", "--runs", "a", "b"]])
def test_flags_that_need_others_say_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.checks(words)
    assert stop.value.code == 2
    assert "needs --data" in capsys.readouterr().err
