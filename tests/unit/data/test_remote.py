"""Data sets by address: read as the folder is, fetched once, never half."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.data import remote as module
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.data.remote import address_parts, localize, snapshot
from ray_yolo.storage.store import Entry, Fetched, FolderStore
from tests.support.formats import write
from tests.support.jobs import make_dataset
from tests.support.object_storage import upload


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder with a data set of 9 training and 11 validation images."""
    return make_dataset(tmp_path / "bucket" / "set", 9).parent


@pytest.fixture
def address(bucket: Path) -> str:
    return f"file://{bucket}/data.yaml"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that were fetched."""
    keys: list[str] = []
    fetch = FolderStore.fetch
    monkeypatch.setattr(FolderStore, "fetch", lambda self, key, path: (keys.append(key), fetch(self, key, path))[1])
    return keys


def files(folder: str | Path) -> dict[str, bytes]:
    """The visible files of a data set."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*")
            if path.is_file() and path.name[0] != "."}


def test_files_that_match_no_image_are_those_of_the_folder(bucket: Path) -> None:
    check_other_files(bucket, f"file://{bucket}")


def check_other_files(bucket: Path, address: str) -> None:
    """Label files under other spellings and in other folders are found, pictures that are not read are counted."""
    (bucket / "labels/train/000.txt").rename(bucket / "labels/train/000.TXT")
    (bucket / "Labels/train").mkdir(parents=True)
    (bucket / "labels/train/001.txt").rename(bucket / "Labels/train/001.txt")
    (bucket / "labels/train/002.txt").rename(bucket / "images/train/002.txt")
    (bucket / "labels/train/orphan.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    (bucket / "images/train/phone.HEIC").write_bytes(b"some picture")
    if address.startswith("s3://"):
        upload(bucket, address)
    here = read_index(read_description(bucket / "data.yaml"), "train")
    for _ in range(2):  # downloaded, and kept
        description = read_description(address)
        there = read_index(description, "train")
        root = str(description.root)
        assert there.digest == here.digest
        for ours, theirs in zip(here.other_files, there.other_files, strict=True):
            assert str(theirs).replace(root, str(bucket)) == str(ours)
    assert (len(here.other_files.matched), len(here.other_files.labels), len(here.other_files.images)) == (3, 1, 1)
    assert not list(Path(root).rglob("*.HEIC"))


def test_only_files_of_the_splits_are_downloaded(bucket: Path, address: str) -> None:
    expected = files(bucket)
    for name in ("images/unlabeled/a.png", "labels/unlabeled/a.txt", "images/train.zip", "images/train/film.mp4",
                 "other/data.yaml", "images/val/.hidden.png"):
        write(bucket / name, name)
    write(bucket / "Annotations" / "val" / "a.xml", "<annotation/>")
    assert files(snapshot(address).folder) == {**expected, "Annotations/val/a.xml": b"<annotation/>"}


def test_the_next_start_downloads_only_changes_and_drops_removed_files(
        bucket: Path, address: str, fetched: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    messages: list[str] = []
    first = snapshot(address, notify=messages.append)
    content = files(first.folder)
    assert len(fetched) == 1 + len(content)  # the description is read first
    megabytes = sum(map(len, content.values())) / 1e6
    assert messages == [f"{address}: downloading {len(content)} files ({megabytes:.1f} MB) into {first.folder}"]
    fetched.clear()
    assert snapshot(address, notify=messages.append) == first
    assert snapshot(address, first.version) == first
    assert (len(messages), fetched) == (1, ["data.yaml"])
    (bucket / "labels" / "val" / "000.txt").write_text("0 0.5 0.5 0.25 0.25")
    (bucket / "images" / "train" / "003.png").unlink()
    second = snapshot(address)
    assert fetched[2:] == ["labels/val/000.txt"]
    assert files(second.folder) == files(bucket)
    assert files(first.folder) == content, "a training keeps its version"
    same = [os.stat(f"{each.folder}/images/train/000.png").st_ino for each in (first, second)]
    assert same[0] == same[1]
    os.close(module._used.pop(Path(first.folder)))  # as when its process has ended
    assert snapshot(address) == second
    assert not Path(first.folder).exists()
    assert files(second.folder) == files(bucket)


@pytest.mark.parametrize("damage", ["cut", "other bytes", "gone"])
def test_a_damaged_file_is_downloaded_again(address: str, fetched: list[str], damage: str) -> None:
    made = snapshot(address)
    content = files(made.folder)
    path = Path(made.folder, "images/train/004.png")
    if damage == "cut":
        os.truncate(path, 40)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    os.utime(Path(made.folder, "images/val/004.png"))  # of another time, but the same
    fetched.clear()
    assert snapshot(address, made.version) == made
    assert fetched == ["images/train/004.png"]
    assert files(made.folder) == content
    snapshot(address, made.version)
    assert len(fetched) == 1


def test_tags_that_only_resemble_md5_are_accepted_after_two_equal_downloads(
        address: str, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, fetch, keys = FolderStore.walk, FolderStore.fetch, list[str]()

    def encrypted(tag: str) -> str:  # as under SSE-KMS
        return hashlib.md5(tag.encode()).hexdigest()

    def list_all(self: FolderStore, prefix: str = "") -> list[Entry]:
        return [entry._replace(tag=encrypted(entry.tag)) for entry in walk(self, prefix)]

    def fetch_it(self: FolderStore, key: str, path: Path) -> Fetched:
        keys.append(key)
        fetched = fetch(self, key, path)
        return fetched._replace(tag=encrypted(fetched.tag))

    monkeypatch.setattr(FolderStore, "walk", list_all)
    monkeypatch.setattr(FolderStore, "fetch", fetch_it)
    monkeypatch.setattr(module, "_REQUESTS", 2)
    made = snapshot(address)
    assert files(made.folder) == files(bucket)
    assert len(keys) <= len(files(bucket)) + 3


def test_an_object_that_changes_meanwhile_is_an_error(bucket: Path, address: str,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    walk = FolderStore.walk

    def then_change(self: FolderStore, prefix: str = "") -> list[Entry]:
        entries = walk(self, prefix)
        label = bucket / "labels" / "val" / "000.txt"
        label.write_text(label.read_text().replace("0.", "1."))
        return entries

    monkeypatch.setattr(FolderStore, "walk", then_change)
    with pytest.raises(DatasetError):
        snapshot(address)


def test_a_truncated_download_is_an_error(
        bucket: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tag, which is no digest here, matches: only the size reveals it."""
    fetch = FolderStore.fetch

    def cut(self: FolderStore, key: str, path: Path) -> Fetched:
        fetched = fetch(self, key, path)
        return fetched._replace(size=fetched.size - 1) if key.endswith("3.png") else fetched

    monkeypatch.setattr(FolderStore, "fetch", cut)
    with pytest.raises(DatasetError):
        snapshot(address)
    monkeypatch.undo()
    assert files(snapshot(address).folder)["images/train/003.png"] == (bucket / "images/train/003.png").read_bytes()


def test_an_index_has_paths_of_its_machine(bucket: Path, address: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    index = read_index(read_description(address), "train")
    assert localize(index).paths == index.paths
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "other"))
    there = localize(index)
    assert there.digest == index.digest
    assert all(Path(path).is_relative_to(tmp_path / "other") for path in there.paths)
    assert [Path(path).read_bytes() for path in there.paths] == [Path(path).read_bytes() for path in index.paths]
    (bucket / "images" / "train" / "003.png").unlink()
    assert localize(index).paths == there.paths, "a present version is not listed again"
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "third"))
    with pytest.raises(DatasetError):
        localize(index)
    plain = read_index(read_description(bucket), "train")
    assert localize(plain) is plain


def test_a_folders_address_means_its_data_yaml() -> None:
    assert address_parts("s3://b/set/") == address_parts("s3://b/set") == ("s3://b/set", "data.yaml")
    assert address_parts("s3://b/set/coco.yml") == ("s3://b/set", "coco.yml")


@pytest.mark.parametrize("entry", ["{here}/images/train", "{here}/images/*/*.png", "~/images/train",
                                   f"{'../' * 99}{{here}}/images/train"])
def test_files_of_this_machine_are_none_of_a_store(
        bucket: Path, address: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shutil.copytree(bucket, tmp_path / "home")))
    outside = entry.format(here=tmp_path / "home")
    for key in ("path", "train", "val"):
        content = {"train": "images/train", "val": "images/val", key: outside}
        (bucket / "data.yaml").write_text(json.dumps({**content, "names": ["a", "b", "c"]}))
        with pytest.raises(DatasetError, match=f"{address}:1: {key}: "):
            read_description(address)


@pytest.mark.parametrize("name", ["list.txt", "instances_train.json"])
def test_lists_of_a_store_name_no_files_of_this_machine(bucket: Path, address: str, name: str, tmp_path: Path) -> None:
    shutil.copytree(bucket, tmp_path / "home")
    picture = f"{tmp_path}/home/images/train/000.png"
    coco = {"images": [{"id": 1, "file_name": picture}], "categories": [{"id": 1, "name": "a"}], "annotations": []}
    (bucket / name).write_text(json.dumps(coco) if name.endswith("json") else picture)
    (bucket / "data.yaml").write_text(json.dumps({"train": name, "names": ["a"]}))
    with pytest.raises(DatasetError, match=f"{picture} is not in the store"):
        read_index(read_description(address), "train")


def test_a_cache_folder_may_be_relative(bucket: Path, address: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_YOLO_CACHE", "x/../cache")
    index = read_index(read_description(address), "train")
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "other"))
    assert [Path(path).is_file() for path in localize(index).paths] == [True] * 9


def test_a_test_split_without_files_may_be_beside_the_folder(bucket: Path, address: str) -> None:
    """As Roboflow writes it."""
    lines = "train: ../images/train\nval: ../images/val\ntest: ../test/images\nnames: [a, b, c]\n"
    (bucket / "data.yaml").write_text(lines)
    description = read_description(address)
    assert len(read_index(description, "train")) == 9
    assert description.test == (f"{description.root}/test/images",)


def test_a_set_that_does_not_fit_begins_nothing(
        address: str, bucket: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(path.stat().st_size for path in bucket.rglob("*") if path.is_file())
    usage = shutil.disk_usage(bucket)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(DatasetError):
        snapshot(address)
    assert fetched == ["data.yaml"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert snapshot(address).version
