"""Picture files that are not read: their bytes, and the reason. The messages name no path."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ray_yolo.core.errors import DatasetError
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.images import UnreachableImageError, UnreadableImageError, inspect_image
from ray_yolo.data.index import read_index
from tests.support.messages import Refusal
from tests.support.pictures import smooth_picture, write_dataset, write_image
from tests.support.tiff import tiff


def saved(kind: str, picture: np.ndarray | None = None, **options: Any) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    Image.fromarray(smooth_picture(96, 128) if picture is None else picture).save(file, kind, **options)
    return file.getvalue()


def without_middle(content: bytes, first: float, last: float = 1.0) -> bytes:
    """A JPEG without the data between two shares of its picture's, with an end as if it were whole."""
    begin, end = content.rindex(b"\xff\xda") + 14, len(content) - 2
    return content[: begin + round(first * (end - begin))] + content[begin + round(last * (end - begin)) :]


def png_header(width: int, height: int) -> bytes:
    """A PNG that states its size, and has no pixels."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


GREY = "is grey from some point on: its data end before the image does"
CUT = "is damaged or cut off…"
PLANES = "has separate planes of more than 8 bits, which are not read; save it with its channels interleaved"
BANDS = "has {} bands without colours (MinIsBlack), which are not read; save it as RGB or as grey"
PICTURES: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "is empty (0 bytes)"),
    ("text", b"not a picture", "is not an image that can be read (UnidentifiedImageError)"),
    *((f"{kind} in the place of a JPEG", saved(kind), "is not an image…") for kind in ("eps", "tga", "pcx", "dds")),
    ("a JPEG without its end", saved("jpeg")[:-2], CUT),
    ("a JPEG that is grey from a third on", without_middle(saved("jpeg"), 0.3), GREY),
    ("a JPEG that has lost some of its middle", without_middle(saved("jpeg"), 0.3, 0.6), GREY),
    ("a thin picture", saved("png", np.zeros((9, 100, 3), np.uint8)),
     "has 100 x 9 pixels; both sides must have 10 or more"),
    ("more pixels than are decoded", png_header(60_000, 60_000),
     "has far more than the 178956970 pixels that are decoded; cut it into tiles"),
    ("deep planes", tiff(16, planar=True), PLANES),
    *((f"{number} bands", tiff(8, planar=False, photometric=1, samples=number), BANDS.format(number))
      for number in (2, 3, 4)),
    ("bands without a kind", tiff(8, planar=False, photometric=1, samples=3, extra=(0, 0)), BANDS.format(3)),
    ("deep pixels upside down", tiff(16, planar=False, photometric=0, samples=1),
     "has more than 8 bits whose least value is white (MinIsWhite), which are not read; save it as MinIsBlack"),
    ("a preview", saved("tiff", tiffinfo={254: 1}),
     "begins with a preview of its picture, and only the first one is read; export it as JPEG, PNG or TIFF"),
]
"""Contents of a.jpg: a decoder decides by the content."""


def _inspect(content: bytes) -> None:
    Path("a.jpg").write_bytes(content)
    inspect_image("a.jpg")


def _load_changed() -> None:
    """Load a picture that has changed since the data set was read."""
    store = ImageStore(read_index(write_dataset(Path.cwd(), {"a": None}), "train"), 64)
    write_image(Path("images/a.png"), smooth_picture(64, 48))
    store.load(0)


def _refusals() -> Iterator[Refusal]:
    for name, content, message in PICTURES:
        yield Refusal(name, message, partial(_inspect, content), UnreadableImageError)
    yield Refusal("no file", "cannot be read: No such file or directory", partial(inspect_image, "none.jpg"),
                  UnreachableImageError)
    yield Refusal("another size", "1 of 1 images, more than 10%, cannot be read any more; the last one is "
                  "…/images/a.png, which has changed its size since the data set was checked. Check the storage, and "
                  "run the same command again", _load_changed, DatasetError)


REFUSALS = list(_refusals())
