"""What all pictures share."""

import subprocess
import sys

from ray_yolo.plots.style import plain


def test_matplotlib_is_imported_when_something_is_drawn_and_pyplot_never() -> None:
    code = """
import sys
from ray_yolo.plots import boxes, labels, metrics, results, style
from ray_yolo.tune import plots
assert "matplotlib" not in sys.modules
style.new_figure(1, 1)
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_shown_plainly() -> None:
    for text, shown in [
        ("cat", "cat"), ("a  b\tc\n", "a b c"), ("$5", r"\$5"), ("x" * 25, "x" * 23 + "\N{HORIZONTAL ELLIPSIS}"),
        ("\udcff.png", r"\udcff.png"),
    ]:
        assert plain(text) == shown, text
