"""What the flags of training decide about labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.runtime.preflight import read_dataset
from tests.support.label_cases import NAMES, ROW, item, picture, place, xml


def read(folder: Path, words: str = "") -> tuple[AnnotationIndex, AnnotationIndex]:
    """The training and validation labels of a command line."""
    parsed = parse_train(["--data", str(folder / "data.yaml"), "--model", "yolov5n", *words.split()])
    return read_dataset(parsed.config.recipe)[1:]


def describe(folder: Path, splits: str) -> None:
    place(folder / "data.yaml", f"{splits}\nnames: {list(NAMES)}\n".encode())


def test_rows_with_a_confidence_are_labels_if_asked_for(tmp_path: Path) -> None:
    place(tmp_path / "images" / "a.png", picture())
    place(tmp_path / "labels" / "a.txt", f"{ROW}\n0 0.5 0.5 0.2 0.2 0.9\n".encode())
    describe(tmp_path, "train: images\nval: images")
    assert [index.classes.tolist() for index in read(tmp_path)] == [[1], [1]]
    assert [index.classes.tolist() for index in read(tmp_path, "--labels-with-confidence")] == [[1, 0], [1, 0]]


def test_difficult_objects_are_labels_if_asked_for(tmp_path: Path) -> None:
    place(tmp_path / "images" / "a.png", picture())
    difficult = item("circle", (1, 1, 9, 9), "<difficult>1</difficult>")
    place(tmp_path / "images" / "a.xml", xml(item(), difficult).encode())
    describe(tmp_path, "train: images\nval: images")
    assert [index.classes.tolist() for index in read(tmp_path)] == [[1], [1]]
    assert [index.classes.tolist() for index in read(tmp_path, "--keep-difficult")] == [[1, 0], [1, 0]]


def test_repeated_lines_of_a_training_list_are_kept(tmp_path: Path) -> None:
    """Oversampling is for training: validation counts each image once."""
    for name in "abc":
        place(tmp_path / "images" / f"{name}.png", picture())
        place(tmp_path / "labels" / f"{name}.txt", ROW.encode())
    place(tmp_path / "list.txt", b"images/a.png\nimages/b.png\nimages/a.png\n./images/a.png\n")
    describe(tmp_path, "train: [list.txt, images]\nval: list.txt")
    train, val = read(tmp_path)
    assert [Path(path).stem for path in train.paths] == ["a", "b", "c"]
    for index, remedy in ((train, " (--keep-repeats counts every line)"), (val, "")):
        finding = index.findings[0]
        assert finding.where == str(tmp_path / "list.txt")
        assert finding.what.startswith("has 2 of 4 lines that repeat an earlier one, of 1 images, the first ")
        assert finding.what.endswith(f"each image counts once{remedy}")
        assert not finding.dropped
    for _ in range(2):  # from the files, and from the kept copy
        train, val = read(tmp_path, "--keep-repeats")
        assert [Path(path).stem for path in train.paths] == ["a", "a", "a", "a", "b", "b", "c"]
        assert len(train.classes) == 7
        assert [Path(path).stem for path in val.paths] == ["a", "b"]
        assert train.findings == ()


@pytest.mark.parametrize(("sources", "where", "kept"), [
    ("[images, images]", "images", "aabb"), ("[images, images/a.png]", "images/a.png", "aab"),
    ("[one.txt, other.txt]", "other.txt", "aab")])
def test_an_image_of_two_sources_counts_once_with_a_finding_or_is_kept_twice(
        tmp_path: Path, sources: str, where: str, kept: str) -> None:
    for name in "ab":
        place(tmp_path / "images" / f"{name}.png", picture())
        place(tmp_path / "labels" / f"{name}.txt", ROW.encode())
    place(tmp_path / "one.txt", b"images/a.png\nimages/b.png\n")
    place(tmp_path / "other.txt", b"images/a.png\n")
    describe(tmp_path, f"train: {sources}\nval: {sources}")
    for index, remedy in zip(read(tmp_path), (" (--keep-repeats counts it in each)", ""), strict=True):
        assert [Path(path).stem for path in index.paths] == ["a", "b"]
        (finding,) = index.findings
        assert (finding.where, finding.dropped) == (str(tmp_path / where), False)
        assert finding.what.endswith(f"of an earlier source of the split; an image counts once{remedy}")
    train, val = read(tmp_path, "--keep-repeats")
    assert "".join(Path(path).stem for path in train.paths) == kept
    assert train.findings == ()
    assert len(val.findings) == 1


@pytest.mark.parametrize("line", ["images\\a.png", ".\\images\\a.png"])
def test_a_list_of_windows_has_backslashes(tmp_path: Path, line: str) -> None:
    place(tmp_path / "images" / "a.png", picture())
    place(tmp_path / "labels" / "a.txt", ROW.encode())
    place(tmp_path / "list.txt", f"{line}\r\n".encode())
    describe(tmp_path, "train: list.txt\nval: images")
    train, val = read(tmp_path)
    assert train.paths == val.paths
    assert train.digest == val.digest


def test_a_file_name_with_a_backslash_is_that_file(tmp_path: Path) -> None:
    place(tmp_path / "images" / "a\\b.png", picture())
    place(tmp_path / "images" / "a" / "b.png", picture())
    place(tmp_path / "list.txt", b"images/a\\b.png\n")
    describe(tmp_path, "train: list.txt\nval: images")
    place(tmp_path / "labels" / "a\\b.txt", ROW.encode())
    assert read(tmp_path)[0].paths == (str(tmp_path / "images" / "a\\b.png"),)
