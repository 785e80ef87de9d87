"""Files of class names beside label files, which may contradict the description."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.data.index import read_index
from ray_yolo.labels.description import describe
from tests.support.pictures import write_dataset

LINES = "{0}\n{1}\n"
CONTENTS = {
    "obj.names": "{0}\r\n{1}\r\n\r\n",
    "notes.json": '{{"categories": [{{"id": 1, "name": "{1}"}}, {{"id": 0, "name": "{0}"}}]}}',
}


def findings(root: Path, file: str, first: str, second: str) -> list[tuple[str, str]]:
    """What is found in a data set of cats and dogs with a file of these names."""
    description = write_dataset(root, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (root / file).write_text(CONTENTS.get(Path(file).name, LINES).format(first, second))
    return [(Path(finding.where).name, finding.what) for finding in read_index(description, "train").findings]


@pytest.mark.parametrize("file", ["labels/classes.txt", "classes.txt", "obj.names", "notes.json", "images/classes.txt",
                                  "labels/_darknet.labels", "labels/darknet.labels", "labels/Classes.txt"])
def test_names_in_another_order_are_refused(tmp_path: Path, file: str) -> None:
    with pytest.raises(DatasetError):
        findings(tmp_path, file, "Dog", "cat")


@pytest.mark.parametrize("file", ["labels/classes.txt", "notes.json"])
def test_equal_names_are_no_finding(tmp_path: Path, file: str) -> None:
    assert findings(tmp_path, file, "Cat", "dog ") == []


def test_other_names_are_a_finding(tmp_path: Path) -> None:
    [(file, what)] = findings(tmp_path, "labels/classes.txt", "cat", "chien")
    assert file == "classes.txt"
    assert what.startswith("names class 1 'chien', but ")
    assert what.endswith("data.yaml 'dog'; the latter is used")


@pytest.mark.parametrize("file", ["labels/predefined_classes.txt", "labels.txt", "class_names.txt", "coco.names",
                                  "names.txt", "categories.txt"])
def test_a_list_that_may_be_of_another_set_is_a_finding(tmp_path: Path, file: str) -> None:
    [(_, what)] = findings(tmp_path, file, "dog", "cat")
    assert what.startswith("gives class 'cat' the number 1, but ")


@pytest.mark.parametrize("content", ["images/1.jpg\nimages/2.jpg\n", "person\nbicycle\n", "class_id,name\n0,cat\n"])
def test_a_list_of_something_else_is_no_finding(tmp_path: Path, content: str) -> None:
    """Darknet has the names of other sets beside those of this one."""
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"})
    for file in ("labels.txt", "voc.names"):
        (tmp_path / file).write_text(content)
    assert read_index(description, "train").findings == ()


@pytest.mark.parametrize("content", ["0: dog\n1: cat\n", "0 dog\n1 cat\n", "dog\ncat\n"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_lines_may_have_numbers_and_windows_encodings(tmp_path: Path, content: str, encoding: str) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "classes.txt").write_bytes(content.encode(encoding))
    with pytest.raises(DatasetError):
        read_index(description, "train")


def test_a_list_in_another_encoding_is_reported(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "classes.txt").write_bytes("Löwe\nKatze\n".encode("latin-1"))
    [finding] = read_index(description, "train").findings
    assert finding.what.startswith("is not text in UTF-8, so its class names are not compared with ")


def test_numbers_that_do_not_count_lines_are_part_of_the_names(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"}, names=("2 euro", "1 euro"))
    (tmp_path / "classes.txt").write_text("2 euro\n1 euro\n")
    assert read_index(description, "train").findings == ()


def test_the_labels_of_a_picture_called_classes_are_no_names(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n", "classes": "1 0.5 0.5 0.5 0.5\n"})
    assert read_index(description, "train").findings == ()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"categories": 5}', '{"categories": [{"id": "x"}]}'])
def test_a_file_without_names_states_nothing(tmp_path: Path, content: str) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "notes.json").write_text(content)
    assert read_index(description, "train").findings == ()


def test_a_file_above_the_data_set_is_that_of_others(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    assert read_index(write_dataset(tmp_path / "mine", {"a": "1 0.5 0.5 0.5 0.5\n"}), "train").findings == ()


def test_the_description_of_a_part_that_has_another_order_is_a_finding(tmp_path: Path) -> None:
    """As of two sets that are trained on together."""
    for part in ("one", "two"):
        write_dataset(tmp_path / part, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "one" / "data.yaml").write_text("train: images\nval: images\nnames: [cat, dog]\n")
    (tmp_path / "two" / "data.yaml").write_text("train: images\nval: images\nnames: {0: dog, 1: cat}\n")
    both = describe({"train": ["one/images", "two/images"], "val": "one/images", "names": ["cat", "dog"]},
                    tmp_path / "both.yaml")
    [finding] = read_index(both, "train").findings
    assert finding.where == str(tmp_path / "two" / "data.yaml")
    assert finding.what.startswith("gives class 'cat' the number 1, but ")


def test_numbers_are_those_of_the_lines(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "classes.txt").write_text("\ncat\n")
    with pytest.raises(DatasetError):
        read_index(description, "train")


def test_names_in_another_description_are_text(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", {"a": "1 0.5 0.5 0.5 0.5\n"})
    (tmp_path / "set" / "data.yaml").write_text("train: images\nval: images\nnames: [007, true]\n")
    ours = describe({"train": "set/images", "val": "set/images", "names": ["007", "true"]}, tmp_path / "mine.yaml")
    assert read_index(ours, "train").findings == ()
