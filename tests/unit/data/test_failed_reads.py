"""A failed read is no fact about a file: no cache keeps it, each reader tries again, and too many end the start."""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.core import files
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data import index as index_module
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.images import UnreachableImageError, has_too_many, inspect_image, read_image
from ray_yolo.data.index import read_index
from ray_yolo.data.sources import read_source
from ray_yolo.labels.description import DatasetDescription, describe
from tests.support.pictures import smooth_picture, write_image

ROW = "1 0.5 0.5 0.5 0.5\n"
XML = """<annotation><object><name>cat</name><bndbox><xmin>5</xmin><ymin>5</ymin><xmax>40</xmax><ymax>40</ymax></bndbox>
</object></annotation>"""
COCO = """{"images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 48}],
"categories": [{"id": 1, "name": "cat"}],
"annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 5, 30, 30], "area": 900, "iscrowd": 0}]}"""
Place = tuple[str, str, int]  # a function, the file that it reads, and which of its calls with this file


def write_text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def yolo_and_voc(folder: Path) -> DatasetDescription:
    """Pictures with a text file, with an XML file, and without labels."""
    for name in ("text.png", "xml.png", "none.png", "deep.tiff"):
        values = smooth_picture(48, 64, seed=len(name))
        write_image(folder / "images" / name, values.astype(np.uint16) * 16 if "deep" in name else values)
    write_text(folder / "labels" / "text.txt", ROW)
    write_text(folder / "labels" / "deep.txt", ROW)
    write_text(folder / "images" / "xml.xml", XML)
    write_text(folder / "annotations" / "deep.xml", XML)  # a second label file, which is reported
    return describe({"train": "images", "names": ["cat", "dog"]}, folder / "data.yaml")


def coco(folder: Path) -> DatasetDescription:
    write_image(folder / "a.png", smooth_picture(48, 64))
    write_text(folder / "instances_train.json", COCO)
    return describe({"train": "instances_train.json", "names": ["cat"]}, folder / "data.yaml")


def picture_list(folder: Path) -> DatasetDescription:
    yolo_and_voc(folder)
    write_text(folder / "list.txt", "images/text.png\nimages/xml.png\n")
    return describe({"train": "list.txt", "names": ["cat", "dog"]}, folder / "data.yaml")


class FailingReads:
    """Python's ways to read files; those of a chosen place fail once. It lists all places in a folder."""

    def __init__(self, folder: Path, failing: Place | None = None) -> None:
        self._folder, self._failing = str(folder), failing
        self._lock = threading.Lock()
        self._counts = Counter[tuple[str, str]]()
        self.places: list[Place] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder):
                file = os.fspath(path)
                with self._lock:
                    self._counts[name, file] += 1
                    place = (name, file, self._counts[name, file])
                    self.places.append(place)
                if place == self._failing:
                    raise OSError(errno.EIO, "Input/output error", file)
            return function(path, *arguments, **options)

        return read


@contextmanager
def failing_reads(folder: Path, failing: Place | None = None) -> Iterator[FailingReads]:
    reads = FailingReads(folder, failing)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((builtins, "open"), (io, "open"), (os, "stat"), (os, "lstat"), (os, "scandir"),
                             (os, "listdir"), (np, "fromfile")):
            patch.setattr(module, name, reads.wrap(name, getattr(module, name)))
        yield reads


def start(description: DatasetDescription) -> tuple[AnnotationIndex, list[np.ndarray]]:
    """What a command reads of a data set through its two caches."""
    index = read_index(description, "train")
    store = ImageStore(index, 64, "disk")
    return index, [store.load(image).copy() for image in range(len(index))]


@pytest.mark.parametrize("layout", [yolo_and_voc, coco])
def test_a_failed_read_is_forgotten_by_the_next_start(
        layout: Callable[[Path], DatasetDescription], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES", ())  # the first failure counts
    data = tmp_path / "data"
    description = layout(data)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "calm"))
    with failing_reads(data) as calm:
        expected, expected_pixels = start(description)
    assert {name for name, _, _ in calm.places} >= {"open", "stat"}
    for number, place in enumerate(sorted(set(calm.places))):
        monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / str(number)))
        with failing_reads(data, place), suppress(OSError, DatasetError):
            start(description)
        index, pixels = start(description)
        assert index.digest == expected.digest, place
        assert (index.paths, index.findings) == (expected.paths, expected.findings), place
        assert index.without_file.tolist() == expected.without_file.tolist(), place
        assert all(map(np.array_equal, pixels, expected_pixels)), place


@pytest.mark.parametrize("file", ["labels/classes.txt", "notes.json", "images/data.yaml"])
def test_a_failed_read_does_not_exchange_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """A file of names that contradicts the description is refused or reported whatever read fails."""
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    description = yolo_and_voc(data)
    write_text(data / file, {".txt": "dog\ncat\n", ".yaml": "names: [dog, cat]\n"}.get(
        Path(file).suffix, '{"categories": [{"id": 0, "name": "dog"}, {"id": 1, "name": "cat"}]}'))

    def is_accepted() -> bool:
        try:
            found = read_index(description, "train").findings
        except DatasetError:
            return False
        return all(finding.where != str(data / file) for finding in found)

    with failing_reads(data) as calm:
        assert not is_accepted()
    for place in sorted(set(calm.places)):
        with failing_reads(data, place):
            assert not is_accepted(), place


@pytest.mark.parametrize(("layout", "file"), [(coco, "instances_train.json"), (picture_list, "list.txt")])
def test_a_failed_read_says_nothing_about_annotations_and_lists(
        layout: Callable[[Path], DatasetDescription], file: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES", (0.0,))
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    description = layout(tmp_path)
    expected = read_index(description, "train")
    with failing_reads(tmp_path, ("open", str(tmp_path / file), 1)):
        assert read_index(description, "train").digest == expected.digest

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(DatasetError, match=f"{file}: cannot be read: Input/output error; check the storage"):
        read_index(description, "train")


def test_an_index_with_a_failed_read_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    description = yolo_and_voc(tmp_path)
    picture, label = tmp_path / "images" / "text.png", tmp_path / "labels" / "text.txt"
    for file in (picture, label):
        with failing_reads(tmp_path, ("open", str(file), 1)):
            index = read_index(description, "train")
        finding, = (finding for finding in index.findings if finding.dropped)
        assert (finding.where, finding.what) == (str(file), "cannot be read: Input/output error")
        assert (finding.is_transient, finding.image, len(index)) == (True, True, 3)
        assert not (tmp_path / "cache" / "labels").exists()
    assert len(read_index(description, "train")) == 4
    assert len(list((tmp_path / "cache" / "labels").iterdir())) == 1


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_missing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index that was saved before there was a label file is not that of today."""
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    description = yolo_and_voc(tmp_path)
    without = read_index(description, "train")
    write_text(tmp_path / "labels" / "none.txt", ROW)
    with failing_reads(tmp_path, ("stat", str(tmp_path / "labels" / "none.txt"), 1)), pytest.raises(DatasetError):
        read_index(description, "train")
    assert len(read_index(description, "train").classes) == len(without.classes) + 1


def test_a_read_is_tried_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    picture = write_image(tmp_path / "a.png", smooth_picture(48, 64))
    expected = read_image(str(picture))
    failures = 2

    def read(path: Path) -> bytes:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return bytes_of(path)

    bytes_of = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read)
    assert np.array_equal(read_image(str(picture)), expected)
    assert pauses == [0.1, 0.4]
    failures = 3
    with pytest.raises(UnreachableImageError):
        inspect_image(str(picture))
    failures = 3
    frame = next(read_source(str(picture)).frames()).read()
    assert frame.error == "cannot be read: Stale file handle"


def test_other_decoders_do_not_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that this Pillow cannot decode may be readable for the next one, or have other pixels."""
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    description = yolo_and_voc(tmp_path)
    first = ImageStore(read_index(description, "train"), 64, "disk").file
    monkeypatch.setattr(index_module, "DECODERS", ("13.1", "5.0"))
    monkeypatch.setattr("ray_yolo.data.image_cache.DECODERS", ("13.1", "5.0"))
    second = ImageStore(read_index(description, "train"), 64, "disk").file
    assert first != second
    assert len(list((tmp_path / "cache" / "labels").iterdir())) == 2


@pytest.mark.parametrize("mode", ["none", "disk"])
def test_a_missing_picture_is_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """Until its file is there again: a cache of decoded images does not keep the failure."""
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    index = read_index(yolo_and_voc(tmp_path), "train")
    gone, kept = Path(index.paths[0]), tmp_path / "kept"
    gone.rename(kept)
    store = ImageStore(index, 64, mode)
    with pytest.raises(UnreachableImageError):
        store.load(0)
    assert (store.load_or_grey(0) == 114).all()
    store.load(1)
    kept.rename(gone)
    assert np.array_equal(store.load(0), ImageStore(index, 64).load(0))


@pytest.mark.parametrize("mode", ["none", "ram"])
def test_too_many_damaged_pictures_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    for number in range(12):
        write_image(tmp_path / "images" / f"{number:02}.png", smooth_picture(48, 64))
    description = describe({"train": "images", "names": ["cat"]}, tmp_path / "data.yaml")
    index = read_index(description, "train")
    for path in index.paths[:4]:
        Path(path).unlink()
    store = ImageStore(index, 64, mode)
    assert all((store.load_or_grey(image) == 114).all() for image in range(4))
    Path(index.paths[4]).unlink()

    def load_all() -> None:
        store = ImageStore(index, 96, mode)  # caching reads all images
        for image in range(12):
            store.load_or_grey(image)

    with pytest.raises(DatasetError):
        load_all()


def test_a_start_whose_storage_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES", ())
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    for number in range(12):
        write_image(tmp_path / "images" / f"{number:02}.png", smooth_picture(48, 64))
    description = describe({"train": "images", "names": ["cat"]}, tmp_path / "data.yaml")

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(DatasetError):
        read_index(description, "train")
    assert not list((tmp_path / "cache").rglob("*.npz"))


def test_share_of_damaged_pictures_by_hand() -> None:
    cases = {(1, 1, 1): True, (4, 4, 100): False, (5, 5, 100): False, (11, 11, 100): True, (20, 20, 1000): False,
             (21, 21, 1000): True, (99, 1000, 1000): False, (101, 1000, 1000): True, (5, 12, 12): True,
             (0, 0, 9): False}
    assert {case: has_too_many(*case) for case in cases} == cases


@pytest.mark.parametrize(("source", "folder", "time"), [
    ("images", "images", 1), ("images", "images", 2), ("images/*.png", "images", 1), ("images/**/*.png", "images/", 1),
    ("images/**/*.png", "images", 1)])
def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, source: str, folder: str, time: int) -> None:
    yolo_and_voc(tmp_path)
    description = describe({"train": source, "names": ["cat", "dog"]}, tmp_path / "data.yaml")
    with failing_reads(tmp_path, ("scandir", f"{tmp_path}/{folder}", time)), \
            pytest.raises(DatasetError):
        read_index(description, "train")


def test_a_link_to_no_file_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a data set that was fetched in part: it waits for nothing, is kept, and seen again when the file is there."""
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files.time, "sleep", None)
    description = yolo_and_voc(tmp_path)
    for number in range(20):
        (tmp_path / "images" / f"{number}.png").symlink_to(tmp_path / "later" / f"{number}.png")
    index = read_index(description, "train")
    assert (len(index), sum(finding.image for finding in index.findings)) == (4, 20)
    assert not any(finding.is_transient for finding in index.findings)
    assert len(list((tmp_path / "cache" / "labels").iterdir())) == 1
    write_image(tmp_path / "later" / "0.png", smooth_picture(48, 64))
    assert len(read_index(description, "train")) == 5
