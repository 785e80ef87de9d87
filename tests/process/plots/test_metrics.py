"""Curves and confusion matrix as figures: which lines there are and what they are called, what cells carry."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ray_yolo.ops.average_precision import GRID, Curves, evaluate
from ray_yolo.plots.metrics import plot_all_curves, plot_confusion, plot_curves
from tests.support.figures import num_colours, points

TEXTS = {"title": "Precision and recall", "x": "Recall", "y": "Precision"}
MATRIX = np.array([[6, 0, 1], [2, 3, 0], [0, 1, 0]])  # columns: 8, 4 and 1 labels


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_each_class_has_a_line_and_the_mean_of_them_another(tmp_path: Path) -> None:
    values = np.array([1 - GRID, 0.5 * (1 - GRID)])
    figure = plot_curves(values, np.array([0.5, 0.25]), ["cat", "dog"], tmp_path / "new" / "curve.png", **TEXTS)
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Recall", "Precision")
    assert legend_of(figure) == ["cat  0.500", "dog  0.250", "mean of 2 classes  0.375"]
    assert np.allclose(points(axes.lines[-1]), np.column_stack([GRID, 0.75 * (1 - GRID)]))
    assert num_colours(tmp_path / "new" / "curve.png") > 10


def test_lines_of_twelve_classes_all_differ(tmp_path: Path) -> None:
    figure = plot_curves(np.zeros((12, 1000)), np.zeros(12), [f"c{i}" for i in range(12)], tmp_path / "c.png", **TEXTS)
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 13


def test_more_classes_than_distinguishable_lines_are_one_entry(tmp_path: Path) -> None:
    figure = plot_curves(np.zeros((13, 1000)), np.zeros(13), [f"c{i}" for i in range(13)], tmp_path / "c.png", **TEXTS)
    assert legend_of(figure) == ["single classes", "mean of 13 classes  0.000"]


def test_f1_is_marked_at_its_own_peak_and_the_others_where_they_are_reported(tmp_path: Path) -> None:
    """What is reported is the peak of the smoothed F1."""
    f1 = np.where(GRID[200] == GRID, 1.5, GRID)[None]
    metrics = evaluate(np.ones((1, 10), dtype=bool), np.array([0.9]), np.array([0]), np.array([0]), num_classes=1)
    metrics = replace(metrics, confidence=float(GRID[700]), curves=Curves(1 - GRID[None], GRID[None], f1, f1))
    _, *figures = plot_all_curves(metrics, ["cat"], tmp_path)
    assert [(figure.axes[0].get_ylabel(), figure.axes[0].texts[0].get_text(), *legend_of(figure))
            for figure in figures] == [
        ("F1", "highest at confidence 0.200", "cat  1.500"),
        ("Precision", "reported at confidence 0.701", "cat  0.299"),
        ("Recall", "reported at confidence 0.701", "cat  0.701")]


def test_names_are_never_read_as_formulas_or_hidden(tmp_path: Path) -> None:
    names = ["$x_1$", "_background", "line\nbreak", "n" * 40, "\N{CJK UNIFIED IDEOGRAPH-732B}"]
    figure = plot_curves(np.zeros((5, 1000)), np.zeros(5), names, tmp_path / "c.png", **TEXTS)
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


def test_cells_carry_counts_and_colours_carry_shares(tmp_path: Path) -> None:
    figure = plot_confusion(MATRIX, ["cat", "dog"], tmp_path / "c.png", normalised=False)
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Labelled", "Detected")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["cat", "dog", "background"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["cat", "dog", "background"]
    cells = {t.get_position(): t.get_text() for t in axes.texts}  # (labelled, detected)
    assert cells == {(0, 0): "6", (2, 0): "1", (0, 1): "2", (1, 1): "3", (1, 2): "1"}
    shares = axes.images[0].get_array()
    assert shares is not None
    assert shares.tolist() == [[0.75, 0.0, 1.0], [0.25, 0.75, 0.0], [0.0, 0.25, 0.0]]
    assert num_colours(tmp_path / "c.png") > 10


def test_normalised_cells_carry_shares_of_the_labelled_class(tmp_path: Path) -> None:
    figure = plot_confusion(MATRIX, ["cat", "dog"], tmp_path / "c.png", normalised=True)
    cells = {t.get_position(): t.get_text() for t in figure.axes[0].texts}
    assert cells == {(0, 0): "0.75", (2, 0): "1.00", (0, 1): "0.25", (1, 1): "0.75", (1, 2): "0.25"}


def test_cells_of_many_classes_carry_no_numbers(tmp_path: Path) -> None:
    figure = plot_confusion(np.eye(41, dtype=np.int64), [f"class {i}" for i in range(40)], tmp_path / "c.png",
                            normalised=False)
    assert len(figure.axes[0].texts) == 0
    assert len(figure.axes[0].get_yticklabels()) == 41


def test_a_matrix_of_nothing_is_a_picture(tmp_path: Path) -> None:
    plot_confusion(np.zeros((2, 2), dtype=np.int64), ["cat"], tmp_path / "c.png", normalised=True)
    assert (tmp_path / "c.png").stat().st_size > 0


def test_the_confusion_matrix_names_its_thresholds(tmp_path: Path) -> None:
    figure = plot_confusion(np.eye(3, dtype=np.int64), ["a", "b"], tmp_path / "c.png", normalised=True)
    assert figure.axes[0].get_title(loc="left").splitlines()[1] == "confidence > 0.25, IoU > 0.45"
