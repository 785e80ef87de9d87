"""The common style of all figures, and the helpers that import matplotlib.

Figures are created without pyplot: no global state, no window system, no figure to close. The colours are Okabe and
Ito's, which are distinguishable with colour blindness; no figure relies on colour alone.
"""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ray_yolo.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
GREY = "#8c8c8c"
PALE = "#e4e4e4"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito 2008, without yellow
LINES = tuple(product(("-", "--"), COLOURS))  # (dash, colour) of the distinguishable lines of one figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def dress(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> Axes:
    """Set title, labels, grid and frame of axes."""
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3, color=GREY)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GREY)
    return axes


def count_along_x(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers only; call it after drawing the data."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:  # a single point
        axes.set_xlim(low - 0.5, high + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def one_line(text: str, limit: int = 24) -> str:
    """A name on one line, shortened to `limit` characters."""
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())  # file names may contain surrogates
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def plain(text: str, limit: int = 24) -> str:
    """`one_line`, escaped for matplotlib, which would parse formulas and hide names with a leading underscore."""
    text = one_line(text, limit)
    return ("\N{ZERO WIDTH SPACE}" if text.startswith("_") else "") + text.replace("$", r"\$")


def save(figure: Figure, path: Path) -> Figure:
    """Write the figure (the suffix names the format) and return it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a name in a script without a font
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as temporary:
            figure.savefig(temporary)
    return figure
