import json
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path

import pytest

from ray_yolo.data import index as index_module
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.labels.description import DatasetDescription
from tests.support.pictures import write_dataset
from tests.unit.data.test_index import ROW, same


def _read_many_times(description: DatasetDescription, times: int) -> list[str]:
    digests = []
    for _ in range(times):
        digests.append(read_index(description, "train").digest)
        for kept in Path(os.environ["RAY_YOLO_CACHE"]).glob("labels/*.npz"):
            kept.unlink(missing_ok=True)
    return digests


@pytest.mark.slow
def test_processes_that_race_for_a_cache_entry_read_the_same(tmp_path: Path) -> None:
    description = write_dataset(tmp_path, dict.fromkeys("abcdef", ROW))
    expected = read_index(description, "train").digest
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(_read_many_times, description, 200) for _ in range(8)]
        assert {digest for result in results for digest in result.result()} == {expected}


@pytest.mark.parametrize("kind", ["yolo", "coco"])
def test_processes_and_threads_give_the_same_findings(
        tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    description = write_dataset(tmp_path, {str(number): ROW * (number % 2) + "oops\n" for number in range(7)})
    (tmp_path / "images" / "x.jpg").write_bytes(b"")
    if kind == "coco":
        (tmp_path / "images" / "instances_train.json").write_text(json.dumps({
            "categories": [{"id": 1, "name": "cat"}],
            "images": [{"id": number, "file_name": f"{number}.png"} for number in range(7)],
            "annotations": [{"id": 9, "image_id": 3, "category_id": 1, "bbox": [1, 2, 30, 20], "iscrowd": 0},
                            *({"id": image, "image_id": image, "category_id": 7, "bbox": [1, 2, 30, 20]}
                              for image in (4, 6))]}))
    by_threads = read_index(description, "train")
    (kept,) = (own_cache / "labels").glob("*.npz")
    kept.unlink()
    monkeypatch.setattr(index_module, "_MANY", 2)
    monkeypatch.setattr(index_module, "_PART", 3)
    monkeypatch.setattr(index_module, "ThreadPoolExecutor", None)
    monkeypatch.setattr("__main__.__spec__", ModuleSpec("ray_yolo.train", None))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert same(read_index(description, "train"), by_threads)
    assert len(by_threads.findings) > 1


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "split", "images", "labels"), [
    ("bccd", "train", 205, 2804), ("bccd", "val", 87, 1137), ("cards", "train", 296, 527), ("cards", "val", 67, 143),
])
def test_real_data_is_read_completely(name: str, split: str, images: int, labels: int) -> None:
    root = Path(__file__).parents[4] / "shared" / "data" / name
    index = read_index(read_description(root / "data.yaml"), split, strict=True)
    assert (len(index), len(index.classes), index.findings) == (images, labels, ())
    rows = sum(len(file.read_text().splitlines()) for file in (root / "labels" / split).glob("*.txt"))
    assert rows == labels
