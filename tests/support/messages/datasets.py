"""Descriptions of data sets, their lists and COCO files, sources of predictions, and what is refused about them.

Label files and the remarks about them are in `tests/support/label_cases.py`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from ray_yolo import cli
from ray_yolo.core import files
from ray_yolo.core.cache_folder import build_in_place
from ray_yolo.core.errors import DatasetError
from ray_yolo.data import image_cache
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index, require_boxes
from ray_yolo.data.remote import localize, snapshot
from ray_yolo.data.sources import find_media, read_source
from ray_yolo.data.synthetic import ensure_shapes
from ray_yolo.labels.description import describe
from ray_yolo.storage.store import Fetched, FolderStore
from tests.support.jobs import make_dataset
from tests.support.messages import Refusal
from tests.support.pictures import smooth_picture, write_dataset, write_image

ROW = "1 0.5 0.5 0.5 0.5\n"
CODE = "import os\nurl = 'https://example.com/data'\nos.system(f'curl {url} https://example.com/images.zip')"
"""Of the key `download`."""

COUNT = "must be a number of classes from 1 to 32768, not"
NOT_THERE = "train: '{}' does not exist; looked for …/set/{}; correct the entry or `path`"
DOWNLOAD = ("train: 'nowhere' does not exist; looked for …/set/nowhere (`download` is never run: download the data "
            "yourself, {}); correct the entry or `path`")
KEYS: dict[str, list[dict[str, Any]]] = {
    "names: must list the classes, such as `names: [cat, dog]` or `0: cat`": [
        {"names": []}, {"names": None}, {"names": "cat"}, {"names": 2}],
    "names: the class numbers must be 0 to 1 without gaps": [
        {"names": {0: "cat", 2: "dog"}}, {"names": {True: "cat", 0: "dog"}}, {"names": {"9" * 5000: "cat", 0: "dog"}}],
    "names: the class numbers must be 0 to 0 without gaps": [{"names": {"cat": 0}}],
    "names: None is not a class name; put it in quotes": [{"names": ["cat", None]}],
    "names: True is not a class name; put it in quotes": [{"names": ["cat", True]}],
    "names: ['cat'] is not a class name; put it in quotes": [{"names": [["cat"]]}],
    "names: ' ' is not a class name; put it in quotes": [{"names": ["cat", " "]}],
    "names: 'a\\nb' contains line ends or control characters": [{"names": ["a\nb"]}],
    "names: '\\x1b[31m' contains line ends or control characters": [{"names": ["\x1b[31m"]}],
    "names: '\\ud800' contains line ends or control characters": [{"names": ["\ud800"]}],
    "names: 'a\\u2028b' contains line ends or control characters": [{"names": ["a\u2028b"]}],
    "names: 32769 classes are more than 32768": [{"names": ["x"] * (2**15 + 1)}],
    "nc is 3, but names has 2 entries; make them agree or drop nc": [{"nc": 3}],
    "num_classes is 5, but names has 2 entries; make them agree or drop num_classes": [{"num_classes": 5}],
    "number_of_classes is 5, but names has 2 entries; make them agree or drop number_of_classes": [
        {"number_of_classes": 5}],
    f"nc: {COUNT} 0": [{"nc": 0}],
    f"nc: {COUNT} -1": [{"names": None, "nc": -1}],
    f"nc: {COUNT} 32769": [{"names": None, "nc": 2**15 + 1}],
    f"nc: {COUNT} 1.5": [{"nc": 1.5}],
    f"nc: {COUNT} True": [{"nc": True}],
    f"nc: {COUNT} 'many'": [{"nc": "many"}],
    f"nc: {COUNT} '999999999999...9999999999999'": [{"nc": "9" * 5000}],
    f"num_classes: {COUNT} 'eighty'": [{"num_classes": "eighty"}],
    "path: expected a path, found 3": [{"path": 3}],
    "train: expected a path, found 3": [{"train": 3}],
    "train: expected a path, found None": [{"train": ["images/train", None]}],
    "train: expected a path, found {'a': 1}": [{"train": {"a": 1}}],
    "train: expected a path, found 'images\\x00train'": [{"train": "images\0train"}],
    "there is neither a `train` nor a `val` split; add lines such as `train: images/train`": [
        {"train": None, "val": None}],
    NOT_THERE.format("nowhere", "nowhere"): [{"train": "nowhere"}],
    NOT_THERE.format("nothing/*.jpg", "nothing/*.jpg"): [{"train": "nothing/*.jpg"}],
    NOT_THERE.format("~no-such-user/x", "~no-such-user/x"): [{"train": "~no-such-user/x"}],
    NOT_THERE.format("x" * 5000, "x" * 5000): [{"train": "x" * 5000}],
    NOT_THERE.format("images/train", "nowhere/images/train"): [{"path": "nowhere"}],
    NOT_THERE.format("images/train", "~no-such-user/x/images/train"): [{"path": "~no-such-user/x"}],
    "train: '../train/images' may be …/train/images or …/set/train/images, and both exist (Roboflow writes `../` for "
    "its own folder); give the absolute path of the one that is meant": [{"train": "../train/images"}],
    DOWNLOAD.format("https://example.com/data.zip"): [
        {"train": "nowhere", "download": "https://example.com/data.zip"}],
    DOWNLOAD.format("https://example.com/data, https://example.com/images.zip"): [
        {"train": "nowhere", "download": CODE}],
    DOWNLOAD.format("https://example.com/images.zip"): [
        {"train": "nowhere", "download": "bash get.sh https://example.com/images.zip"}],
}
"""What data.yaml says, over the keys of a good one."""

CATEGORIES = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
PICTURE = {"id": 0, "file_name": "a.png"}
BOX = {"id": 0, "image_id": 0, "category_id": 7, "bbox": [0, 0, 9, 9]}
FORM = "expected COCO's images, annotations and categories"


def coco(images: Any = (PICTURE,), categories: Any = CATEGORIES, annotations: Any = ()) -> dict[str, Any]:
    """The content of a COCO file."""
    return {"images": images, "categories": categories, "annotations": annotations}


COCO: dict[str, list[object]] = {
    "is not a JSON file: …; write or download it again": ["", "{", "[" * 100_000],
    f"has no list of images; {FORM}": ["[]", "{}", coco(1, []), coco([3], [])],
    f"has no list of categories; {FORM}": [{"images": [], "annotations": []}],
    "an entry has no file_name: {'id': 1}": [coco([{"id": 1}])],
    "an entry has no id: {}": [coco(categories=[{}])],
    "an entry has the file_name 'a\\x00.png', which no file can have": [coco([{"id": 1, "file_name": "a\0.png"}])],
    "an entry has the file_name '\\ud800.png', which no file can have": [coco([{"id": 1, "file_name": "\ud800.png"}])],
    "none of its images is in …/images/c, …": [
        coco([{"id": 1, "file_name": "z.png"}]), coco([{"id": 1, "file_name": "x" * 5000}])],
    "…/images/a.png and …/images/b.png have the same id 0; give each image its own id": [
        coco([PICTURE, {"id": 0, "file_name": "b.png"}])],
    "its 0 categories do not match the 2 classes of the description. Categories: . Classes: cat, dog. Not a class: ; "
    "correct `names` or the file": [coco([{}], [])],
    "its 3 categories do not match the 2 classes of the description. Categories: 9: Katze, 7: Hund, 8: Maus. Classes: "
    "cat, dog. Not a class: 7: Hund; correct `names` or the file": [
        coco(categories=[{"id": 9, "name": "Katze"}, {"id": 7, "name": "Hund"}, {"id": 8, "name": "Maus"}],
             annotations=[BOX])],
    # With the root of Roboflow, there would be as many categories as classes, and Katze, the second one, would be dog.
    "its 1 categories do not match the 2 classes of the description. Categories: 1: Katze. Classes: cat, dog. Not a "
    "class: 1: Katze; correct `names` or the file": [
        coco(categories=[{"id": 0, "name": "animals", "supercategory": "none"},
                         {"id": 1, "name": "Katze", "supercategory": "animals"}])],
    "the key 'annotations' has two values in an object, and only the last one would be read; merge them": [
        '{"images": [], "categories": [], "annotations": [], "annotations": [1]}'],
    "the key 'id' has two values in an object, and only the last one would be read; merge them": [
        '{"images": [{"id": 0, "file_name": "a.png", "id": 1}], "categories": [], "annotations": []}'],
}
"""Contents of a COCO file, c.json, beside the images a.png and b.png."""

TOOLS: dict[str, Any] = {
    "LabelMe": {"version": "5.0", "shapes": [], "imagePath": "a.png", "imageHeight": 48},
    "VIA": {"a.png123": {"filename": "a.png", "size": 123, "regions": [], "file_attributes": {}}},
    "VoTT": {"asset": {"name": "a.png"}, "regions": [], "version": "2.1.0"},
    "Supervisely": {"description": "", "size": {"height": 48, "width": 64}, "objects": []},
    "Label Studio": [{"id": 1, "data": {"image": "a.png"}, "annotations": []}],
    "CreateML": [{"image": "a.png", "annotations": []}],
}
"""Contents of a.json beside a.png, by the tool that wrote it."""

OF_PICTURE = "is the address of a picture, and addresses are read as videos; save the picture, and give its path"
SOURCES = {
    "nowhere": "nowhere: no such file or folder", "²": "²: no such file or folder",
    "ftp://host/a.mp4": "ftp://host/a.mp4: no such file or folder",
    "file:///etc/hosts": "file:///etc/hosts: no such file or folder",
    "*.gif": "*.gif: no file matches this pattern",
    "x.pdf": "no images and no videos in x.pdf (looked for …)",
    "pictures": "no images and no videos in pictures (looked for …); 1 picture (pictures/b.heic) in formats that are "
                "not read; use JPEG or PNG",
    "list.txt": "list.txt:2: there is no file 'no.jpg'; looked for no.jpg",
    "http://cam/a.jpg": f"http://cam/a.jpg: {OF_PICTURE}",
    "https://me:secret@host/b.PNG?size=2": f"https://***@host/b.PNG?size=2: {OF_PICTURE}",
}
"""Sources by name: of a folder with x.pdf, a list with a file that is missing, and a folder with a .heic file."""

BGR = np.ascontiguousarray(smooth_picture(60, 80)[..., ::-1])
TENSOR = torch.from_numpy(BGR.copy()).permute(2, 0, 1) / 255
OTHER = ("{}; expected a path, (height, width, 3) uint8 BGR pixels, a PIL image, a tensor, the bytes of a file, or a "
         "list of these")
SHAPE = "a tensor of {}; expected floats (B, 3, height, width) in 0..1"
VALUES = ("a tensor with values from {}; expected 0..1 (divide 0..255 by 255, and undo a normalisation by mean and "
          "deviation)")
OBJECTS: list[tuple[Any, str]] = [
    (None, OTHER.format("NoneType")), (3.5, OTHER.format("float")),
    (BGR.astype(np.float32), OTHER.format("float32 (60, 80, 3)")),
    (np.zeros((0, 4, 3), np.uint8), OTHER.format("uint8 (0, 4, 3)")),
    (np.zeros((4, 4, 2), np.uint8), OTHER.format("uint8 (4, 4, 2)")),
    (torch.zeros(4, 4), SHAPE.format("torch.float32 (4, 4)")),
    (torch.zeros(1, 4, 8, 8), SHAPE.format("torch.float32 (4, 8, 8)")),
    (torch.zeros(3, 8, 8, dtype=torch.uint8), SHAPE.format("torch.uint8 (3, 8, 8)")),
    (TENSOR * 255, VALUES.format("0 to 255")), (TENSOR * 1.1, VALUES.format("0 to 1.1")),
    (TENSOR * -0.1, VALUES.format("-0.1 to -0")), (TENSOR * float("nan"), VALUES.format("nan to nan")),
    ([BGR, "nowhere"], "nowhere: no such file or folder"),
]
"""Sources of a Python call."""


FINDINGS = {
    ROW + "0 0.5 0.5 0 0\n": "1 findings: …/labels/a.txt:2: …",
    ROW + "0 0.5 0.5 nan 0.5\n7 0.5 0.5 0.5 0.5\noops\n":
        "3 findings: …/labels/a.txt:2: …; …/labels/a.txt:3: …; …/labels/a.txt:4: …",
    ROW + "7 0.5 0.5 0.5 0.5\n" * 25: "25 findings: …/labels/a.txt:2: …; …/labels/a.txt:11: …; and 15 more",
}
"""Rows of labels/a.txt, and what --strict says about them."""

DIFFICULT = ("<annotation><size><width>64</width><height>48</height></size><object><name>cat</name><difficult>1"
             "</difficult><bndbox><xmin>9</xmin><ymin>9</ymin><xmax>40</xmax><ymax>40</ymax></bndbox>"
             "</object></annotation>")
OTHER_NUMBER = ("gives class 'cat' the number 1, but …/data.yaml 0, and labels have numbers alone; correct the one "
                "that is wrong, or remove this file if it is out of date")
NAMES: list[tuple[str, bytes]] = [
    ("classes.txt", b"dog\ncat\n"), ("obj.names", b"dog\r\ncat\r\n"), ("labels/classes.txt", b"Dog\ncat\n"),
    ("images/classes.txt", "0: dog\n1: cat\n".encode("utf-16")), ("labels/_darknet.labels", b"0 dog\n1 cat\n"),
    ("notes.json", b'{"categories": [{"id": 1, "name": "cat"}, {"id": 0, "name": "dog"}]}'),
]
"""Files that give the classes other numbers than the description."""

OUTSIDE = ("is not below the folder of this file, where a data set in a store has all its files; give a path relative "
           "to this folder")
DESCRIPTIONS = {
    "train: [": "file:///…/bucket/set/data.yaml:2: not YAML: …",
    "train: images/trian\nval: images/val\nnames: [a]":
        "file:///…/bucket/set/data.yaml:1: train: 'images/trian' does not exist; looked for file:///…/bucket/set/images/"
        "trian; correct the entry or `path`",
    "path: /somewhere\ntrain: images/train\nnames: [a]":
        f"file:///…/bucket/set/data.yaml:1: path: '/somewhere' {OUTSIDE}",
    "train: /images/train\nnames: [a]": f"file:///…/bucket/set/data.yaml:1: train: '/images/train' {OUTSIDE}",
    "names: [a]\ntrain: images/train\nval: [~/x/*.jpg]":
        f"file:///…/bucket/set/data.yaml:3: val: '~/x/*.jpg' {OUTSIDE}",
    "train: {annotations: images, images: ../../..}\nnames: [a]":
        f"file:///…/bucket/set/data.yaml:1: train: '../../..' {OUTSIDE}",
}
"""Descriptions in a bucket; the messages name no file of this machine."""

CHANGED = "data: file:///…/bucket/set/data.yaml: …images/train/003.png: the download does not match the listing (…)…"
CACHE = "the cache cannot be written ({}); set RAY_YOLO_CACHE to a folder that can be"
NO_LIST = "…/list.txt: cannot be read as text; expected one path per line"
NO_BOX = ("…/data.yaml: train: none of its 1 images has a box; looked for labels in …/labels/*.txt, …/images/*.xml; "
          "{}; correct the paths, or add --allow-empty if this is intended")


def _make_folders() -> None:
    for split in ("train", "val"):
        os.makedirs(f"set/images/{split}")
        os.makedirs(f"set/{split}/images")
    os.makedirs("train/images")


def _describe(keys: dict[str, Any]) -> None:
    _make_folders()
    content = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"], **keys}
    describe({key: value for key, value in content.items() if value is not None}, Path("set/data.yaml").absolute())


def _read_folder(*files: str) -> None:
    os.mkdir("set")
    for file in files:
        Path("set", file).touch()
    read_description("set")


def _read_text(text: str) -> None:
    Path("data.yaml").write_text(text)
    read_description("data.yaml")


def _scan(source: object, **keys: Any) -> None:
    read_index(describe({"train": source, "names": ["cat", "dog"], **keys}, Path("data.yaml").absolute()), "train")


def _scan_coco(content: object) -> None:
    write_dataset(Path.cwd(), dict.fromkeys("ab"))
    Path("c.json").write_text(content if isinstance(content, str) else json.dumps(content))
    _scan("c.json")


def _scan_list(content: bytes) -> None:
    write_dataset(Path.cwd(), {"a": ROW})
    Path("list.txt").write_bytes(content)
    _scan("list.txt")


def _scan_endless(name: str, make: Callable[[str], object]) -> None:
    write_dataset(Path.cwd(), {"a": ROW})
    make(name)
    _scan(name)


def _require_of_unusable() -> None:
    """Require boxes of an image without labels and of one whose only row cannot be used."""
    description = write_dataset(Path.cwd(), {"a": None, "b": "0 50 50 20 20\n"})
    require_boxes(read_index(description, "train"), description, "train")


def _require(files: dict[str, str]) -> None:
    """Require boxes of a folder of one image with these files."""
    write_dataset(Path.cwd(), {"a": None})
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    description = describe({"train": "images", "names": ["cat", "dog"]}, Path("data.yaml").absolute())
    require_boxes(read_index(description, "train"), description, "train")


def _scan_strictly(rows: str) -> None:
    read_index(write_dataset(Path.cwd(), {"a": rows}), "train", strict=True)


def _scan_empty() -> None:
    os.mkdir("images")
    Path("images/a.jpg").touch()
    _scan("images")


def _scan_file(content: str) -> None:
    """A file of another tool in the place of a COCO file."""
    Path("instances_a.json").write_text(content)
    _scan("instances_a.json")


def _scan_names(file: str, content: bytes) -> None:
    """A data set of cats and dogs beside a file of other names."""
    description = write_dataset(Path.cwd(), {"a": ROW})
    Path(file).write_bytes(content)
    read_index(description, "train")


def _scan_on_failing_storage() -> None:
    for number in range(12):
        write_image(Path(f"images/{number:02}.png"), smooth_picture(48, 64))
    with mock.patch.object(files, "_PAUSES", ()), mock.patch.object(Path, "read_bytes", side_effect=OSError(
            errno.EIO, "Input/output error")):
        _scan("images")


def _scan_on_storage_without_lists() -> None:
    write_image(Path("images/a.png"), smooth_picture(48, 64))
    error = OSError(errno.EIO, "Input/output error", str(Path("images").absolute()))
    with mock.patch.object(os, "scandir", side_effect=error):
        _scan("images")


def _wait_for_a_lock() -> None:
    Path(".lock").touch()
    with Path(".lock").open() as other, Path(".lock").open() as mine, \
            mock.patch.object(image_cache, "_LOCK_SECONDS", 0.1):
        fcntl.flock(other, fcntl.LOCK_EX)
        image_cache._lock(Path(".lock"), mine, fcntl.LOCK_EX)


def _build_on_lost_storage() -> None:
    build_in_place(Path("cache/w.pt"), mock.Mock(side_effect=OSError("the server hung up")))


def _bucket() -> str:
    """The address of a folder with a data set."""
    return f"file://{make_dataset(Path('bucket/set').absolute(), 9)}"


def _fetch_description(text: str) -> None:
    address = _bucket()
    Path("bucket/set/data.yaml").write_text(text)
    read_description(address)


def _fetch_from_refusing_storage() -> None:
    with mock.patch.object(FolderStore, "fetch", side_effect=OSError("AccessDenied")):
        snapshot(_bucket())


def _fetch_to_a_full_disk() -> None:
    with mock.patch.object(shutil, "disk_usage", return_value=shutil.disk_usage(".")._replace(free=10)):
        snapshot(_bucket())


def _fetch_what_changes(key: str) -> None:
    """Fetch a data set whose file changes after it was listed."""
    fetch = FolderStore.fetch

    def cut(self: FolderStore, name: str, path: Path) -> Fetched:
        fetched = fetch(self, name, path)
        return fetched._replace(size=fetched.size - 1) if name == key else fetched

    with mock.patch.object(FolderStore, "fetch", cut):
        snapshot(_bucket())


def _localize_what_has_changed() -> None:
    """Fetch a data set on a second machine after it has changed."""
    index = read_index(read_description(_bucket()), "train")
    Path("bucket/set/images/train/003.png").unlink()
    with mock.patch.dict(os.environ, {"RAY_YOLO_CACHE": str(Path("other").absolute())}):
        localize(index)


def _make_shapes(variable: str) -> None:
    """Make a built-in data set where a file is in the place of a folder."""
    Path("file").touch()
    with mock.patch.dict(os.environ, {variable: str(Path("file").absolute())}):
        if variable != "RAY_YOLO_CACHE":
            del os.environ["RAY_YOLO_CACHE"]
        ensure_shapes("shapes8")


def _compare_versions(*runs: str) -> None:
    """Compare a version with one whose validation images are empty files, or with itself for two runs."""
    old, new = (make_dataset(Path(name).absolute(), 6) for name in ("old", "new"))
    for file in (new.parent / "images/val").iterdir():
        file.write_bytes(b"")
    cli.checks(["--data", str(old if runs else new), "--against", str(old), *(["--runs", *runs] if runs else [])])


def _scan_unread() -> None:
    os.mkdir("images")
    Path("images/a.heic").touch()
    _scan("images")


def _find(source: str) -> None:
    Path("x.pdf").touch()
    Path("list.txt").write_text("x.pdf\nno.jpg\n")
    os.mkdir("pictures")
    Path("pictures/b.heic").touch()
    find_media(source)


def _refusals() -> Iterator[Refusal]:
    def case(name: str, message: str, cause: Callable[[], object]) -> Refusal:
        return Refusal(name, message, cause, DatasetError)

    for message, descriptions in KEYS.items():
        for keys in descriptions:
            yield case(f"{keys!r:.60}", f"…/set/data.yaml: {message}", partial(_describe, keys))
    for path in ("coco.yaml", "~no-such-user/data.yaml", "x" * 5000, "a\0b", ""):
        yield case(f"no {path!r:.30}", f"{path}: no such file, and no built-in data set has this name (shapes, "
                   "shapes8, shapes1k); give the path of a data-set YAML", partial(read_description, path))
    yield case("two descriptions", "set: holds several YAML files (blood.yaml, other.yml); give the path of one",
               partial(_read_folder, "blood.yaml", "other.yml"))
    yield case("no description", "set: holds no YAML file; give the path of a data-set YAML", _read_folder)
    yield Refusal("no mapping", "data.yaml:1: the file must consist of `key: value` lines",
                  partial(_read_text, "- a\n- b\n"))
    yield case("no test split",
               "data.yaml: there is no `test` split; add a line such as `test: images/test`", lambda: describe(
        {"train": ".", "names": ["cat"]}, Path("data.yaml")).split("test"))
    for message, contents in COCO.items():
        for content in contents:
            yield case(f"COCO: {content!r:.100}", f"…/c.json: {message}", partial(_scan_coco, content))
    yield case("a list with a missing image",
               "…/list.txt:2: there is no file 'images/z.png'; looked for …/images/z.png",
               partial(_scan_list, b"images/a.png\nimages/z.png\n"))
    yield case("a list that is no text", NO_LIST, partial(_scan_list, b"\xff\xfe\0"))
    no_images = "…/data.yaml: train: no images in …/list.txt (looked for …); correct the path"
    for kind, make, message in (
            ("pipe", os.mkfifo, NO_LIST), ("device", partial(os.symlink, "/dev/zero"), NO_LIST),
            ("folder", os.mkdir, no_images)):
        yield case(f"list.txt is a {kind}", message, partial(_scan_endless, "list.txt", make))
        yield case(f"a COCO file is a {kind}", "…/instances_train.json: is not a file; expected COCO's annotations",
                   partial(_scan_endless, "instances_train.json", make))
    for tool, content in TOOLS.items():
        yield case(f"a file of {tool}", NO_BOX.format(
            f"…/images/a.json is a file of {tool}…, which is not read; export YOLO, COCO or Pascal VOC from it"),
            partial(_require, {"images/a.json": json.dumps(content)}))
    yield case("labels of no image",
               NO_BOX.format("2 label files (…/labels/x.txt, …/labels/y.txt) without an image"),
               partial(_require, {"labels/x.txt": ROW, "labels/y.txt": ROW}))
    yield case("pictures that are not read", "…/data.yaml: train: no images in …/images (looked for …; 1 picture "
               "(…/images/a.heic) in formats that are not read: use JPEG or PNG); correct the path", _scan_unread)
    for rows, message in FINDINGS.items():
        yield case(f"--strict: {rows!r:.60}", f"…/data.yaml: train: {message}; correct the files or drop --strict",
                   partial(_scan_strictly, rows))
    yield case("an empty folder", "…/data.yaml: train: no images in …/images (looked for …); correct the path",
               lambda: (os.mkdir("images"), _scan("images")))
    yield case("an empty picture", "…/data.yaml: train: none of its images can be used: …/images/a.jpg: is empty (0 "
               "bytes)…", _scan_empty)
    for file, content in NAMES:
        yield case(f"names in {file}", f"…/{file}: {OTHER_NUMBER}", partial(_scan_names, file, content))
    yield case("no usable row", NO_BOX.format(
        "1 rows and images are unusable, the first: …/labels/b.txt:1: has values outside 0 to 1; …"),
               _require_of_unusable)
    yield case("objects marked difficult", NO_BOX.format("…/images/a.xml: …the first of 1 objects marked difficult; "
               "…--keep-difficult…"), partial(_require, {"images/a.xml": DIFFICULT}))
    yield case("storage that fails", "…/data.yaml: train: 12 of 12 images or their labels cannot be read, more than "
               "10%: …/images/00.png: …; check the storage, and run the same command again", _scan_on_failing_storage)
    yield case("a folder that cannot be listed", "…/here/images: cannot be listed: Input/output error; check the "
               "storage, and run the same command again", _scan_on_storage_without_lists)
    yield Refusal("a locked cache", ".lock: another process has locked it for 0.1 s; end that process, or use --cache "
                  "none", _wait_for_a_lock, TimeoutError)
    yield Refusal("a cache that hangs up", f"cache: {CACHE.format('the server hung up')}", _build_on_lost_storage)
    for text, message in DESCRIPTIONS.items():
        yield case(f"in a bucket: {text!r:.20}", message, partial(_fetch_description, text))
    yield case("a bucket that refuses", "data: file:///…/bucket/set/data.yaml: AccessDenied; see that the "
               "environment's credentials may list and read it", _fetch_from_refusing_storage)
    yield case("a full disk", "data: … files of … GB do not fit in …, where 1e-08 GB are free; free some, or set "
               "RAY_YOLO_CACHE to a folder of a larger disk, on every node", _fetch_to_a_full_disk)
    yield case("a file that changes meanwhile", CHANGED, partial(_fetch_what_changes, "images/train/003.png"))
    yield case("a bucket that has changed", "data: file:///…/bucket/set/data.yaml has changed since this command was "
               "started; start it again", _localize_what_has_changed)
    yield Refusal("RAY_YOLO_CACHE is a file", f"…/file: {CACHE.format('File exists')}",
                  partial(_make_shapes, "RAY_YOLO_CACHE"))
    yield Refusal("XDG_CACHE_HOME is a file", f"…/file/ray_yolo: {CACHE.format('Not a directory')}",
                  partial(_make_shapes, "XDG_CACHE_HOME"))
    yield Refusal("a version without a usable image", "…/new/data.yaml: val: none of its images can be used: …",
                  _compare_versions)
    yield Refusal("runs without a validation", "runs: …: its log has no validation with results of classes; give the "
                  "folder of a run, …", partial(_compare_versions, "x", "y"))
    for tool, content in TOOLS.items():
        yield case(f"a source of {tool}", f"…/instances_a.json: is a file of {tool}…, which is not read; export YOLO, "
                   "COCO or Pascal VOC from it", partial(_scan_file, json.dumps(content)))
    for source, message in SOURCES.items():
        yield Refusal(f"source {source}", f"source: {message}", partial(_find, source))
    for number, (thing, message) in enumerate(OBJECTS):
        yield Refusal(f"source: {number}: {type(thing).__name__}", f"source: {message}",
                      partial(read_source, thing))


REFUSALS = list(_refusals())
