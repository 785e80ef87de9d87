"""Whatever a picture is handed over as, it is the same pixels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ray_yolo.data.sources import read_source
from tests.support.pictures import smooth_picture, write_image
from tests.support.videos import write_video

PICTURE = smooth_picture(60, 80)
BGR = np.ascontiguousarray(PICTURE[..., ::-1])
TENSOR = torch.from_numpy(PICTURE.copy()).permute(2, 0, 1) / 255


@pytest.mark.parametrize("thing", [
    BGR, np.dstack([BGR, BGR[..., 0]]), Image.fromarray(PICTURE), TENSOR, TENSOR[None].double()],
    ids=["bgr", "bgra", "pil", "tensor", "batch"])
def test_pixels_come_as_rgb(thing: object) -> None:
    (frame,) = read_source(thing).frames()
    assert frame.pixels is not None
    assert np.array_equal(frame.pixels, PICTURE)
    assert frame.pixels.flags.c_contiguous
    assert frame.media == ("image0.jpg", "image0.jpg", "image0")


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, io.BytesIO])
def test_the_content_of_a_file_is_read_like_the_file(kind: type) -> None:
    [frame] = read_source(kind(png(PICTURE))).frames()
    assert frame.pixels is None
    assert np.array_equal(frame.read().pixels, PICTURE)
    assert frame.media == ("image0.jpg", "image0.jpg", "image0")


def test_an_open_file_is_read_and_a_damaged_content_has_its_error(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png", PICTURE)
    with open(path or tmp_path / "a.png", "rb") as file:
        first, second, third = (frame.read() for frame in read_source([file, b"no picture", b""]).frames())
    assert np.array_equal(first.pixels, PICTURE)
    assert second.error.startswith("is not an image")
    assert third.error == "is empty (0 bytes)"
    assert second.media.name == "image1.jpg"


def test_a_tensor_that_rounds_to_the_same_bytes_is_accepted() -> None:
    [frame] = read_source((TENSOR + 0.001).clamp(0, 1.001)).frames()
    assert frame.pixels is not None
    assert np.array_equal(frame.pixels, PICTURE)


def test_grey_is_repeated() -> None:
    for grey in (BGR[..., 0], BGR[..., :1]):
        (frame,) = read_source(grey).frames()
        assert frame.pixels is not None
        assert np.array_equal(frame.pixels, np.dstack([PICTURE[..., 2]] * 3))


def test_a_list_keeps_its_order_and_gives_every_result_a_name(tmp_path: Path) -> None:
    for folder in "ab":
        write_image(tmp_path / folder / "x.png", PICTURE)
    video = write_video(tmp_path / "clip.avi", [PICTURE] * 3)
    source = read_source([tmp_path / "a" / "x.png", BGR, str(video), torch.stack([TENSOR] * 2), tmp_path / "b"])
    assert [(frame.media.stem, frame.number) for frame in source.frames()] == [
        ("0_x", None), ("image1", None), ("clip", 1), ("clip", 2), ("clip", 3), ("image3_0", None), ("image3_1", None),
        ("5_x", None)]
    assert [frame.number for frame in read_source(video).frames(2)] == [1, 3]


def test_files_are_read_lazily(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", PICTURE)
    (tmp_path / "b.png").write_bytes(b"no picture")
    first, second = read_source(tmp_path).frames()
    assert first.pixels is None
    assert np.array_equal(first.read().pixels, PICTURE)
    assert second.read().error.startswith("is not an image")


def test_a_link_to_no_file_is_a_frame_with_its_error(tmp_path: Path) -> None:
    """It was skipped without a word, where a training says that it left it out."""
    write_image(tmp_path / "a.png", PICTURE)
    (tmp_path / "b.png").symlink_to("nowhere.png")
    first, second = (frame.read() for frame in read_source(tmp_path).frames())
    assert (first.error, second.media.name, second.error) == ("", "b.png", "cannot be read: No such file or directory")


def test_only_a_picture_or_a_camera_is_alone(tmp_path: Path) -> None:
    video = write_video(tmp_path / "clip.avi", [PICTURE])
    assert read_source(BGR).alone
    assert read_source(0).alone
    assert not read_source(video).alone
    assert not read_source([BGR, BGR]).alone
