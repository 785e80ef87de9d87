"""Images with boxes: training batches, labels beside detections of a validation, and the results of `predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ray_yolo.core.files import replacing
from ray_yolo.plots.style import COLOURS, INK, one_line

SIDE = 480  # width of a picture in a grid, in pixels
TITLE, GAP = 20, 4  # pixels
LONGEST_NAME, LONGEST_TITLE = 24, 56  # characters


class Picture(NamedTuple):
    """An image with its boxes."""

    image: NDArray[np.uint8]  # (height, width, 3) RGB
    boxes: NDArray[np.floating]  # (n, 4) xyxy in pixels of the image
    classes: NDArray[np.int64]  # (n,)
    scores: NDArray[np.floating] | None = None  # (n,); None for labels
    title: str = ""


def plot_pictures(pictures: Sequence[Picture], names: Sequence[str], path: Path, *, columns: int = 4) -> Image.Image:
    """A grid of images with boxes; the height of a row is that of its highest image."""
    tiles = [_tile(picture, names) for picture in pictures]
    rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) + GAP for row in rows]
    column_width = SIDE + GAP
    grid = Image.new("RGB", (columns * column_width, max(sum(heights), 1)), "white")
    top = 0
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            grid.paste(tile, (column * column_width, top))
        top += height
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as temporary:
        grid.save(temporary, quality=90)
    return grid


def _tile(picture: Picture, names: Sequence[str]) -> Image.Image:
    """An image of a grid below its title."""
    height, width = picture.image.shape[:2]
    scale = SIDE / width
    scaled_height = max(round(height * scale), 1)
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    scaled = cv2.resize(picture.image, (SIDE, scaled_height), interpolation=method)
    scores = np.zeros(len(picture.boxes)) if picture.scores is None else picture.scores
    rows = np.column_stack([picture.boxes * scale, scores, picture.classes])
    drawn = draw_detections(scaled, rows, names, scores=picture.scores is not None)
    title_height = TITLE if picture.title else 0
    tile = Image.new("RGB", (SIDE, title_height + scaled_height), "white")
    tile.paste(Image.fromarray(drawn), (0, title_height))
    ImageDraw.Draw(tile).text((2, 1), one_line(picture.title, LONGEST_TITLE), fill=INK, font=_font(13))
    return tile


def plot_truth_and_detections(
    truth: Sequence[Picture], detections: Sequence[Picture], names: Sequence[str], path: Path
) -> Image.Image:
    """Labels next to the detections of the same images, two images per row."""
    pictures = []
    for labelled, detected in zip(truth, detections, strict=True):
        for side, picture in (("labelled", labelled), ("detected", detected)):
            title = f"{side}: {picture.title}" if picture.title else side
            pictures.append(picture._replace(title=title))
    return plot_pictures(pictures, names, path)


def draw_detections(image: np.ndarray, detections: np.ndarray, names: Mapping[int, str] | Sequence[str], *,
                    labels: bool = True, scores: bool = True, line_px: int | None = None) -> np.ndarray:
    """A copy of an image (height, width, 3) uint8 RGB with a box for each detection, the best on top.

    Labels do not cover each other, and those of the best detections are placed first: above the box, below it, or
    inside. A label without a free place is left out. Fast enough for every frame of a video.

    Args:
        detections: (n, 6) rows [x1, y1, x2, y2, score, class], best first.
        labels, scores: whether to write them at each box.
        line_px: line width; None: 1/200 of the shorter side.
    """
    picture = Image.fromarray(image)
    canvas = ImageDraw.Draw(picture)
    shorter_side = min(image.shape[:2])
    line_px = line_px or max(2, round(shorter_side / 200))
    font = _font(max(10, round(shorter_side / 40)))
    for *box, _, number in detections[::-1].tolist():
        canvas.rectangle(tuple(box), outline=COLOURS[int(number) % len(COLOURS)], width=line_px)
    if not (labels or scores):
        return np.asarray(picture)
    taken = np.zeros((0, 4))  # the labels so far, xyxy
    for *box, score, number in detections.tolist():
        kind = int(number)
        words = []
        if labels:
            words.append(one_line(names[kind], LONGEST_NAME))
        if scores:
            words.append(f"{score:.2f}")
        text = " ".join(words)
        _, _, width, height = canvas.textbbox((0, 0), text, font=font)
        label = _free_place(box, (width, height), image.shape[:2], taken)
        if label is not None:
            taken = np.vstack([taken, label])
            canvas.rectangle(label, fill=COLOURS[kind % len(COLOURS)])
            canvas.text(label[:2], text, fill="white", font=font)
    return np.asarray(picture)


def _free_place(box: Sequence[float], size: tuple[float, float], image: tuple[int, ...], taken: np.ndarray
                ) -> tuple[float, float, float, float] | None:
    """The first place (xyxy) at a box where a label of `size` (width, height) covers none of `taken` (n, 4)."""
    left, top, right, bottom = box
    width, height = size
    image_height, image_width = image
    rows = (top - height, bottom, top, bottom - height)  # above, below, inside at the top, inside at the bottom
    places = []
    for y in rows:
        if 0 <= y <= image_height - height:
            places += [(left, y), (right - width, y)]
    for x, y in places or [(left, top)]:
        x = max(0.0, min(x, image_width - width))  # a wide label is moved into the image
        across = (taken[:, 0] < x + width) & (taken[:, 2] > x)
        down = (taken[:, 1] < y + height) & (taken[:, 3] > y)
        if not (across & down).any():
            return x, y, x + width, y + height
    return None


@lru_cache
def _font(size_px: int) -> ImageFont.FreeTypeFont:
    """Matplotlib's font, which covers more alphabets than Pillow's."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size_px)
