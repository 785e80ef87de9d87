"""Detections of an image or frame with its pixels: as arrays, plotted, cropped, and as a table.

Names and shapes follow Ultralytics' `Results`, so that tools made for it can read these.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ray_yolo.core.formatting import format_count
from ray_yolo.labels import shares_of
from ray_yolo.plots.boxes import draw_detections
from ray_yolo.plots.page import Section, jpeg, notebook_html

if TYPE_CHECKING:
    import pandas as pd


LEAST_SIDE = 256
"""Pixels of the longer side from which names and scores can be read in a picture."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """Detections of one image, best score first: rows [x1, y1, x2, y2, score, class] in pixels.

    Attributes:
        data: (n, 6) float32; a tensor on the CPU, or an array after `numpy()`.
        orig_shape: (height, width) of the image.
    """

    data: Any
    orig_shape: tuple[int, int]
    id: ClassVar[None] = None  # there is no tracking
    is_track: ClassVar[bool] = False

    @property
    def xyxy(self) -> Any:
        """(n, 4) corners in pixels."""
        return self.data[:, :4]

    @property
    def xywh(self) -> Any:
        """(n, 4) centre x, centre y, width and height in pixels."""
        x1, y1, x2, y2 = (self.data[:, edge] for edge in range(4))
        stack: Any = torch.stack if isinstance(self.data, Tensor) else np.stack
        return stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], -1)

    @property
    def xyxyn(self) -> Any:
        """`xyxy` as shares of the image's width and height."""
        return self.xyxy / self._sides()

    @property
    def xywhn(self) -> Any:
        """`xywh` as shares of the image's width and height."""
        return self.xywh / self._sides()

    @property
    def conf(self) -> Any:
        """(n,) scores."""
        return self.data[:, 4]

    @property
    def cls(self) -> Any:
        """(n,) class numbers, as floats."""
        return self.data[:, 5]

    @property
    def shape(self) -> Any:
        """(n, 6)."""
        return self.data.shape

    def _sides(self) -> Any:
        height, width = self.orig_shape
        sides = np.array([width, height, width, height], np.float32)
        return torch.from_numpy(sides) if isinstance(self.data, Tensor) else sides

    def cpu(self) -> Boxes:
        """Itself: detections are on the CPU."""
        return self

    def numpy(self) -> Boxes:
        """A copy with NumPy arrays."""
        return replace(self, data=np.asarray(self.data))

    def __repr__(self) -> str:
        height, width = self.orig_shape
        return f"Boxes({format_count(len(self), 'detection')} in {width} x {height} pixels)"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: Any) -> Boxes:
        return replace(self, data=self.data[[rows] if isinstance(rows, int) else rows])

    def __iter__(self) -> Iterator[Boxes]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True, eq=False)
class Results:
    """An image and its detections."""

    orig_img: np.ndarray  #: (height, width, 3) uint8 BGR, upright
    path: str  #: the file's; image0.jpg, image1.jpg, ... for arrays
    names: dict[int, str]  #: the classes' names by their numbers
    boxes: Boxes
    speed: dict[str, float] = field(default_factory=dict)  #: ms: preprocess, inference, postprocess
    frame: int | None = None  #: its number in a video, counted from 1
    error: str = ""  #: why a file could not be read; the image is empty then
    masks: ClassVar[None] = None
    probs: ClassVar[None] = None
    keypoints: ClassVar[None] = None
    obb: ClassVar[None] = None

    @property
    def orig_shape(self) -> tuple[int, int]:
        """(height, width)."""
        height, width = self.orig_img.shape[:2]
        return height, width

    def __repr__(self) -> str:
        frame = "" if self.frame is None else f", frame {self.frame}"
        height, width = self.orig_shape
        return f"Results({self.path!r}{frame}, {width} x {height} pixels: {self.verbose()})"

    def _repr_html_(self) -> str:
        """For a notebook: a table of the boxes, and the picture with them."""
        columns = ("name", "confidence", "x1", "y1", "x2", "y2")
        rows = [(box["name"], box["confidence"], *map(round, box["box"].values())) for box in self.summary()]
        picture = None if self.error else self.plot(least_side=LEAST_SIDE, pil=True)
        return notebook_html(Section(f"{self.path}: {self.verbose()}", table=[columns, *rows] if rows else ()), picture)

    def verbose(self) -> str:
        """The number of boxes of each class in words: '2 cats, 1 dog'; or why the file could not be read."""
        if self.error:
            return self.error
        counts = Counter(int(number) for number in self.boxes.cls.tolist())
        return ", ".join(f"{count} {self.names[number]}" for number, count in sorted(counts.items())) or "no boxes"

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, rows: Any) -> Results:
        return replace(self, boxes=self.boxes[rows])

    @overload
    def plot(self, *, labels: bool = True, conf: bool = True, line_width: int | None = None, least_side: int = 0,
             pil: Literal[False] = False) -> np.ndarray: ...
    @overload
    def plot(self, *, labels: bool = True, conf: bool = True, line_width: int | None = None, least_side: int = 0,
             pil: Literal[True]) -> Image.Image: ...

    def plot(self, *, labels: bool = True, conf: bool = True, line_width: int | None = None, least_side: int = 0,
             pil: bool = False) -> np.ndarray | Image.Image:
        """The image with its boxes, class names and scores, (height, width, 3) uint8 BGR.

        Args:
            line_width: in pixels; None: 1/200 of the shorter side.
            least_side: an image whose longer side has fewer pixels is first enlarged by a whole factor.
            pil: return an RGB image of Pillow instead.
        """
        rgb, rows = np.ascontiguousarray(self.orig_img[..., ::-1]), np.asarray(self.boxes.data).copy()
        if 0 < max(self.orig_shape) < least_side:
            factor = math.ceil(least_side / max(self.orig_shape))
            rgb = cv2.resize(rgb, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
            rows[:, :4] *= factor
        plot = draw_detections(rgb, rows, self.names, labels=labels, scores=conf, line_px=line_width)
        return Image.fromarray(plot) if pil else np.ascontiguousarray(plot[..., ::-1])

    def show(self, **plot: Any) -> None:
        """Show `plot` in the notebook, which stores it as one JPEG, or in the system's viewer."""
        picture = self.plot(**plot, pil=True)
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display({"image/jpeg": base64.b64encode(jpeg(picture)).decode()}, raw=True)
        else:
            picture.show()

    def save(self, filename: str | Path | None = None, **plot: Any) -> str:
        """Write `plot` to a file, by default results_NAME.jpg in the current folder. Returns its path: see
        `write_picture`."""
        return str(write_picture(Path(filename or f"results_{Path(self.path).stem}.jpg"), self.plot(**plot)))

    def crop(self) -> list[np.ndarray]:
        """The crop of each box, (height, width, 3) uint8 BGR; at least one pixel."""
        height, width = self.orig_shape
        corners = np.asarray(self.boxes.xyxy)
        low = corners[:, :2].astype(int).clip(0, (width - 1, height - 1))
        high = np.ceil(corners[:, 2:]).astype(int).clip(low + 1, (width, height))
        return [self.orig_img[y1:y2, x1:x2] for (x1, y1), (x2, y2) in zip(low.tolist(), high.tolist(), strict=True)]

    def save_crop(self, save_dir: str | Path, file_name: str | Path = "") -> None:
        """Write each crop as SAVE_DIR/CLASS/FILE_NAME.N.jpg, N from 1. In names of classes, characters that are no
        letters, digits, blanks, `-` and `_` become `_`; names that are then equal have the class's number, too."""
        stem = file_name or Path(self.path).stem
        folders = _class_folders(self.names)
        pieces = zip(self.crop(), self.boxes.cls.tolist(), strict=True)
        for number, (piece, kind) in enumerate(pieces, 1):
            path = Path(save_dir) / folders[int(kind)] / f"{stem}.{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_picture(path, piece)

    def save_txt(self, txt_file: str | Path, save_conf: bool = False) -> str:
        """Write a label file in YOLO's format and return its path; without boxes it is empty.

        Rows are class, centre x, centre y, width, height (shares of the image) and, with `save_conf`, the score. An
        existing file is replaced.
        """
        path = Path(txt_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(label_rows(np.asarray(self.boxes.data), self.orig_shape, scores=save_conf))
        return str(path)

    def summary(self, *, normalize: bool = False, decimals: int = 5) -> list[dict[str, Any]]:
        """A dict per box, best score first: name, class, confidence, and box with x1, y1, x2, y2.

        Args:
            normalize: boxes as shares of the image instead of pixels.
            decimals: of the score and the box.
        """
        boxes = self.boxes.numpy()
        corners = boxes.xyxyn if normalize else boxes.xyxy
        rows = []
        for number, score, edges in zip(boxes.cls.tolist(), boxes.conf.tolist(), corners.tolist(), strict=True):
            kind = int(number)
            x1, y1, x2, y2 = (round(edge, decimals) for edge in edges)
            rows.append({"name": self.names[kind], "class": kind, "confidence": round(score, decimals),
                         "box": {"x1": x1, "y1": y1, "x2": x2, "y2": y2}})
        return rows

    def to_json(self, *, normalize: bool = False, decimals: int = 5) -> str:
        """`summary` as JSON."""
        return json.dumps(self.summary(normalize=normalize, decimals=decimals), indent=2)

    def to_df(self) -> pd.DataFrame:
        """One row per detection: xmin, ymin, xmax, ymax in pixels, confidence, class, name."""
        import pandas as pd

        columns = ["xmin", "ymin", "xmax", "ymax", "confidence", "class"]
        table = pd.DataFrame(np.asarray(self.boxes.data), columns=columns)
        table["class"] = table["class"].astype("int64")
        return table.assign(name=[self.names[kind] for kind in table["class"]])

    to_pandas = to_df


def write_picture(path: Path, bgr: np.ndarray) -> Path:
    """Write a picture in the format of a suffix, by default JPEG. Returns the path of the file: with the suffix .png if
    the format cannot hold the picture, as JPEG none with a side of more than 65,500 pixels.

    Raises:
        OSError: if the file cannot be written.
    """
    fits, content = cv2.imencode(path.suffix or ".jpg", bgr)
    if not fits:
        path = path.with_suffix(".png")
        _, content = cv2.imencode(".png", bgr)
    path.write_bytes(content.tobytes())
    return path


def label_rows(detections: np.ndarray, size: tuple[int, int], *, scores: bool) -> str:
    """YOLO rows of detections (n, 6) in an image of `size` (height, width): class, centre x, centre y, width, height
    (shares of the image) and, on request, the score."""
    boxes = shares_of(detections[:, :4].astype(np.float64), size)
    lines = []
    for box, (score, kind) in zip(boxes.tolist(), detections[:, 4:].tolist(), strict=True):
        numbers = [kind, *box]
        if scores:
            numbers.append(score)
        lines.append(" ".join(f"{number:g}" for number in numbers) + "\n")
    return "".join(lines)


def _class_folders(names: Mapping[int, str]) -> dict[int, str]:
    """A folder's name for each class, different for each. Names of classes are untrusted input."""
    folders = {kind: re.sub(r"[^\w -]", "_", name) for kind, name in names.items()}
    while True:
        uses = Counter(folders.values())
        if len(uses) == len(folders):
            return folders
        folders = {kind: f"{name}_{kind}" if uses[name] > 1 else name for kind, name in folders.items()}
