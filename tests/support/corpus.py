"""Hostile data sets: what users' files can hold, and what has to become of each.

Every case is one file put into an otherwise good data set of two images with one label each.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from tests.support.pictures import smooth_picture, write_image

Outcome = Literal["read", "left out", "refused"]
GOOD_ROW = "1 0.5 0.5 0.5 0.5\n"
GOOD_YAML = "train: images\nval: images\nnames: [cat, dog, owl]\n"


@dataclass(frozen=True)
class Case:
    """One hostile file: `labels` labels are read of it, or its image is left out, or the data set is refused."""

    name: str
    kind: Literal["label", "image", "yaml"]
    content: bytes
    outcome: Outcome
    labels: int = 1
    suffix: str = ".jpg"

    def write(self, root: Path) -> Path:
        """Write the data set; returns its YAML file."""
        for name in ("good1", "good2"):
            write_image(root / "images" / f"{name}.png", smooth_picture(48, 64))
            _write(root / "labels" / f"{name}.txt", GOOD_ROW.encode())
        if self.kind == "label":
            write_image(root / "images" / "hostile.png", smooth_picture(48, 64))
            _write(root / "labels" / "hostile.txt", self.content)
        elif self.kind == "image":
            _write(root / "images" / f"hostile{self.suffix}", self.content)
            _write(root / "labels" / "hostile.txt", GOOD_ROW.encode())
        return _write(root / "data.yaml", self.content if self.kind == "yaml" else GOOD_YAML.encode())


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _label_cases() -> Iterator[Case]:
    read = {
        "plain": (GOOD_ROW, 1),
        "empty": ("", 0),
        "only newlines": ("\n\n\r\n", 0),
        "only blanks": ("  \t ", 0),
        "no last newline": (GOOD_ROW.strip(), 1),
        "crlf": ("1 0.5 0.5 0.5 0.5\r\n0 0.5 0.5 0.2 0.2\r\n", 2),
        "old mac line ends": ("1 0.5 0.5 0.5 0.5\r0 0.5 0.5 0.2 0.2\r", 2),
        "tabs": ("1\t0.5\t0.5\t0.5\t0.5\n", 1),
        "blank lines between": ("\n1 0.5 0.5 0.5 0.5\n\n\n0 0.5 0.5 0.2 0.2\n", 2),
        "many blanks": (" 1  0.5   0.5 0.5 0.5 ", 1),
        "class as float": ("1.0 0.5 0.5 0.5 0.5", 1),
        "exponents": ("1 5e-1 5E-1 5e-01 +0.5", 1),
        "bare dots": ("1 .5 .5 .5 .5", 1),
        "negative zero": ("1 0.5 0.5 0.5 0.5\n0 -0.0 0.5 0.5 0.5", 2),
        "whole image": ("1 0.5 0.5 1 1", 1),
        "rounded above one": ("1 0.5 0.5 1.000001 1.00001", 1),
        "rounded below zero": ("1 -0.000001 0.5 0.5 0.5", 1),
        "reaches over the edge": ("1 0.99 0.5 0.5 0.5", 1),
        "polygon": ("1 0.1 0.1 0.9 0.1 0.5 0.9", 1),
        "polygon and box": ("1 0.1 0.1 0.9 0.1 0.5 0.9\n0 0.5 0.5 0.2 0.2", 2),
        "long digits": ("1 0." + "5" * 400 + " 0.5 0.5 0.5", 1),
        "duplicates": (GOOD_ROW * 50, 1),
        "duplicates written differently": ("1 0.5 0.5 0.5 0.5\n1 .50 0.5 5e-1 0.5", 1),
        "polygon of many points": ("1" + " 0.1 0.1 0.9 0.2 0.5 0.9" * 500, 1),
        "two classes on one box": ("1 .5 .5 .5 .5\n0 .5 .5 .5 .5", 2),
        "zero height among good": ("1 0.5 0.5 0.5 0\n" + GOOD_ROW, 1),
        "header": ("class x y w h\n1 0.5 0.5 0.5 0.5", 1),
        "good then bad": (GOOD_ROW + "oops", 1),
        "class of another data set, late": (GOOD_ROW + "79 0.5 0.5 0.5 0.4", 1),
        "a thousand boxes": ("".join(f"0 0.5 0.5 0.5 {i / 1001}\n" for i in range(1, 1001)), 1000),
    }
    left_out = {
        "nan": "1 nan 0.5 0.5 0.5",
        "capital NaN": "1 NaN 0.5 0.5 0.5",
        "inf": "1 0.5 inf 0.5 0.5",
        "minus inf": "1 0.5 0.5 -inf 0.5",
        "infinity": "1 0.5 0.5 infinity 0.5",
        "overflow": "1 0.5 0.5 1e999 0.5",
        "negative centre": "1 -0.1 0.5 0.5 0.5",
        "negative width": "1 0.5 0.5 -0.5 0.5",
        "above one": "1 0.5 0.5 0.5 1.5",
        "pixels": "1 320 240 100 100",
        "percent": "1 50 50 20 20",
        "corner polygon outside": "1 0.1 0.1 1.9 0.1 0.5 0.9",
        "one column": "1",
        "two columns": "1 0.5",
        "four columns": "1 0.5 0.5 0.5",
        "six columns": "1 0.5 0.5 0.5 0.5 0.93",
        "even polygon": "1 0.1 0.1 0.9 0.1 0.5 0.9 0.3",
        "commas": "1,0.5,0.5,0.5,0.5",
        "comma decimals": "1 0,5 0,5 0,5 0,5",
        "semicolons": "1;0.5;0.5;0.5;0.5",
        "words": "dog 0.5 0.5 0.5 0.5",
        "comment": "# class x y w h",
        "underscores": "1 0_1 0.5 0.5 0.5",
        "hex": "1 0x1 0.5 0.5 0.5",
        "half a class": "1.5 0.5 0.5 0.5 0.5",
        "class nan": "nan 0.5 0.5 0.5 0.5",
        "json": '{"class": 1}',
        "xml": "<annotation/>",
        "yaml": "- 1 0.5",
        "nul bytes": "1 0.5\0 0.5 0.5 0.5",
        "fullwidth digits with comma": "1 0.5 0.5 0.5 \uff10,5",
        "zero width": "1 0.5 0.5 0 0.5",
        "a point": "1 0.5 0.5 0 0",
        "flat polygon": "1 0.1 0.5 0.5 0.5 0.9 0.5",
        "class too large": "4 0.5 0.5 0.5 0.5",
        "class far too large": "99999999999 0.5 0.5 0.5 0.5",
        "negative class": "-1 0.5 0.5 0.5 0.5",
        "class 1e300": "1e300 0.5 0.5 0.5 0.5",
    }
    yield from (Case(name, "label", text.encode(), "read", labels) for name, (text, labels) in read.items())
    yield from (Case(name, "label", text.encode(), "left out") for name, text in left_out.items())
    yield Case("utf-8 mark", "label", b"\xef\xbb\xbf" + GOOD_ROW.encode(), "read")
    yield Case("utf-16", "label", GOOD_ROW.encode("utf-16"), "read")
    yield Case("binary", "label", bytes(range(256)) * 10, "left out")
    yield Case("a picture", "label", picture("PNG"), "left out")
    yield Case("latin-1 comment", "label", b"1 0.5 0.5 0.5 0.5 \xe4", "left out")
    yield Case("a million boxes", "label", b"1 0.5 0.5 0.25 0.25\n" * 1_000_000, "left out")


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (48, 64), **options: object) -> bytes:
    """The bytes of a good picture."""
    buffer = io.BytesIO()
    Image.fromarray(smooth_picture(*size)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises so many pixels and holds none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def _sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(smooth_picture(48, 64)[..., 0].astype(np.uint16) * 257).save(buffer, "PNG")
    return buffer.getvalue()


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return picture("JPEG", exif=exif)


def _image_cases() -> Iterator[Case]:
    jpeg, png = picture("JPEG"), picture("PNG")
    read = {
        "grey jpeg": picture("JPEG", "L"),
        "cmyk jpeg": picture("JPEG", "CMYK"),
        "progressive jpeg": picture("JPEG", progressive=True),
        "turned by exif": _turned(),
        "png called jpg": png,
        "zeros after the end": jpeg + b"\0" * 100,
        "notes after the end": jpeg + b"notes",
        "palette": picture("PNG", "P"),
        "alpha": picture("PNG", "RGBA"),
        "grey alpha": picture("PNG", "LA"),
        "one bit": picture("PNG", "1"),
        "sixteen bits": _sixteen_bits(),
        "animation": picture("PNG", save_all=True),
        "webp": picture("WEBP"),
        "tiff": picture("TIFF"),
        "bmp": picture("BMP"),
        "smallest": picture("PNG", size=(10, 10)),
        "long and thin": picture("PNG", size=(10, 3000)),
        "progressive cmyk": picture("JPEG", "CMYK", progressive=True),
        "lossless webp": picture("WEBP", lossless=True),
        "sound chunks without pixels": png_header(100, 100),  # found out in training, where its neighbour replaces it
    }
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    left_out = {
        "zero bytes": b"",
        "one byte": b"\xff",
        "only a start": b"\xff\xd8",
        "start and end": b"\xff\xd8\xff\xd9",
        "text": b"hello",
        "html": b"<html><body>404</body></html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "zeros": b"\0" * 10_000,
        "half a jpeg": jpeg[: len(jpeg) // 2],
        "jpeg without its end": jpeg[:-2],
        "grey from its middle on": jpeg[: 3 * len(jpeg) // 4] + b"\xff\xd9",
        "jpeg header": jpeg[:30],
        "half a png": png[: len(png) // 2],
        "png without its end": png[:-12],
        "flipped byte in png": bytes(flipped),
        "half a webp": picture("WEBP")[:200],
        "half a bmp": picture("BMP")[:200],
        "half a tiff": picture("TIFF")[:200],
        "one pixel": picture("PNG", size=(1, 1)),
        "nine pixels wide": picture("PNG", size=(100, 9)),
        "bomb": png_header(60_000, 60_000),
        "small bomb": png_header(20_000, 10_000),
        "no pixels": png_header(0, 0),
        "negative size": png_header(2**32 - 1, 2**32 - 1),
        "pickle": b"\x80\x04\x95\x10\0\0\0.",
        "zip": b"PK\x03\x04" + b"\0" * 50,
        "pdf": b"%PDF-1.7\n%%EOF",
        "gif": picture("GIF")[:40],
    }
    yield from (Case(name, "image", content, "read") for name, content in read.items())
    yield from (Case(name, "image", content, "left out") for name, content in left_out.items())
    yield Case("pfm without pixels", "image", b"PF\n64 48\n-1.0\n", "left out", suffix=".pfm")
    yield Case("dng of text", "image", b"II*\0nothing", "left out", suffix=".dng")


def _yaml_cases() -> Iterator[Case]:
    read = {
        "plain": GOOD_YAML,
        "names by number": "train: images\nval: images\nnames:\n  0: cat\n  1: dog\n  2: owl\n",
        "with nc": GOOD_YAML + "nc: 3\n",
        "nc alone": "train: images\nval: images\nnc: 3\n",
        "yes and no": "train: images\nval: images\nnames: [yes, no, on]\n",
        "numbers as names": "train: images\nval: images\nnames: [1, 2.5, 007]\n",
        "unknown keys": GOOD_YAML + "roboflow:\n  workspace: x\n",
        "comments": "# data\n" + GOOD_YAML,
        "crlf": GOOD_YAML.replace("\n", "\r\n"),
        "path": "path: .\n" + GOOD_YAML,
        "mark": "\ufeff" + GOOD_YAML,
        "missing test": GOOD_YAML + "test: images/test\n",
        "lists": GOOD_YAML.replace("train: images", "train: [images, images/good1.png]"),
        "roboflow dots": GOOD_YAML.replace("train: images", "train: ../images"),
        "download code": GOOD_YAML + "download: |\n  import os\n  os.mkdir('mark')\n",
        "download shell": GOOD_YAML + "download: mkdir mark\n",
        "address to download": GOOD_YAML + "download: https://example.com/a.zip\n",
        "pattern": GOOD_YAML.replace("train: images", "train: images/*.png"),
        "empty test": GOOD_YAML + "test:\n",
    }
    refused = {
        "empty": "",
        "a list": "- train\n",
        "a word": "train",
        "no names": "train: images\nval: images\n",
        "no splits": "names: [cat]\n",
        "wrong count": GOOD_YAML + "nc: 4\n",
        "gap in numbers": "train: images\nval: images\nnames: {0: cat, 2: dog}\n",
        "count of zero": "train: images\nval: images\nnc: 0\n",
        "one name as text": "train: images\nval: images\nnames: cat\n",
        "empty names": "train: images\nval: images\nnames: []\n",
        "nested names": "train: images\nval: images\nnames: [[cat, dog, owl]]\n",
        "missing folder": GOOD_YAML.replace("train: images", "train: nowhere"),
        "number as folder": GOOD_YAML.replace("train: images", "train: {a: 1}"),
        "bad path": "path: nowhere\n" + GOOD_YAML,
        "python object": GOOD_YAML + "x: !!python/object/apply:os.system ['true']\n",
        "tabs": "train:\timages\n\tval: images\n",
        "open bracket": "train: [images\n",
        "double key": GOOD_YAML + "train: images\n",
        "too few names": GOOD_YAML.replace("[cat, dog, owl]", "[cat]"),
        "no train": GOOD_YAML.replace("train", "trian"),
        "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8))
        + GOOD_YAML,
        "deep": GOOD_YAML + "x: " + "[" * 1000 + "]" * 1000 + "\n",
        "two documents": GOOD_YAML + "---\n" + GOOD_YAML,
        "folder without images": GOOD_YAML.replace("train: images", "train: labels"),
        "a single image that is none": GOOD_YAML.replace("train: images", "train: data.yaml"),
    }
    yield from (Case(name, "yaml", text.encode(), "read") for name, text in read.items())
    yield from (Case(name, "yaml", text.encode(), "refused") for name, text in refused.items())
    yield Case("not utf-8", "yaml", b"train: images\nnames: [\xe4]\n", "refused")
    yield Case("binary", "yaml", bytes(range(256)), "refused")
    yield Case("huge", "yaml", GOOD_YAML.encode() + b"# " + b"x" * 5 * 2**20, "refused")


CASES = (*_label_cases(), *_image_cases(), *_yaml_cases())
