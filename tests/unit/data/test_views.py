"""Samples whose pictures the device renders: labels and draws of the host's way, and views of its pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.structures import AnnotationIndex, MicrobatchPart, SampleKey
from ray_yolo.data.dataset import TrainDataset
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from ray_yolo.data.views import ViewDataset
from tests.support.pictures import write_dataset
from tests.support.rendered import picture

AUGMENT = AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0, scale=0, translate=0, flipud=0.5, mosaic=0.5)
KEYS = tuple(SampleKey(0, position, position % 5) for position in range(10))


@pytest.fixture
def index(tmp_path: Path) -> AnnotationIndex:
    rows = "0 0.25 0.25 0.5 0.5\n1 0.6 0.2 0.9 0.2 0.9 0.9 0.6 0.8\n"
    return read_index(write_dataset(tmp_path, {f"{n}": rows if n % 3 else None for n in range(5)}), "train")


def of_views(index: AnnotationIndex, readable: list[bool], **settings: bool) -> ViewDataset:
    return ViewDataset(index, ImageStore(index, 64), AUGMENT, 64, 0, 1, readable=np.array(readable), **settings)


def held(index: AnnotationIndex) -> np.ndarray:
    store = ImageStore(index, 64)
    return np.concatenate([store.load(image).reshape(-1) for image in range(len(index))])


def test_views_show_the_pictures_of_the_host(index: AnnotationIndex) -> None:
    """Without zoom, bit for bit. Labels, order and colours are those of the host in any case."""
    part = MicrobatchPart(KEYS, 20, 30)
    batch = of_views(index, [True] * 5, leaves_colours=True).load(part)
    host = TrainDataset(index, ImageStore(index, 64), AUGMENT, 64, 0, 1, leaves_colours=True).load(part)
    assert batch.keys() == {*host.keys(), "views"} - {"images"}
    for name in ("targets", "indices", "colours", "place"):
        assert torch.equal(batch[name], host[name]), name
    pixels = held(index)
    for view, image in zip(batch["views"].numpy(), host["images"].permute(0, 2, 3, 1).numpy(), strict=True):
        assert np.array_equal(picture(pixels, view), image)


def test_a_sample_has_a_view_and_decodes_no_image(index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageStore, "load", None)
    data = of_views(index, [True] * 5)
    sample = data[KEYS[1]]
    assert torch.equal(sample["view"], data.load(MicrobatchPart(KEYS[1:2], 0, 1))["views"][0])
    assert "image" not in sample


def test_a_damaged_image_is_replaced_by_the_next_one_that_the_device_holds(index: AnnotationIndex) -> None:
    data, store = of_views(index, [False, True, True, False, False]), ImageStore(index, 64)
    shown = {tuple(view[23:25].tolist()) for view in data.load(MicrobatchPart(KEYS, 0, 10))["views"]}
    assert shown == {(int(store.starts[image]), 48) for image in (1, 2)}
    assert [data._readable(number) for number in range(5)] == [1, 1, 2, 1, 1]
