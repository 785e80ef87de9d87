"""Data sets by address: read as the folder is, fetched once, never half."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.core.files import HashingWriter
from ray_yolo.data import remote as module
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.data.remote import MANIFEST, snapshot
from ray_yolo.storage.store import ObjectStore, open_store
from tests.support.formats import FORMATS, write
from tests.support.object_storage import upload
from tests.unit.data.test_remote import address, bucket, check_other_files, files

__all__ = ["address", "bucket"]  # fixtures

SLOW = """
import sys
from ray_yolo.data.remote import snapshot
from ray_yolo.storage.store import FolderStore
fetch = FolderStore.fetch
def slow(self, key, path):
    print(f"{key}\\n", end="", flush=True)
    if key.endswith(sys.argv[2]):
        path.write_bytes((self._folder / key).read_bytes()[:40])
        sys.stdin.read()
    return fetch(self, key, path)
FolderStore.fetch = slow
print("version", snapshot(sys.argv[1]).version, flush=True)
"""


def start(address: str, key: str = "-") -> subprocess.Popen[str]:
    """Another process that downloads the snapshot. At one key it waits until its input is closed."""
    return subprocess.Popen([sys.executable, "-c", SLOW, address, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("layout", "change"), [
    *((layout, {}) for layout in FORMATS), ("yolo", {"train: images/train": "train: ../images/train"}),
    ("yolo", {"train: images/train": "train: train.txt"}), ("yolo", {"images/val": "images/v*/*"}),
    ("coco", {"annotations/instances_train.json": "{annotations: annotations/instances_train.json, images: train}"}),
    ("coco", {"train: annotations/instances_train.json": "train: annotations"}),
])
def test_a_snapshot_is_read_like_the_folder(tmp_path: Path, layout: str, change: dict[str, str]) -> None:
    root = tmp_path / "bucket" / "a set"
    yaml, _ = FORMATS[layout](root)
    if layout == "yolo":
        write(root / "train.txt", "\n".join(f"./{path.relative_to(root)}" for path in root.glob("images/train/*")))
    for old, new in change.items():
        write(yaml, yaml.read_text().replace(old, new))
    here, there = read_description(yaml), read_description(f"file://{root}")
    assert there.snapshot
    for split in ("train", "val"):
        one, other = read_index(here, split), read_index(there, split)
        assert one.digest == other.digest
        assert len(one.classes)
        assert [os.path.relpath(path, root) for path in one.paths] == [
            os.path.relpath(path, there.snapshot.folder) for path in other.paths]


def test_files_that_match_no_image_are_those_of_the_folder_in_s3(bucket: Path, s3: None) -> None:
    check_other_files(bucket, "s3://bucket/other")


def test_objects_of_s3_with_unusual_names_are_downloaded(bucket: Path, s3: None) -> None:
    for name in ("ä b#%41.png", "c+d&e=f.png"):
        shutil.copy(bucket / "images" / "val" / "000.png", bucket / "images" / "val" / name)
    upload(bucket, "s3://bucket/named")
    open_store("s3://bucket/named").put("images/val/", b"")  # as consoles make folders
    assert files(snapshot("s3://bucket/named").folder) == files(bucket)


def test_two_processes_download_once(bucket: Path, address: str) -> None:
    first = start(address, "data.yaml")
    assert first.stdout
    first.stdout.readline()
    second = start(address)
    assert second.stderr
    warned = second.stderr.readline()
    keys = first.communicate(timeout=60)[0].split()
    output = second.communicate(timeout=60)[0].split()
    assert sorted(keys[:-2]) == sorted(files(bucket)), "the description was read above"
    assert output[:1] == ["data.yaml"]
    assert output[-2:] == keys[-2:]
    assert len(output) == 3
    assert f"{address}: another process downloads it to this machine; waiting for at most 60 min" in warned


def test_waiting_for_another_process_is_limited(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
    with start(address, "data.yaml") as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(DatasetError, match=r"another process of this machine has been downloading it.*end it"):
            snapshot(address)
        other.kill()


def test_an_interrupted_download_is_not_complete(bucket: Path, address: str) -> None:
    with start(address, "train/005.png") as process:
        assert process.stdout
        while "train/005.png" not in process.stdout.readline():
            pass
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    (top,) = module.cache_folder().glob("data/*")
    assert not list(top.glob(f"*/{MANIFEST}"))
    (made,) = (path for path in top.iterdir() if path.is_dir() and path.name[0] != ".")
    half = files(made)
    assert "images/train/005.png" not in half
    assert half.items() <= files(bucket).items()
    (made / "images/train/001.png").write_bytes(b"torn by a crash of the machine")
    assert files(snapshot(address).folder) == files(bucket)
    assert not list((top / ".coming").glob("[!d]*"))


def test_files_of_an_interrupted_download_are_kept_if_the_tag_is_their_md5(bucket: Path, s3: None) -> None:
    address = "s3://bucket/killed"
    upload(bucket, address)
    made = snapshot(address)
    Path(made.folder, MANIFEST).unlink()
    Path(made.folder, "images/train/001.png").write_bytes(b"torn")
    messages: list[str] = []
    assert snapshot(address, notify=messages.append) == made
    assert messages[0].startswith(f"{address}: downloading 1 files (")
    assert files(made.folder) == files(bucket)


def test_content_that_mismatches_its_tag_is_downloaded_again(bucket: Path, s3: None,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    upload(bucket, "s3://bucket/torn")
    download, torn = ObjectStore._download, list[str]()

    def tear(self: ObjectStore, key: str, file: HashingWriter) -> Any:
        if not key.endswith("train/002.png") or torn:
            return download(self, key, file)
        torn.append(key)
        meta = download(self, key, HashingWriter(io.BytesIO()))
        file.write(bytes(meta["size"]))
        return meta

    monkeypatch.setattr(ObjectStore, "_download", tear)
    assert files(snapshot("s3://bucket/torn").folder) == files(bucket)
    assert torn


@pytest.mark.parametrize(("address", "why"), [
    ("s3://bucket/none/data.yaml", "there is no such bucket or object .*; give the address of a data-set YAML"),
    ("s3://no-such-bucket/set", "there is no such bucket or object"),
    ("s3://ann:s3cret@bucket/set", r"data: s3://\*\*\*@bucket/set: leave the secret out"),
    ("ftp://bucket/set", "data: ftp://bucket/set: give a folder, or an address with s3://"),
    ("file://set/data.yaml", "data: file://set is not absolute"),
])
def test_a_bad_address_is_named_with_what_to_do(address: str, why: str, s3: None) -> None:
    with pytest.raises(InputError, match=why) as refused:
        read_description(address)
    assert "s3cret" not in str(refused.value)
