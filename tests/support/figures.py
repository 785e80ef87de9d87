"""Reading figures and picture files."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image


def points(line: Line2D) -> list[tuple[float, float]]:
    """The corners of a line."""
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def dots(collection: Collection) -> list[tuple[float, float]]:
    """The points of a scatter."""
    return [(float(x), float(y)) for x, y in np.asarray(collection.get_offsets())]


def rectangles(axes: Axes) -> list[tuple[float, float, float, float]]:
    """(x, y, width, height) of bars and frames."""
    return [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axes.patches
            if isinstance(patch, Rectangle)]


def num_colours(path: Path) -> int:
    """Different greys in a picture file; 1 would be a blank one."""
    with Image.open(path) as picture:
        return len(np.unique(np.asarray(picture.convert("L"))))
