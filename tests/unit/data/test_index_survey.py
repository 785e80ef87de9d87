"""What there is in a split, in numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.data.index import (
    class_weights,
    first_paths,
    image_weights,
    label_sizes,
    read_index,
    require_boxes,
    sample_images,
    survey,
)
from ray_yolo.labels.description import describe
from tests.support.pictures import write_dataset

ROW = "1 0.5 0.5 0.5 0.5\n"


def test_a_split_is_counted_by_hand(tmp_path: Path) -> None:
    """Two images with boxes, two with empty files, one without a file, two left out; three rows left out."""
    bad = "7 0.5 0.5 0.5 0.5\n"
    description = write_dataset(tmp_path, {"a": ROW + "0 0.5 0.5 0.2 0.2\n" + bad, "b": ROW, "c": "", "d": "\n",
                                           "e": None, "f": bad + bad, "g": b"\xff"})
    for _ in range(2):  # from the files, and from the kept copy
        index = read_index(description, "train")
        assert survey(index).model_dump(mode="json") == {
            "digest": index.digest, "pictures": index.pictures,
            "images": 5, "boxes": 3, "per_class": [1, 2], "empty_file": 2, "no_file": 1, "images_left_out": 2,
            "rows_left_out": 3, "looked_for": [f"{tmp_path}/labels/*.txt", f"{tmp_path}/images/*.xml"],
            "clipped": 0, "specks": 0, "orphans": 0, "unread": 0, "twins": 0, "notes": []}


def test_a_part_of_a_split_is_counted_by_its_own_images(tmp_path: Path) -> None:
    """Half of the images have no label file, a quarter has an empty one."""
    labels: dict[str, str | None] = {}
    for number in range(40):
        labels[f"{number:02}"] = [ROW, None, "", None][number % 4]
    index = read_index(write_dataset(tmp_path, labels), "train")
    for seed in range(5):
        part = sample_images(index, 0.25, seed)
        counted = survey(part)
        kinds = [int(Path(path).stem) % 4 for path in part.paths]
        assert (counted.images, counted.no_file) == (10, sum(kind in (1, 3) for kind in kinds))
        assert (counted.empty_file, counted.boxes) == (kinds.count(2), kinds.count(0))


def test_a_coco_file_is_where_labels_are_looked_for(tmp_path: Path) -> None:
    write_dataset(tmp_path, dict.fromkeys("ab"))
    images = [{"id": number, "file_name": f"{name}.png"} for number, name in enumerate("ab")]
    rows = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 1, 9, 9]},
            {"id": 2, "image_id": 7, "category_id": 1, "bbox": [2, 2, 9, 9]},
            {"id": 3, "image_id": "0", "category_id": 1, "bbox": [60, 40, 9, 9]},
            {"id": 4, "image_id": "0", "category_id": 1, "bbox": [5, 5, 0.5, 9]}]
    (tmp_path / "instances_train.json").write_text(json.dumps(
        {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "cat"}]}))
    description = describe({"train": "instances_train.json", "names": ["cat"]}, tmp_path / "data.yaml")
    index = read_index(description, "train")
    assert survey(index).model_dump(mode="json") == {
        "digest": index.digest, "pictures": index.pictures,
        "images": 2, "boxes": 3, "per_class": [3], "empty_file": 1, "no_file": 0, "images_left_out": 0,
        "rows_left_out": 1, "looked_for": [f"{tmp_path}/instances_train.json"], "clipped": 1, "specks": 1,
        "orphans": 0, "unread": 0, "twins": 0, "notes": []}


def test_voc_files_are_looked_for_in_both_their_places(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"a": None})
    (tmp_path / "images").rename(tmp_path / "JPEGImages")
    index = read_index(describe({"train": "JPEGImages", "names": ["cat"]}, tmp_path / "data.yaml"), "train")
    assert index.looked_for == (f"{tmp_path}/JPEGImages/*.txt", f"{tmp_path}/JPEGImages/*.xml",
                                f"{tmp_path}/Annotations/*.xml")


def test_a_split_without_a_box_is_refused(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": None, "b": ""})
    with pytest.raises(DatasetError):
        require_boxes(read_index(description, "val"), description, "val")
    with_box = write_dataset(tmp_path / "with", {"a": None, "b": ROW})
    require_boxes(read_index(with_box, "val"), with_box, "val")


def test_of_many_paths_the_first_are_listed() -> None:
    assert first_paths(list("abcd")) == "a, b, c, d"
    assert first_paths(list("abcdef")) == "a, b, c, d and 2 more"


def test_class_weights_are_the_inverse_counts() -> None:
    assert np.allclose(class_weights(np.array([0, 0, 0, 1]), 2), [0.25, 0.75])
    assert np.allclose(class_weights(np.array([0, 0]), 2), [1 / 3, 2 / 3])  # absent counts as one label
    assert np.allclose(class_weights(np.zeros(0, np.int64), 4), 0.25)


def test_image_weights_by_hand(tmp_path: Path) -> None:
    row = "{} 0.5 0.5 0.5 {}\n"
    three = row.format(0, 0.5) + row.format(0, 0.25) + row.format(1, 0.5)
    index = read_index(write_dataset(tmp_path, {"a": row.format(0, 0.5), "b": three, "c": None}), "train")
    assert np.allclose(image_weights(index, np.zeros(2)), [0.25, 0.25 + 0.25 + 0.75, 0])
    assert np.allclose(image_weights(index, np.array([0.0, 0.8])), [0.25, 0.5 + 0.75 * 0.04, 0])


def test_weights_are_uniform_if_all_are_zero(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, {"a": "0 0.5 0.5 0.5 0.5\n", "b": None}), "train")
    assert image_weights(index, np.ones(2)).tolist() == [1, 1]
    empty = read_index(write_dataset(tmp_path / "empty", {"a": None, "b": None}), "train")
    assert image_weights(empty, np.zeros(2)).tolist() == [1, 1]


def test_label_sizes_are_width_and_height_at_the_image_size(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, {"a": None, "b": "0 0.5 0.5 0.5 0.25\n"}), "train")
    assert np.allclose(label_sizes(index, 128), [[64, 24]])  # 64 x 48 pixels become 128 x 96
