"""One tiny data set, laid out as data sets are that people download: the same labels from each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import only_classes, read_index, sample_images
from ray_yolo.labels.description import describe
from tests.support.formats import NAMES, coco_content, items, voc_xml, write, yolo_rows
from tests.support.jobs import make_index

Layout = Callable[[Path, AnnotationIndex], object]


def texts(images: str, labels: str) -> Layout:
    """YOLO's text files, in a folder of their own."""
    def lay(root: Path, index: AnnotationIndex) -> str:
        for item in items(index):
            place(item.path, root / images)
            write(root / labels / f"{Path(item.path).stem}.txt", yolo_rows(item))
        return images
    return lay


def xmls(images: str, annotations: str) -> Layout:
    """VOC's files."""
    def lay(root: Path, index: AnnotationIndex) -> str:
        for item in items(index):
            place(item.path, root / images)
            write(root / annotations / f"{Path(item.path).stem}.xml", voc_xml(item))
        return images
    return lay


def roboflow(root: Path, index: AnnotationIndex) -> str:
    """A folder of pictures with its COCO file, in which the data set's name is a category without annotations."""
    for item in items(index):
        place(item.path, root / "valid")
    content = coco_content(index)
    content["categories"].insert(0, {"id": 0, "name": "things", "supercategory": "none"})
    write(root / "valid" / "_annotations.coco.json", json.dumps(content))
    place(index.paths[0], root / "valid", "unlisted.png")
    return "valid"


def coco_with_folder(root: Path, index: AnnotationIndex) -> object:
    """A COCO file, and a folder of pictures that has nothing to do with it."""
    for item in items(index):
        place(item.path, root / "somewhere" / "else")
    write(root / "labels.json", json.dumps(coco_content(index)))
    return {"annotations": "labels.json", "images": "somewhere/else"}


def place(picture: str, folder: Path, name: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(picture, folder / (name or Path(picture).name))


LAYOUTS: dict[str, Layout] = {
    "yolo": texts("images/val", "labels/val"), "yolo, images twice": texts("images/val/images", "images/val/labels"),
    "yolo, beside": texts("all", "all"), "voc": xmls("JPEGImages", "Annotations"), "voc, beside": xmls("all", "all"),
    "raccoon": xmls("images", "annotations"), "kangaroo": xmls("images", "annots"),
    "pets": xmls("images", "annotations/xmls"), "roboflow": roboflow, "coco with folder": coco_with_folder}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> AnnotationIndex:
    made = make_index(tmp_path_factory.mktemp("pictures"), 6)
    return AnnotationIndex(made.paths, made.sizes, made.offsets, made.classes, made.boxes, NAMES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_labels(
        index: AnnotationIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))
    entry = LAYOUTS[layout](tmp_path / "data", index)
    description = describe({"val": entry, "names": list(NAMES)}, tmp_path / "data" / "data.yaml")
    merged = read_index(description, "val")
    assert merged.digest == index.digest
    assert not merged.findings
    assert len(merged.without_file) == 0


def test_some_classes_are_the_labels_of_these(index: AnnotationIndex) -> None:
    for classes in ((0,), (1,), (0, 1), ()):
        some = only_classes(index, classes)
        assert some.paths == index.paths, classes
        assert some.names == index.names, classes
        for one, other in zip(items(some), items(index), strict=True):
            kept = [kind in classes for kind in other.classes.tolist()]
            assert one.classes.tolist() == other.classes[kept].tolist(), classes
            assert one.boxes.tolist() == other.boxes[kept].tolist(), classes


def test_a_part_is_whole_images_drawn_by_the_seed(index: AnnotationIndex) -> None:
    part = sample_images(index, 0.5, seed=1)
    whole = {item.path: item for item in items(index)}
    assert len(part) == 3
    assert list(part.paths) == sorted(part.paths)
    for item in items(part):
        assert item.boxes.tolist() == whole[item.path].boxes.tolist()
        assert item.classes.tolist() == whole[item.path].classes.tolist()
    assert sample_images(index, 0.5, seed=1).digest == part.digest
    assert len({tuple(sample_images(index, 0.5, seed).paths) for seed in range(9)}) > 3
    assert sample_images(index, 1.0, seed=1).digest == index.digest
    assert len(sample_images(index, 0.01, seed=1)) == 1
