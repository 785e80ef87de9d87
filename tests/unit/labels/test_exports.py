"""Exports in the documented forms of annotation tools: read as they are meant, or refused with the tool's name.

Each holds the picture a (a cat at 16, 12, 48, 36) and the picture b (a dog at 0, 0, 32, 24 of 64 x 48 pixels).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from ray_yolo import cli
from ray_yolo.core.errors import DatasetError, InputError
from tests.support.pictures import smooth_picture

CAT, DOG = (16, 12, 48, 36), (0, 0, 32, 24)
CAT_ROW, DOG_ROW = "0 0.5 0.5 0.5 0.5\n", "1 0.25 0.25 0.5 0.5\n"
NAMES = "names: [cat, dog]\n"


def put(root: Path, name: str, content: str | int) -> None:
    """Write a text file, or a picture of a seed."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, int):
        Image.fromarray(smooth_picture(48, 64, content)).save(path)
    else:
        path.write_text(content)


def coco(names: tuple[str, str], first_category: int = 1, **image: object) -> str:
    """A COCO file of both pictures."""
    def row(number: int, box: tuple[int, int, int, int]) -> dict[str, object]:
        left, top, right, bottom = box
        return {"id": number, "image_id": number, "category_id": first_category + number - 1, "iscrowd": 0,
                "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
                "segmentation": []}

    images = [{"id": number, "file_name": name, "width": 64, "height": 48, **image}
              for number, name in enumerate(names, 1)]
    categories = [{"id": first_category + number, "name": name, "supercategory": ""}
                  for number, name in enumerate(("cat", "dog"))]
    return json.dumps({"info": {}, "licenses": [], "images": images, "annotations": [row(1, CAT), row(2, DOG)],
                       "categories": categories})


def voc(name: str, kind: str, box: tuple[int, int, int, int], folder: str = "") -> str:
    left, top, right, bottom = box
    return (f"<annotation><folder>{folder}</folder><filename>{name}</filename><source><database>Unknown</database>"
            f"</source><size><width>64</width><height>48</height><depth>3</depth></size><segmented>0</segmented>"
            f"<object><name>{kind}</name><pose>Unspecified</pose><truncated>0</truncated><difficult>0</difficult>"
            f"<bndbox><xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox>"
            f"</object></annotation>")


def cvat_yolo(root: Path) -> str:
    """CVAT's YOLO 1.1, and its pictures; its list has paths from the folder of the program."""
    put(root, "obj.data", "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")
    put(root, "obj.names", "cat\ndog\n")
    put(root, "train.txt", "data/obj_train_data/a.png\ndata/obj_train_data/b.png\n")
    for name, row in (("a", CAT_ROW), ("b", DOG_ROW)):
        put(root, f"obj_train_data/{name}.png", ord(name))
        put(root, f"obj_train_data/{name}.txt", row)
    return f"train: train.txt\n{NAMES}"


def cvat_coco(root: Path) -> str:
    put(root, "images/default/a.png", 1)
    put(root, "images/default/b.png", 2)
    put(root, "annotations/instances_default.json", coco(("a.png", "b.png")))
    return f"train: annotations/instances_default.json\n{NAMES}"


def cvat_voc(root: Path) -> str:
    put(root, "labelmap.txt", "# label:color_rgb:parts:actions\nbackground:::\ncat:::\ndog:::\n")
    put(root, "ImageSets/Main/default.txt", "a\nb\n")
    for name, kind, box in (("a", "cat", CAT), ("b", "dog", DOG)):
        put(root, f"JPEGImages/{name}.png", ord(name))
        put(root, f"Annotations/{name}.xml", voc(f"{name}.png", kind, box))
    return f"train: JPEGImages\n{NAMES}"


def label_studio_yolo(root: Path) -> str:
    """Names with accents and blanks: the labels' are percent encoded."""
    put(root, "classes.txt", "cat\ndog\n")
    put(root, "notes.json", json.dumps({"categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
                                        "info": {"contributor": "Label Studio"}}))
    for name, row in (("a décran 1", CAT_ROW), ("b", DOG_ROW)):
        put(root, f"images/{name}.png", len(name))
        put(root, f"labels/{quote(name)}.txt", row)
    return f"train: images\n{NAMES}"


def label_studio_coco(root: Path) -> str:
    put(root, "images/a décran 1.png", 1)
    put(root, "images/b.png", 2)
    put(root, "result.json", coco((f"images/{quote('a décran 1')}.png", "images/b.png"), first_category=0))
    return f"train: result.json\n{NAMES}"


def roboflow_yolo(root: Path) -> str:
    for split in ("train", "valid", "test"):
        for name, row in (("a", CAT_ROW), ("b", DOG_ROW)):
            put(root, f"{split}/images/{name}_png.rf.0123abcd.png", ord(name) + sum(split.encode()))
            put(root, f"{split}/labels/{name}_png.rf.0123abcd.txt", row)
    put(root, "README.dataset.txt", "# cats and dogs\n")
    put(root, "README.roboflow.txt", "exported from roboflow.com\n")
    return ("train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: ['cat', 'dog']\n\n"
            "roboflow:\n  workspace: w\n  project: p\n  version: 1\n  license: CC BY 4.0\n")


def roboflow_coco(root: Path) -> str:
    for split in ("train", "valid"):
        names = [f"{name}_png.rf.{split}.png" for name in "ab"]
        for number, name in enumerate(names):
            put(root, f"{split}/{name}", number + sum(split.encode()))
        content = json.loads(coco((names[0], names[1])))
        content["categories"].insert(0, {"id": 0, "name": "pets", "supercategory": "none"})
        put(root, f"{split}/_annotations.coco.json", json.dumps(content))
    put(root, "README.dataset.txt", "# cats and dogs\n")
    return f"train: train\nval: valid\n{NAMES}"


def fiftyone_yolo(root: Path) -> str:
    for split in ("train", "val"):
        for name, row in (("a", CAT_ROW), ("b", DOG_ROW)):
            put(root, f"images/{split}/{name}.png", ord(name) + sum(split.encode()))
            put(root, f"labels/{split}/{name}.txt", row)
    return f"names:\n  0: cat\n  1: dog\npath: {root}\ntrain: ./images/train/\nval: ./images/val/\n"


def rectlabel_voc(root: Path) -> str:
    """RectLabel writes XML files into the folder `annotations` below the pictures."""
    for name, kind, box in (("a", "cat", CAT), ("b", "dog", DOG)):
        put(root, f"images/{name}.png", ord(name))
        put(root, f"images/annotations/{name}.xml", voc(f"{name}.png", kind, box, "images"))
    return f"train: images\n{NAMES}"


def vott_voc(root: Path) -> str:
    put(root, "pascal_label_map.pbtxt", "item {\n id: 1\n name: 'cat'\n}\nitem {\n id: 2\n name: 'dog'\n}\n")
    for name, kind, box in (("a", "cat", CAT), ("b", "dog", DOG)):
        put(root, f"JPEGImages/{name}.png", ord(name))
        put(root, f"Annotations/{name}.xml", voc(f"{name}.png", kind, box))
        put(root, f"ImageSets/Main/{kind}_train.txt", f"{name}.png 1\n")
    return f"train: JPEGImages\n{NAMES}"


def via_coco(root: Path) -> str:
    put(root, "a.png", 1)
    put(root, "b.png", 2)
    put(root, "via_export_coco.json", coco(("a.png", "b.png"), license=0, flickr_url="a.png", coco_url="a.png"))
    return f"train: via_export_coco.json\n{NAMES}"


def darknet(root: Path) -> str:
    """Lists with the paths of the machine that trained."""
    for name, row in (("a", CAT_ROW), ("b", DOG_ROW)):
        put(root, f"obj/{name}.png", ord(name))
        put(root, f"obj/{name}.txt", row)
    put(root, "train.txt", "/home/me/darknet/data/obj/a.png\n/home/me/darknet/data/obj/b.png\n")
    return f"train: train.txt\n{NAMES}"


READ: dict[str, Callable[[Path], str]] = {
    "CVAT YOLO 1.1": cvat_yolo, "CVAT COCO": cvat_coco, "CVAT VOC": cvat_voc, "Label Studio YOLO": label_studio_yolo,
    "Label Studio COCO": label_studio_coco, "Roboflow YOLO": roboflow_yolo, "Roboflow COCO": roboflow_coco,
    "FiftyOne YOLOv5": fiftyone_yolo, "RectLabel VOC": rectlabel_voc, "VoTT VOC": vott_voc, "VIA COCO": via_coco,
    "Darknet": darknet}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("tool", READ)
def test_an_export_is_read_as_it_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str) -> None:
    from ray_yolo.data.dataset_yaml import read_description
    from ray_yolo.data.index import read_index

    yaml = READ[tool](tmp_path / "export")
    put(tmp_path, "export/data.yaml", yaml)
    assert cli.checks(["--data", str(tmp_path / "export" / "data.yaml")]) == 0
    page = capsys.readouterr().out
    splits = [split for split in ("train", "val", "test") if f"{split}:" in yaml]
    description = read_description(tmp_path / "export" / "data.yaml")
    for split in splits:
        row = next(line.split() for line in page.splitlines() if line.split()[:1] == [split])
        assert row == [split, "2", "2", "0", "0", "0", "0"]
        index = read_index(description, split)
        assert index.classes.tolist() == [0, 1]
        assert index.boxes.tolist() == [list(CAT), list(DOG)]
        assert index.other_files.labels == index.other_files.images == ()
    assert [line for line in page.splitlines() if line.startswith("pictures with their boxes: ")]
    assert (tmp_path / "runs" / "checks" / "exp" / "dataset.jpg").stat().st_size > 5000


def labelme(root: Path) -> str:
    put(root, "images/a.png", 1)
    put(root, "images/a.json", json.dumps({
        "version": "5.2.1", "flags": {}, "shapes": [{"label": "cat", "points": [[16, 12], [48, 36]],
                                                     "shape_type": "rectangle", "flags": {}, "group_id": None}],
        "imagePath": "a.png", "imageData": None, "imageHeight": 48, "imageWidth": 64}))
    return f"train: images\n{NAMES}"


def via(root: Path) -> str:
    put(root, "images/a.png", 1)
    put(root, "images/via_region_data.json", json.dumps({"a.png512": {
        "filename": "a.png", "size": 512, "file_attributes": {}, "regions": [
            {"shape_attributes": {"name": "rect", "x": 16, "y": 12, "width": 32, "height": 24},
             "region_attributes": {"name": "cat"}}]}}))
    return f"train: images\n{NAMES}"


def vott(root: Path) -> str:
    put(root, "vott-json-export/a.png", 1)
    put(root, "vott-json-export/pets-export.json", json.dumps({
        "name": "pets", "tags": [{"name": "cat", "color": "#5db300"}], "id": "x", "version": "2.2.0", "assets": {
            "abc": {"asset": {"format": "png", "id": "abc", "name": "a.png", "size": {"width": 64, "height": 48}},
                    "regions": [{"id": "r", "type": "RECTANGLE", "tags": ["cat"], "boundingBox": {
                        "height": 24, "width": 32, "left": 16, "top": 12}}], "version": "2.2.0"}}}))
    return f"train: vott-json-export\n{NAMES}"


def supervisely(root: Path) -> str:
    put(root, "meta.json", json.dumps({"classes": [{"title": "cat", "shape": "rectangle", "color": "#FF0000"}]}))
    put(root, "ds0/img/a.png", 1)
    put(root, "ds0/ann/a.png.json", json.dumps({
        "description": "", "tags": [], "size": {"height": 48, "width": 64}, "objects": [
            {"classTitle": "cat", "geometryType": "rectangle", "points": {"exterior": [[16, 12], [48, 36]],
                                                                          "interior": []}}]}))
    return f"train: ds0/img\n{NAMES}"


REFUSED: dict[str, Callable[[Path], str]] = {
    "LabelMe": labelme, "VIA": via, "VoTT": vott, "Supervisely": supervisely}


@pytest.mark.parametrize("tool", REFUSED)
def test_an_export_that_is_not_read_is_refused_by_name(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str) -> None:
    put(tmp_path, "export/data.yaml", REFUSED[tool](tmp_path / "export"))
    assert cli.checks(["--data", str(tmp_path / "export" / "data.yaml")]) == InputError.exit_code
    page = capsys.readouterr()
    assert f".json is a file of {tool}, which is not read; export YOLO, COCO or Pascal VOC from it" in page.err
    assert "a training refuses this" in page.err


def test_the_lines_of_a_list_lack_the_same_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    darknet(tmp_path / "export")
    put(tmp_path, "export/data.yaml", f"train: train.txt\n{NAMES}")
    assert cli.checks(["--data", str(tmp_path / "export")]) == 0
    assert "train.txt: its images were found without the leading /home/me/darknet/data/" in caplog.text
    put(tmp_path, "export/train.txt", "/home/me/darknet/data/obj/a.png\nelsewhere/obj/b.png\n")
    with pytest.raises(DatasetError):
        cli.checks(["--data", str(tmp_path / "export")])
