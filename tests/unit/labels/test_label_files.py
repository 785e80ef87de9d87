"""Which files a split consists of, and which of them are label files at all."""

import os
from pathlib import Path

import pytest

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import read_index
from ray_yolo.labels.description import describe
from ray_yolo.labels.label_files import MAX_BYTES
from tests.support.pictures import write_dataset

ROW = "1 0.5 0.5 0.5 0.5\n"


def names_of(index: AnnotationIndex) -> list[str]:
    return [Path(path).stem for path in index.paths]


def test_sources_may_be_folders_list_files_patterns_and_links(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"a": ROW, "b": ROW, "sub/c": ROW})
    (tmp_path / "list.txt").write_text("./images/a.png\r\nimages/sub/c.png\n\n" + str(tmp_path / "images/b.png"))
    (tmp_path / "linked").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "sub" / "circle").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "._a.png").write_bytes(b"resource fork")
    (tmp_path / "images" / "notes.md").write_text("no picture")

    def names(train: object) -> list[str]:
        description = describe({"train": train, "names": ["x", "y"]}, tmp_path / "data.yaml")
        return names_of(read_index(description, "train"))

    assert names("images") == names("list.txt") == names("linked") == ["a", "b", "c"]
    assert names("images/*.png") == ["a", "b"]
    assert names("images/a.png") == ["a"]
    assert names(["images/a.png", "images/b.png", "list.txt"]) == ["a", "b", "c"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "circle", "too large"])
def test_an_invalid_label_file_leaves_its_image_out(tmp_path: Path, kind: str) -> None:
    description = write_dataset(tmp_path, {"a": None, "b": ROW})
    file = tmp_path / "labels" / "a.txt"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "too large":
        with file.open("wb") as content:
            content.truncate(MAX_BYTES + 1)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else file)
    index = read_index(description, "train")
    assert names_of(index) == ["b"]
    assert [finding.where for finding in index.findings] == [str(file)]


def test_a_label_file_may_be_as_large_as_allowed(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": ROW.encode().ljust(MAX_BYTES)})
    assert len(read_index(description, "train").classes) == 1


def test_a_name_in_a_list_file_may_hold_any_character_but_a_line_end(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"a\u2028b": ROW, "a\x0bb": ROW})
    (tmp_path / "list.txt").write_text("images/a\u2028b.png\r\nimages/a\x0bb.png\n")
    description = describe({"train": "list.txt", "names": ["x", "y"]}, tmp_path / "data.yaml")
    assert names_of(read_index(description, "train")) == ["a\x0bb", "a\u2028b"]
