"""The curves as figures: which lines there are and what they are called."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ray_yolo.ops.average_precision import GRID, evaluate
from ray_yolo.plots.curves import plot_against_confidence, plot_all_curves, plot_precision_recall
from tests.support.figures import num_colours, points


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_class_has_a_line_and_the_mean_of_them_another(tmp_path: Path) -> None:
    values = np.array([1 - GRID, 0.5 * (1 - GRID)])
    figure = plot_precision_recall(values, np.array([0.5, 0.25]), ["cat", "dog"], tmp_path / "new" / "curve.png")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Recall", "Precision")
    assert legend_of(figure) == ["cat  0.500", "dog  0.250", "mean of 2 classes  0.375"]
    assert np.allclose(points(axes.lines[-1]), np.column_stack([GRID, 0.75 * (1 - GRID)]))
    assert num_colours(tmp_path / "new" / "curve.png") > 10


def test_lines_of_twelve_classes_all_differ(tmp_path: Path) -> None:
    figure = plot_precision_recall(np.zeros((12, 1000)), np.zeros(12), [f"c{i}" for i in range(12)], tmp_path / "c.png")
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13


def test_more_classes_than_can_be_told_apart_are_one_entry(tmp_path: Path) -> None:
    figure = plot_precision_recall(np.zeros((13, 1000)), np.zeros(13), [f"c{i}" for i in range(13)], tmp_path / "c.png")
    assert legend_of(figure) == ["single classes", "mean of 13 classes  0.000"]


def test_the_reported_confidence_is_marked_and_values_there_are_named(tmp_path: Path) -> None:
    figure = plot_against_confidence(GRID[None], "F1", float(GRID[700]), ["cat"], tmp_path / "c.png")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "F1"
    assert axes.texts[0].get_text() == "best F1 at confidence 0.701"
    assert legend_of(figure) == ["cat  0.701"]


def test_names_are_never_read_as_formulas_or_hidden(tmp_path: Path) -> None:
    names = ["$x_1$", "_background", "line\nbreak", "n" * 40, "\N{CJK UNIFIED IDEOGRAPH-732B}"]
    figure = plot_precision_recall(np.zeros((5, 1000)), np.zeros(5), names, tmp_path / "c.png")
    shown = [text.removesuffix("  0.000") for text in legend_of(figure)]
    assert shown[0] == r"\$x_1\$"
    assert shown[1].endswith("_background")
    assert shown[2] == "line break"
    assert len(shown[3]) == 24
    assert len(shown) == 6


def test_all_curves_of_the_classes_with_labels_are_written(tmp_path: Path) -> None:
    metrics = evaluate(np.ones((1, 10), dtype=bool), np.array([0.9]), np.array([1]), np.array([1]), num_classes=3)
    plot_all_curves(metrics, ["a", "b", "c"], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["F1_curve.png", "PR_curve.png", "P_curve.png", "R_curve.png"]


def test_curves_of_nothing_are_empty_pictures(tmp_path: Path) -> None:
    nothing = np.zeros(0)
    metrics = evaluate(np.zeros((0, 10), dtype=bool), nothing, nothing.astype(int), nothing.astype(int), num_classes=2)
    plot_all_curves(metrics, ["a", "b"], tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
