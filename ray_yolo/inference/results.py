"""Detections of an image or frame with its pixels: as arrays, plotted, cropped, and as a table.

Names and shapes follow Ultralytics' `Results`, so that tools made for it can read these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
import torch
from torch import Tensor

from ray_yolo.plots.boxes import draw_detections

if TYPE_CHECKING:
    import pandas as pd


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
    path: str  #: of the file; image0.jpg, image1.jpg, ... for arrays
    names: dict[int, str]  #: of the classes
    boxes: Boxes
    speed: dict[str, float] = field(default_factory=dict)  #: ms: preprocess, inference, postprocess
    frame: int | None = None  #: of a video, counted from 1
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

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, rows: Any) -> Results:
        return replace(self, boxes=self.boxes[rows])

    def plot(self, *, labels: bool = True, conf: bool = True, line_width: int | None = None) -> np.ndarray:
        """The image with its boxes, class names and scores, (height, width, 3) uint8 BGR. `line_width` is in pixels;
        left out: 1/200 of the shorter side."""
        plot = draw_detections(np.ascontiguousarray(self.orig_img[..., ::-1]), np.asarray(self.boxes.data), self.names,
                               labels=labels, scores=conf, line_px=line_width)
        return np.ascontiguousarray(plot[..., ::-1])

    def save(self, filename: str | Path | None = None, **plot: Any) -> str:
        """Write `plot` to a file, by default results_NAME.jpg in the current folder. Returns its path."""
        path = Path(filename or f"results_{Path(self.path).stem}.jpg")
        ok, content = cv2.imencode(path.suffix or ".jpg", self.plot(**plot))
        assert ok
        path.write_bytes(content.tobytes())
        return str(path)

    def crop(self) -> list[np.ndarray]:
        """The crop of each box, (height, width, 3) uint8 BGR; at least one pixel."""
        height, width = self.orig_shape
        corners = np.asarray(self.boxes.xyxy)
        low = corners[:, :2].astype(int).clip(0, (width - 1, height - 1))
        high = np.ceil(corners[:, 2:]).astype(int).clip(low + 1, (width, height))
        return [self.orig_img[y1:y2, x1:x2] for (x1, y1), (x2, y2) in zip(low.tolist(), high.tolist(), strict=True)]

    def save_crop(self, save_dir: str | Path, file_name: str | Path = "") -> None:
        """Write each crop as SAVE_DIR/CLASS/FILE_NAME.N.jpg, N from 1."""
        stem = file_name or Path(self.path).stem
        pieces = zip(self.crop(), self.boxes.cls.tolist(), strict=True)
        for number, (piece, kind) in enumerate(pieces, 1):
            folder = re.sub(r"[^\w -]", "_", self.names[int(kind)])  # class names are untrusted input
            path = Path(save_dir) / folder / f"{stem}.{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            _, content = cv2.imencode(".jpg", piece)
            path.write_bytes(content.tobytes())

    def to_df(self) -> pd.DataFrame:
        """One row per detection: xmin, ymin, xmax, ymax in pixels, confidence, class, name."""
        import pandas as pd

        columns = ["xmin", "ymin", "xmax", "ymax", "confidence", "class"]
        table = pd.DataFrame(np.asarray(self.boxes.data), columns=columns)
        table["class"] = table["class"].astype("int64")
        return table.assign(name=[self.names[kind] for kind in table["class"]])

    to_pandas = to_df
