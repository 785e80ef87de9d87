"""The confusion matrix as a figure."""

from pathlib import Path

import numpy as np

from ray_yolo.plots.confusion import plot_confusion
from tests.support.figures import num_colours

MATRIX = np.array([[6, 0, 1], [2, 3, 0], [0, 1, 0]])  # columns: 8, 4 and 1 labels


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
