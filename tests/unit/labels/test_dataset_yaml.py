from pathlib import Path
from typing import Any

import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.labels.description import DatasetDescription, describe
from tests.support.jobs import make_dataset
from tests.support.messages.datasets import CODE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / "images" / split).mkdir(parents=True)
        (tmp_path / split / "images").mkdir(parents=True)
    (tmp_path / "train.txt").write_text("images/train/a.jpg\n")
    return tmp_path


def read(root: Path, **keys: Any) -> DatasetDescription:
    content = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"], **keys}
    return describe({key: value for key, value in content.items() if value is not None}, root / "data.yaml")


def test_splits_are_absolute_and_names_in_order(root: Path) -> None:
    description = read(root)
    assert description.train == (str(root / "images/train"),)
    assert description.val == (str(root / "images/val"),)
    assert description.test == ()
    assert description.names == ("cat", "dog")


def test_a_folder_means_its_only_description(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set", 3).parent
    (folder / "data.yaml").rename(folder / "blood.yaml")
    assert read_description(folder).file == str(folder / "blood.yaml")
    (folder / "other.yml").touch()
    with pytest.raises(DatasetError):
        read_description(folder)
    (folder / "blood.yaml").rename(folder / "data.yaml")
    assert read_description(folder).file == str(folder / "data.yaml")


def test_names_may_be_a_list_or_numbered(root: Path) -> None:
    for names in (["cat", "dog"], {0: "cat", 1: "dog"}, {1: "dog", 0: "cat"}, {"0": "cat", "1": "dog"}):
        assert read(root, names=names).names == ("cat", "dog"), names


def test_nc_alone_numbers_the_classes(root: Path) -> None:
    assert read(root, names=None, nc=2).names == ("class0", "class1")


def test_a_download_address_is_never_followed(root: Path) -> None:
    assert read(root, download="https://example.com/data.zip").names == ("cat", "dog")


@pytest.mark.parametrize("download", [CODE, "bash get.sh https://example.com/images.zip",
                                      ["https://example.com/images.zip"]])
def test_download_code_is_ignored_and_reported_if_the_data_exist(root: Path, download: object) -> None:
    """As in YOLOv5's own coco.yaml."""
    (finding,) = read(root, download=download).findings
    assert finding.dropped is False
    assert finding.where.endswith("data.yaml")
    assert "never run" in finding.what
    assert read(root, download="https://example.com/images.zip").findings == read(root).findings == ()


def test_names_shared_by_several_classes_are_reported(root: Path) -> None:
    findings = read(root, names=["cat", "dog", "cat", "owl", "dog", "cat"]).findings
    assert [(finding.what.partition(";")[0], finding.dropped) for finding in findings] == [
        ("names: 'cat' is the name of 3 classes (0, 2, 5)", False),
        ("names: 'dog' is the name of 2 classes (1, 4)", False)]


@pytest.mark.parametrize(("key", "value", "says"), [
    ("valid", "images/other", "valid: is not read, and says something else than `val`, which is"),
    ("Train", "images/other", "Train: is not read, and says something else than `train`, which is"),
    ("classes", ["dog", "cat"], "classes: is not read, and says something else than `names`, which is"),
    ("channels", 1, "channels: 1 is not used; every image is read as RGB"),
    ("channels", "4", "channels: '4' is not used"),
    ("train_labels", "labels2/train", "'train_labels': is not read; labels are those beside the images"),
    ("label_path", "labels2", "'label_path': is not read"), ("annotations", "a.json", "'annotations': is not read"),
    ("exclude", ["a.jpg"], "'exclude': is not read"), ("single_cls", True, "'single_cls': is not read"),
    ("labels", None, ""), ("single_cls", False, ""), ("license", "MIT", ""), ("roboflow", {"version": 1}, ""),
    ("valid", "images/val/", ""), ("classes", ["cat", "dog"], ""), ("classes", {"0": "cat", "1": "dog"}, ""),
    ("categories", {"cat": ["animal"]}, ""), ("channels", None, ""), ("channels", 3.0, ""),
    ("valid", "images/val", ""), ("classes", 2, ""), ("channels", 3, ""), ("num_classes", 2, ""), ("valid", None, ""),
])
def test_a_second_statement_is_reported_if_it_differs(root: Path, key: str, value: object, says: str) -> None:
    content = {"train": "images/train", "val": "images/val", "names": ["cat", "dog"], key: value}
    found = [finding.what for finding in describe(content, root / "data.yaml").findings]
    assert len(found) == bool(says)
    assert not says or found[0].startswith(says)


def test_path_starts_from_the_file_and_may_be_absolute(root: Path, tmp_path: Path) -> None:
    (root / "sub").mkdir()
    content = {"train": "train", "names": ["cat"]}
    for path in ("../images", str(root / "images")):
        assert describe({**content, "path": path}, root / "sub" / "data.yaml").train == (str(root / "images/train"),)


def test_the_file_may_be_named_relative_to_the_current_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert describe({"train": "train.txt", "names": ["cat"]}, Path("data.yaml")).train == (str(root / "train.txt"),)


def test_roboflows_leading_dots_are_tried_both_ways(root: Path) -> None:
    assert read(root, train="../train/images").train == (str(root / "train/images"),)
    (root.parent / "train" / "images").mkdir(parents=True)
    with pytest.raises(DatasetError):
        read(root, train="../train/images")
    (root / "train" / "images").rename(root / "elsewhere")
    assert read(root, train="../train/images").train == (str(root.parent / "train/images"),)


def test_splits_may_be_lists_of_folders_files_and_patterns(root: Path) -> None:
    (root / "images" / "train" / "a.jpg").touch()
    description = read(root, train=["images/train", "train.txt", "images/*/*.jpg"])
    assert description.train == tuple(str(root / part) for part in ("images/train", "train.txt", "images/*/*.jpg"))


def test_a_missing_test_split_is_an_error_only_when_used(root: Path) -> None:
    assert read(root, test="images/test").test == (str(root / "images/test"),)
    with pytest.raises(DatasetError):
        read(root).split("test")


def test_a_file_is_read_with_its_names_as_spelled(root: Path) -> None:
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnc: 3\nnames: [yes, 007, true]\n")
    assert read_description(root / "data.yaml").names == ("yes", "007", "true")
    assert read_description(root) == read_description(root / "data.yaml")
