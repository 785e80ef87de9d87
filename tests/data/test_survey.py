import json
from pathlib import Path

import pytest

from ray_yolo.data.dataset_yaml import describe
from ray_yolo.data.index import read_index
from ray_yolo.data.survey import first_places, require_boxes, survey
from ray_yolo.errors import DatasetError
from tests.support.pictures import write_dataset

ROW = "1 0.5 0.5 0.5 0.5\n"


def test_a_split_is_counted_by_hand(tmp_path: Path) -> None:
    """Two images with boxes, two with empty files, one without a file, two left out; three rows left out."""
    bad = "7 0.5 0.5 0.5 0.5\n"
    description = write_dataset(tmp_path, {"a": ROW + "0 0.5 0.5 0.2 0.2\n" + bad, "b": ROW, "c": "", "d": "\n",
                                           "e": None, "f": bad + bad, "g": b"\xff"})
    for _ in range(2):  # from the files, and from the kept copy
        assert survey(read_index(description, "train")) == {
            "images": 5, "boxes": 3, "per_class": [1, 2], "empty_file": 2, "no_file": 1, "images_left_out": 2,
            "rows_left_out": 3, "looked_for": [f"{tmp_path}/labels/*.txt", f"{tmp_path}/images/*.xml"]}


def test_a_coco_file_is_where_labels_are_looked_for(tmp_path: Path) -> None:
    write_dataset(tmp_path, dict.fromkeys("ab"))
    images = [{"id": number, "file_name": f"{name}.png"} for number, name in enumerate("ab")]
    rows = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 9, 9]},
            {"id": 2, "image_id": "0", "category_id": 1, "bbox": [2, 2, 9, 9]}]
    (tmp_path / "instances_train.json").write_text(json.dumps(
        {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "cat"}]}))
    description = describe({"train": "instances_train.json", "names": ["cat"]}, tmp_path / "data.yaml")
    assert survey(read_index(description, "train")) == {
        "images": 2, "boxes": 1, "per_class": [1], "empty_file": 1, "no_file": 0, "images_left_out": 0,
        "rows_left_out": 1, "looked_for": [f"{tmp_path}/instances_train.json"]}


def test_voc_files_are_looked_for_in_both_their_places(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"a": None})
    (tmp_path / "images").rename(tmp_path / "JPEGImages")
    index = read_index(describe({"train": "JPEGImages", "names": ["cat"]}, tmp_path / "data.yaml"), "train")
    assert index.looked_for == (f"{tmp_path}/JPEGImages/*.txt", f"{tmp_path}/JPEGImages/*.xml",
                                f"{tmp_path}/Annotations/*.xml")


def test_a_split_without_a_box_is_refused_with_the_places_of_labels(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": None, "b": ""})
    with pytest.raises(DatasetError, match=r"val: none of its 2 images has a box.*--allow-empty") as caught:
        require_boxes(read_index(description, "val"), description, "val")
    for place in (f"{tmp_path}/labels/*.txt", f"{tmp_path}/images/*.xml"):
        assert place in str(caught.value)
    with_box = write_dataset(tmp_path / "with", {"a": None, "b": ROW})
    require_boxes(read_index(with_box, "val"), with_box, "val")


def test_the_refusal_says_how_much_was_left_out_and_why(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": None, "b": "0 50 50 20 20\n"})
    with pytest.raises(DatasetError, match=r"2 rows and images were left out, the first: .*b\.txt:1: has values"):
        require_boxes(read_index(description, "train"), description, "train")


def test_of_many_places_the_first_are_told() -> None:
    assert first_places(list("abcd")) == "a, b, c, d"
    assert first_places(list("abcdef")) == "a, b, c, d and 2 more"
