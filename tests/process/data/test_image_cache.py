from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.image_cache import ImageStore
from tests.unit.data.test_image_cache import index

__all__ = ["index"]  # fixtures


def _first_pixels(index: AnnotationIndex) -> list[int]:
    return ImageStore(index, 64, "disk").load(0)[0, 0].tolist()


def test_many_processes_build_one_file(index: AnnotationIndex, own_cache: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_first_pixels, [index] * 6))
    assert results == [ImageStore(index, 64).load(0)[0, 0].tolist()] * 6
    assert len(list((own_cache / "images").glob("*.rgb"))) == 1
    assert list((own_cache / "images").glob("*.part")) == []
