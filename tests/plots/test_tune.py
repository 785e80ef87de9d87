"""A search as figures."""

from math import nan
from pathlib import Path

from ray_yolo.plots.tune import plot_genes, plot_progress
from tests.support.figures import dots, num_colours, points


def test_each_gene_has_a_panel_with_its_best_value(tmp_path: Path) -> None:
    figure = plot_genes({"lr0": [0.1, 0.2, 0.3], "box": [5.0, 6.0, 7.0]}, [0.5, nan, 0.25], tmp_path / "genes.png")
    titles = [(axes.get_title(loc="left"), axes.get_title(loc="right")) for axes in figure.axes[:2]]
    assert titles == [("lr0", "0.1"), ("box", "5")]
    assert dots(figure.axes[0].collections[0]) == [(0.1, 0.5), (0.3, 0.25)]
    assert num_colours(tmp_path / "genes.png") > 10


def test_the_best_so_far_never_falls_and_failures_are_marked(tmp_path: Path) -> None:
    figure = plot_progress([nan, 0.2, 0.1, nan, 0.3], tmp_path / "progress.png")
    (axes,) = figure.axes
    assert points(axes.lines[0]) == [(1, 0.2), (2, 0.2), (3, 0.2), (4, 0.3)]
    done, failed = axes.collections
    assert dots(done) == [(1, 0.2), (2, 0.1), (4, 0.3)]
    assert [trial for trial, _ in dots(failed)] == [0, 3]
    assert axes.get_legend() is not None


def test_a_search_without_results_has_pictures(tmp_path: Path) -> None:
    plot_genes({"lr0": [0.1]}, [nan], tmp_path / "genes.png")
    plot_progress([nan], tmp_path / "one.png")
    plot_progress([], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
