from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.dataset import ValDataset, cut_batches, padded_shapes
from ray_yolo.data.image_cache import ImageStore, loaded_sizes
from ray_yolo.data.index import read_index
from tests.support.pictures import smooth_picture, write_dataset, write_image


def index_of(sizes: list[tuple[int, int]]) -> AnnotationIndex:
    empty = np.zeros(0)
    return AnnotationIndex(tuple(f"{number}.png" for number in range(len(sizes))), np.array(sizes, np.int32),
                           np.zeros(len(sizes) + 1, np.int64), empty.astype(np.int64), empty.reshape(0, 4), ("a",))


def test_padded_shapes_by_hand() -> None:
    for size, imgsz, pad, shape in [
        ((480, 640), 640, 0.5, (512, 672)), ((640, 480), 640, 0.5, (672, 512)), ((480, 640), 640, 0.0, (480, 640)),
        ((240, 320), 640, 0.5, (512, 672)), ((100, 1000), 320, 0.5, (64, 352)), ((1000, 1000), 320, 0.0, (320, 320)),
        ((427, 640), 640, 0.5, (448, 672)), ((1, 1000), 320, 0.5, (32, 352)),
    ]:
        assert padded_shapes(np.array([size]), imgsz, 32, pad).tolist() == [list(shape)], (size, imgsz, pad)


sizes = st.lists(st.tuples(st.integers(10, 900), st.integers(10, 900)), min_size=1, max_size=30)


@given(sizes, st.sampled_from([64, 320, 640]), st.sampled_from([0.0, 0.5]))
def test_the_picture_always_fits_its_padded_shape(shapes: list[tuple[int, int]], imgsz: int, pad: float) -> None:
    assert (padded_shapes(np.array(shapes), imgsz, 32, pad) >= loaded_sizes(np.array(shapes), imgsz)).all()


@given(sizes, st.integers(1, 7))
def test_batches_hold_every_image_once_with_its_own_shape(shapes: list[tuple[int, int]], batch_size: int) -> None:
    index = index_of(shapes)
    batches = cut_batches(index, 320, batch_size, 32)
    assert sorted(image for batch in batches for image in batch.indices) == list(range(len(shapes)))
    short: dict[tuple[int, int], int] = defaultdict(int)
    for batch in batches:
        assert 1 <= len(batch.indices) <= batch_size
        short[batch.shape] += len(batch.indices) < batch_size
        for image in batch.indices:
            assert padded_shapes(index.sizes[[image]], 320, 32).tolist() == [list(batch.shape)]
    assert max(short.values()) <= 1


@pytest.fixture
def index(tmp_path: Path) -> AnnotationIndex:
    description = write_dataset(tmp_path, dict.fromkeys("abc", "1 0.5 0.5 0.5 0.25\n0 0.1 0.1 0.2 0.2\n"))
    write_image(tmp_path / "images" / "b.png", smooth_picture(150, 100))
    (tmp_path / "labels" / "c.txt").unlink()
    return read_index(description, "val")


def test_a_validation_batch_maps_back_to_the_original_pixels(index: AnnotationIndex) -> None:
    batches = cut_batches(index, 64, 8, 32)
    data = ValDataset(index, ImageStore(index, 64, smooth=True), batches)
    seen = []
    for number in range(len(data)):
        batch = data[number]
        assert batch["images"].shape == (len(batches[number].indices), 3, *batches[number].shape)
        assert batch["images"].is_contiguous(memory_format=torch.channels_last)
        for row, image in enumerate(batch["indices"].tolist()):
            seen.append(image)
            assert batch["sizes"][row].tolist() == index.sizes[image].tolist()
            boxes = batch["targets"][batch["targets"][:, 0] == row]
            ratio, pad = batch["ratios"][row].flip(0).repeat(2), batch["pads"][row].flip(0).repeat(2)
            assert np.allclose((boxes[:, 2:] - pad) / ratio, index[image].boxes, atol=1e-3)
            assert boxes[:, 1].tolist() == index[image].classes.tolist()
    assert sorted(seen) == [0, 1, 2]


def test_the_image_is_centred_on_grey(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, smooth=True)
    batch = ValDataset(index, store, cut_batches(index, 64, 8, 32))[0]  # 48 x 64 in 64 x 96
    image = batch["images"][0].permute(1, 2, 0).numpy()
    assert image.shape == (64, 96, 3)
    assert batch["pads"][0].tolist() == [8, 16]
    assert np.array_equal(image[8:56, 16:80], store.load(0))
    image[8:56, 16:80] = 114
    assert (image == 114).all()


def test_an_image_does_not_depend_on_the_rest_of_its_batch(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, smooth=True)
    alone = {}
    for data in (ValDataset(index, store, cut_batches(index, 64, size, 32)) for size in (1, 8)):
        for number in range(len(data)):
            batch = data[number]
            for row, image in enumerate(batch["indices"].tolist()):
                assert torch.equal(alone.setdefault(image, batch["images"][row]), batch["images"][row])


def test_an_image_damaged_after_the_check_is_grey_and_keeps_its_labels(index: AnnotationIndex,
                                                                      caplog: pytest.LogCaptureFixture) -> None:
    Path(index.paths[0]).write_bytes(b"broken")
    batch = ValDataset(index, ImageStore(index, 64, smooth=True), cut_batches(index, 64, 8, 32))[0]
    assert (batch["images"][0] == 114).all()
    assert (batch["targets"][:, 0] == 0).sum() == 2
    assert index.paths[0] in caplog.text
