import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.data.index import read_index, with_single_class
from ray_yolo.labels.description import DatasetDescription, describe
from ray_yolo.labels.yolo_txt import label_path
from tests.support.pictures import write_dataset

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]


def content(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    images = [{"id": number, "file_name": f"{name}.png", "height": 48, "width": 64} for number, name in enumerate("ab")]
    return {"images": images, "categories": CATEGORIES,
            "annotations": [{"id": number, "image_id": 0, "category_id": 3, **row} for number, row in enumerate(rows)],
            **changes}


def write(root: Path, value: object, file: str = "annotations/instances_train.json") -> DatasetDescription:
    write_dataset(root, dict.fromkeys("ab"))
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(value if isinstance(value, str) else json.dumps(value))
    return describe({"train": file, "names": ["cat", "dog"]}, root / "data.yaml")


def test_the_same_boxes_as_text_files_and_as_json_are_the_same_annotations(tmp_path: Path) -> None:
    """16 x 12 px boxes are exact shares of 64 x 48 pixels."""
    rows = [{"bbox": [16, 12, 32, 24]}, {"bbox": [0, 0, 8, 6], "category_id": 7},
            {"bbox": [8, 12, 8, 24], "segmentation": [[8, 12, 16, 12, 12, 36]]}]
    read = read_index(write(tmp_path / "json", content(rows)), "train")
    text = "0 0.5 0.5 0.5 0.5\n1 0.0625 0.0625 0.125 0.125\n0 0.125 0.25 0.25 0.25 0.1875 0.75\n"
    expected = read_index(write_dataset(tmp_path / "text", {"a": text, "b": None}), "train")
    assert read.digest == expected.digest
    assert [len(outline) for outline in read.polygons[0]] == [0, 0, 3]
    assert np.allclose(read.polygons[0][2], expected.polygons[0][2])


def test_a_key_that_is_repeated_with_its_value_is_read(tmp_path: Path) -> None:
    whole = json.dumps(content([{"bbox": [16, 12, 32, 24]}]))
    repeated = whole.replace('"id": 0', '"id": 0, "id": 0')
    assert read_index(write(tmp_path, repeated), "train").boxes.tolist() == [[16, 12, 48, 36]]


def test_a_folder_of_annotations_is_recognised(tmp_path: Path) -> None:
    write(tmp_path, content([{"bbox": [16, 12, 32, 24]}]))
    description = describe({"train": "annotations", "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    assert read_index(description, "train").boxes.tolist() == [[16, 12, 48, 36]]


def test_categories_belong_by_name_else_by_order_of_their_ids(tmp_path: Path) -> None:
    rows = [{"bbox": [0, 0, 9, 9], "category_id": 7}]
    assert read_index(write(tmp_path / "a", content(rows)), "train").classes.tolist() == [1]
    renamed = [{"id": 9, "name": "Katze"}, {"id": 7, "name": "Hund"}]
    assert read_index(write(tmp_path / "b", content(rows, categories=renamed)), "train").classes.tolist() == [0]


def test_crowds_are_no_labels_and_several_parts_no_outline(tmp_path: Path) -> None:
    rows = [{"bbox": [0, 0, 9, 9], "iscrowd": 1}, {"bbox": [0, 0, 8, 8], "segmentation": [[0, 0, 1, 1, 2, 2]] * 2},
            {"bbox": [0, 0, 7, 7], "segmentation": {"counts": "abc", "size": [48, 64]}}]
    index = read_index(write(tmp_path, content(rows)), "train")
    assert index.boxes.tolist() == [[0, 0, 8, 8], [0, 0, 7, 7]]
    assert index.polygons == {}


def test_crowds_and_areas_affect_scoring_but_not_training(tmp_path: Path) -> None:
    """An area that is none is that of the box, 8 x 8."""
    rows = [{"bbox": [0, 0, 8, 8], "area": 40.5}, {"bbox": [5, 6, 9, 9], "iscrowd": 1, "area": 70, "category_id": 7},
            {"bbox": [0, 0, 8, 8], "image_id": 1, "area": "x"}, {"bbox": [1, 1, 0, 9], "iscrowd": 1}]
    plain = read_index(write(tmp_path / "plain", content([{**row, "area": 64} for row in rows[::2]])), "train")
    index = read_index(write(tmp_path / "crowded", content(rows)), "train")
    assert index.crowds.tolist() == [[0, 1, 5, 6, 14, 15, 70]]
    assert with_single_class(index).crowds.tolist() == [[0, 0, 5, 6, 14, 15, 70]]
    assert index.areas is not None
    assert index.areas.tolist() == [40.5, 64]
    assert [finding.where[-12:] for finding in index.findings] == ["annotation 1", "annotation 3"]
    assert "is the first of 2 annotations marked iscrowd; crowds are not trained on" in index.findings[0].what
    assert index.digest == plain.digest


def test_an_invalid_outline_leaves_the_box(tmp_path: Path) -> None:
    for number, y in enumerate((float("nan"), float("inf"), 10**400, None, "x")):
        rows = [{"bbox": [0, 0, 9, 9], "segmentation": [[0, 0, 5, y, 2, 2]]}]
        index = read_index(write(tmp_path / str(number), content(rows)), "train")
        assert index.boxes.tolist() == [[0, 0, 9, 9]], y
        assert index.polygons == {}, y


def test_boxes_are_clipped_empty_ones_dropped_and_duplicates_counted_once(tmp_path: Path) -> None:
    rows = [{"bbox": [-4, -4, 14, 14]}, {"bbox": [5, 5, 0, 9]}, {"bbox": [60, 40, 90, 90]}, {"bbox": [60, 40, 90, 90]},
            {"bbox": [70, 5, 5, 5]}, {"bbox": [30, 5, 1e-9, 5]}]
    index = read_index(write(tmp_path, content(rows)), "train")
    assert index.boxes.tolist() == [[0, 0, 10, 10], [60, 40, 64, 48]]
    assert [finding.dropped for finding in index.findings] == [False, True, False, True, True]
    assert "2 of 2 boxes that were clipped" in index.findings[0].what


def test_an_ambiguous_row_is_left_out(tmp_path: Path) -> None:
    for number, row in enumerate((
        {}, {"bbox": None}, {"bbox": [1, 2, 3]}, {"bbox": [1, 2, 3, "x"]}, {"bbox": [1, 2, 3, float("nan")]},
        {"bbox": [1, 2, float("inf"), 3]}, {"bbox": [1, 2, -3, 3]}, {"bbox": "1234"}, {"bbox": {"x": 1}},
        {"bbox": [1, 2, 3, 10**400]},
    )):
        root = tmp_path / str(number)
        index = read_index(write(root, content([{"bbox": [1, 1, 9, 9]}, row])), "train")
        assert index.boxes.tolist() == [[1, 1, 10, 10]], row
        where = f"{root}/annotations/instances_train.json: annotation 1"
        found = [(finding.where, finding.dropped, finding.image) for finding in index.findings]
        assert found == [(where, True, False)], row


def test_rows_of_unlisted_categories_are_left_out_and_all_reported(tmp_path: Path) -> None:
    for number, category in enumerate((8, "3a", None, [], {}, float("nan"))):
        odd = {"bbox": [1, 1, 9, 9], "category_id": category}
        index = read_index(write(tmp_path / str(number), content([odd, {"bbox": [1, 1, 9, 9]}, odd])), "train")
        assert len(index.classes) == 1, category
        assert [finding.where[-12:] for finding in index.findings] == ["annotation 0", "annotation 2"], category
        assert "which the file's categories do not list" in index.findings[0].what, category


@pytest.mark.parametrize("number", [7, "0a", None, [], {}, float("nan")])
def test_rows_of_unknown_images_are_left_out_and_reported_at_every_reading(tmp_path: Path, number: object) -> None:
    odd = {"bbox": [1, 1, 9, 9], "image_id": number}
    description = write(tmp_path, content([odd, {"bbox": [1, 1, 9, 9]}, odd]))
    for _ in range(2):
        index = read_index(description, "train")
        assert len(index.classes) == 1
        assert [(finding.where[-12:], finding.dropped) for finding in index.findings] == [("annotation 0", True),
                                                                                   ("annotation 2", True)]
        assert "which no image of the file has" in index.findings[0].what
    with pytest.raises(DatasetError):
        read_index(description, "train", strict=True)


def test_images_that_are_missing_or_of_another_size_are_left_out(tmp_path: Path) -> None:
    images = [{"id": 0, "file_name": "a.png", "height": 64, "width": 48}, {"id": 1, "file_name": "b.png"},
              {"id": 2, "file_name": "gone.png", "height": 9, "width": 9}]
    index = read_index(write(tmp_path, content([{"bbox": [1, 1, 9, 9]}], images=images)), "train")
    assert [Path(path).name for path in index.paths] == ["b.png"]
    assert "says 48 x 64" in index.findings[0].what
    assert "gone.png" in index.findings[1].where


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    description = write(tmp_path, content([{"bbox": [1, 1, 9, 9]}]))
    assert len(read_index(description, "train").classes) == 1
    write(tmp_path, content([{"bbox": [1, 1, 9, 9]}, {"bbox": [2, 2, 9, 9]}]))
    assert len(read_index(description, "train").classes) == 2


def test_an_image_in_two_files_is_refused(tmp_path: Path) -> None:
    """One of them would state that the image has none of the other's objects."""
    write(tmp_path, content([{"bbox": [0, 0, 9, 9]}]))
    write(tmp_path, content([{"bbox": [9, 9, 9, 9]}]), "annotations/instances_train_person.json")
    description = describe({"train": "annotations", "val": "annotations", "names": ["cat", "dog"]}, tmp_path / "d.yaml")
    with pytest.raises(DatasetError):
        read_index(description, "train")


def test_a_file_of_both_splits_is_none_of_training(tmp_path: Path) -> None:
    write(tmp_path, content([{"bbox": [0, 0, 9, 9]}]))
    write(tmp_path, content([]), "annotations/instances_trainval.json")
    description = describe({"train": "annotations", "val": "annotations", "names": ["cat", "dog"]}, tmp_path / "d.yaml")
    assert len(read_index(description, "train").boxes) == 1


@pytest.mark.parametrize("file", ["a.txt", "a.xml"])
def test_other_labels_of_an_image_in_a_coco_file_are_reported(tmp_path: Path, file: str) -> None:
    description = write(tmp_path, content([{"bbox": [0, 0, 9, 9]}]))
    image = Path(read_index(description, "train").paths[0])
    beside = Path(label_path(str(image))) if file.endswith(".txt") else image.with_suffix(".xml")
    beside.parent.mkdir(exist_ok=True)
    beside.write_text("")
    [finding] = read_index(description, "train").findings
    assert finding.where == str(beside)
    assert finding.what == "is the first of 1 label files that are not read, because a COCO file lists their image"


@pytest.mark.parametrize(("more", "what"), [
    ({"ignore": 1}, "annotations marked ignore or difficult; they are trained on like others"),
    ({"difficult": True}, "annotations marked ignore or difficult; they are trained on like others"),
    ({"attributes": {"difficult": True}}, "annotations marked ignore or difficult; they are trained on like"),
    ({"attributes": {"ignore": 1}}, "annotations marked ignore or difficult; they are trained on like"),
    ({"rotation": 30}, "boxes with a rotation, which is not used"),
    ({"attributes": {"angle": 0.5}}, "boxes with a rotation, which is not used"),
    ({"bbox_mode": 1}, ""),
    ({"attributes": {"rotation": 45.0}}, "boxes with a rotation, which is not used"),
    ({"ignore": 0, "attributes": {"rotation": 0.0, "occluded": False}}, ""),
    ({"attributes": [45]}, ""),
])
def test_what_an_annotation_says_and_is_not_used_is_reported(
        tmp_path: Path, more: dict[str, object], what: str) -> None:
    """CVAT writes rotations, converters of VOC files `ignore` or `difficult`."""
    index = read_index(write(tmp_path, content([{"bbox": [0, 0, 9, 9], **more}])), "train")
    assert len(index.boxes) == 1
    assert [finding.what for finding in index.findings if what and what in finding.what] == [
        finding.what for finding in index.findings]
    assert bool(index.findings) == bool(what)


@pytest.mark.parametrize(("root", "names", "mapped"), [
    ("pets", ["Katze", "Hund"], True),  # the supercategory of the others: Katze is cat, Hund is dog
    ("pets", ["cat", "dog"], False), ("CAT", ["cat", "dog"], False)])
def test_the_root_of_roboflow_is_no_class(tmp_path: Path, root: str, names: list[str], mapped: bool) -> None:
    value = content([{"bbox": [1, 1, 9, 9], "category_id": number} for number in (1, 2)])
    children = [{"id": number, "name": name, "supercategory": root} for number, name in enumerate(names, 1)]
    value["categories"] = [{"id": 0, "name": root, "supercategory": "none"}, *children]
    index = read_index(write(tmp_path, value), "train")
    assert index.classes.tolist() == [0, 1]
    assert ["Katze is cat" in finding.what for finding in index.findings] == [True] * mapped


def test_a_bbox_of_corners_is_refused(tmp_path: Path) -> None:
    """As Detectron2 numbers them; 1 is COCO's own."""
    rows: list[dict[str, Any]] = [{"bbox": [0, 0, 9, 9], "bbox_mode": 0}, {"bbox": [0, 0, 9, 9]}]
    index = read_index(write(tmp_path, content(rows)), "train")
    assert len(index.boxes) == 1
    assert any("has the bbox_mode 0 (of Detectron2)" in finding.what for finding in index.findings)
