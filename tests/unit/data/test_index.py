import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data import index as index_module
from ray_yolo.data.index import read_index, with_single_class
from ray_yolo.labels.description import describe
from tests.support.pictures import smooth_picture, write_dataset, write_image

ROW = "1 0.5 0.5 0.5 0.5\n"


def names_of(index: AnnotationIndex) -> list[str]:
    return [Path(path).stem for path in index.paths]


def same(first: AnnotationIndex, second: AnnotationIndex) -> bool:
    arrays = ("sizes", "offsets", "classes", "boxes", "crowds", "areas", "without_file")
    return (first.paths == second.paths and first.findings == second.findings and first.names == second.names
            and first.looked_for == second.looked_for
            and all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays)
            and first.polygons.keys() == second.polygons.keys()
            and all(np.array_equal(a, b) for key in first.polygons
                    for a, b in zip(first.polygons[key], second.polygons[key], strict=True)))


def test_images_come_sorted_with_their_labels_and_without_are_background(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"c": ROW, "a": "", "b": None, "sub/d": "0 0.5 0.5 0.1 0.1\n" + ROW})
    index = read_index(description, "train")
    assert names_of(index) == ["a", "b", "c", "d"]
    assert index.offsets.tolist() == [0, 0, 0, 1, 3]
    assert index.classes.tolist() == [1, 0, 1]
    assert index[2].boxes.tolist() == [[16, 12, 48, 36]]
    assert index[2].size == (48, 64)
    assert index.findings == ()


def test_an_unusable_row_is_left_out_alone(tmp_path: Path) -> None:
    """Whatever is wrong with it; a file that cannot be read at all takes its image along."""
    bad = "0 0.5 0.5 nan 0.5\n7 0.5 0.5 0.5 0.5\n0 0.5 0.5 0 0.5\noops\n"
    description = write_dataset(tmp_path, {"a": ROW, "b": ROW + bad, "c": ROW})
    (tmp_path / "images" / "d.jpg").write_bytes(b"")
    index = read_index(description, "train")
    assert names_of(index) == ["a", "b", "c"]
    assert index.classes.tolist() == [1, 1, 1]
    rows = [f"{tmp_path}/labels/b.txt:{number}" for number in (2, 3, 4, 5)]
    assert [(finding.where, finding.dropped, finding.image) for finding in index.findings] == [
        *((row, True, False) for row in rows), (f"{tmp_path}/images/d.jpg", True, True)]
    with pytest.raises(DatasetError):
        read_index(description, "train", strict=True)


def test_an_image_without_usable_rows_is_not_background(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": ROW, "b": "0 50 50 20 20\n9 0.5 0.5 0.5 0.5\n", "c": ""})
    index = read_index(description, "train")
    assert names_of(index) == ["a", "c"]
    assert [(finding.where, finding.image) for finding in index.findings] == [
        (f"{tmp_path}/labels/b.txt:1", False), (f"{tmp_path}/labels/b.txt:2", True)]
    assert "its image is left out" in index.findings[1].what


def test_strict_refuses_only_dropped_rows(tmp_path: Path) -> None:
    repeated = write_dataset(tmp_path / "repeated", {"a": ROW + ROW})
    assert len(read_index(repeated, "train", strict=True).classes) == 1
    dropped = write_dataset(tmp_path / "dropped", {"a": ROW + "0 0.5 0.5 0 0\n"})
    assert len(read_index(dropped, "train").classes) == 1
    with pytest.raises(DatasetError):
        read_index(dropped, "train", strict=True)


def test_a_class_without_a_name_is_reported_with_its_line_at_every_reading(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": ROW, "b": ROW + "7 0.5 0.5 0.5 0.5\n"})
    for _ in range(2):
        (finding,) = read_index(description, "train").findings
        assert (finding.where, finding.dropped) == (f"{tmp_path}/labels/b.txt:2", True)
        assert "has the class 7, but the data set names 2 classes (0-1)" in finding.what


def test_the_digest_of_labels_is_that_of_the_first_release(tmp_path: Path) -> None:
    """Otherwise its trainings could not be continued."""
    outline = "0 0.1 0.1 0.9 0.1 0.5 0.9\n"
    description = write_dataset(tmp_path, {"a": ROW + outline, "b": None, "c": "", "d": ROW + ROW})
    assert read_index(description, "train").digest == "6c3f7fb37b04a40b"


def test_single_class_makes_every_label_an_item(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, {"a": ROW, "b": "0 0.5 0.5 0.5 0.5\n"})
    single = with_single_class(read_index(description, "train"))
    assert single.names == ("item",)
    assert single.classes.tolist() == [0, 0]
    assert read_index(description, "train").classes.tolist() == [1, 0]


def test_the_data_sets_folder_is_never_written_to(tmp_path: Path) -> None:
    data = tmp_path / "data"
    description = write_dataset(data, {"a": ROW, "b": "garbage"})
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    read_index(description, "train")
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_the_second_start_reads_no_image_and_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outline = "0 0.1 0.1 0.9 0.1 0.5 0.9\n"
    description = write_dataset(tmp_path, {"a": ROW + outline, "b": "garbage", "c": ROW, "d": outline + outline})
    first = read_index(description, "train")
    monkeypatch.setattr(index_module, "_check_all", None)
    assert same(read_index(description, "train"), first)
    assert len(first.findings) == 2


@pytest.mark.parametrize("change", [
    "label", "label of equal length", "image", "new image", "new label", "removed", "names"])
def test_any_change_is_seen(tmp_path: Path, change: str) -> None:
    description = write_dataset(tmp_path, {"a": ROW, "b": None})
    before = read_index(description, "train")
    if change == "label":
        (tmp_path / "labels" / "a.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    elif change == "label of equal length":
        (tmp_path / "labels" / "a.txt").write_text(ROW.replace("1", "0"))
        os.utime(tmp_path / "labels" / "a.txt", (1, 1))  # clocks of some file systems are coarse
    elif change == "image":
        write_image(tmp_path / "images" / "a.png", smooth_picture(50, 60))
    elif change == "new image":
        write_image(tmp_path / "images" / "c.png", smooth_picture(48, 64))
    elif change == "new label":
        (tmp_path / "labels" / "b.txt").write_text(ROW)
    elif change == "removed":
        (tmp_path / "labels" / "a.txt").unlink()
    else:
        description = describe({"train": "images", "names": ["x", "y"]}, tmp_path / "data.yaml")
    after = read_index(description, "train")
    assert not same(before, after)
    assert before.digest != after.digest


def test_a_change_during_the_check_is_not_kept_as_the_state_before(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    description = write_dataset(tmp_path, {"a": None, "b": ROW})
    label = tmp_path / "labels" / "a.txt"
    check = index_module._check_all

    def check_late(*arguments: Any) -> Any:
        label.write_text(ROW)
        return check(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "_check_all", check_late)
        assert len(read_index(description, "train").classes) == 2
    label.unlink()
    assert len(read_index(description, "train").classes) == 1


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", "half", "object"])
def test_a_damaged_cache_entry_is_rebuilt(tmp_path: Path, own_cache: Path, damage: bytes | str) -> None:
    description = write_dataset(tmp_path, {"a": ROW})
    first = read_index(description, "train")
    (kept,) = (own_cache / "labels").glob("*.npz")
    if damage == "object":
        np.savez(kept, kept=np.array([{"a": 1}], object), allow_pickle=True)
    else:
        kept.write_bytes(kept.read_bytes()[:200] if damage == "half" else damage)
    assert same(read_index(description, "train"), first)


def test_an_unwritable_cache_folder_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "file"))
    assert len(read_index(write_dataset(tmp_path, {"a": ROW}), "train")) == 1
    assert len(caplog.messages) == 1


def test_labels_never_depend_on_the_number_of_readers(tmp_path: Path, own_cache: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    description = write_dataset(tmp_path, {str(number): ROW * (number % 2) for number in range(20)})
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    first = read_index(description, "train")
    (kept,) = (own_cache / "labels").glob("*.npz")
    kept.unlink()
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert same(read_index(description, "train"), first)
