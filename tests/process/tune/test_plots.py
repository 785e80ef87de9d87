"""A search as figures."""

from math import nan
from pathlib import Path

import pytest

from ray_yolo.tune.plots import (
    ancestors,
    plot_genes,
    plot_lineage,
    plot_parallel,
    plot_progress,
    plot_rungs,
)
from tests.support.figures import dots, num_colours, points


def test_each_gene_has_a_panel_with_its_best_value(tmp_path: Path) -> None:
    genes = {"lr0": [0.1, 0.2, 0.3], "box": [5.0, 6.0, 7.0]}
    figure = plot_genes(genes, [0.5, nan, 0.25], [0, 0, 0], tmp_path / "genes.png")
    titles = [(axes.get_title(loc="left"), axes.get_title(loc="right")) for axes in figure.axes[:2]]
    assert titles == [("lr0", "0.1"), ("box", "5")]
    assert dots(figure.axes[0].collections[0]) == [(0.1, 0.5), (0.3, 0.25)]
    assert num_colours(tmp_path / "genes.png") > 10


def test_the_best_so_far_never_falls_and_failures_are_marked(tmp_path: Path) -> None:
    figure = plot_progress([nan, 0.2, 0.1, nan, 0.3], [0] * 5, tmp_path / "progress.png")
    (axes,) = figure.axes
    assert points(axes.lines[0]) == [(1, 0.2), (2, 0.2), (3, 0.2), (4, 0.3)]
    done, failed = axes.collections
    assert dots(done) == [(1, 0.2), (2, 0.1), (4, 0.3)]
    assert [trial for trial, _ in dots(failed)] == [0, 3]
    assert axes.get_legend() is not None


def test_the_best_is_the_highest_of_those_that_were_trained_furthest(tmp_path: Path) -> None:
    fitness, rungs = [0.9, 0.2, 0.1, nan, 0.3], [1, 2, 2, 0, 2]
    (axes,) = plot_progress(fitness, rungs, tmp_path / "progress.png").axes
    assert points(axes.lines[0]) == [(0, 0.9), (1, 0.2), (2, 0.2), (3, 0.2), (4, 0.3)]
    figure = plot_genes({"lr0": [1.0, 2.0, 3.0, 4.0, 5.0]}, fitness, rungs, tmp_path / "genes.png")
    assert figure.axes[0].get_title(loc="right") == "5"


def test_a_search_without_results_has_pictures(tmp_path: Path) -> None:
    plot_genes({"lr0": [0.1]}, [nan], [0], tmp_path / "genes.png")
    plot_progress([nan], [0], tmp_path / "one.png")
    plot_progress([], [], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0


def test_ancestors_are_the_parents_and_their_parents_up_to_the_starts() -> None:
    parents = {0: (), 1: (), 2: (0,), 3: (1,), 4: (2, 0), 5: (4, 2), 6: (5,)}
    assert ancestors(parents, 5) == [0, 2, 4]
    assert ancestors(parents, 3) == [1]
    assert ancestors(parents, 1) == []
    assert ancestors({}, 7) == []


def test_the_lineage_joins_the_ancestors_of_the_best(tmp_path: Path) -> None:
    parents = {0: (), 1: (), 2: (0,), 3: (2, 0), 4: (1,)}
    fitness = {0: 0.1, 1: None, 2: 0.3, 3: 0.4, 4: 0.2, 5: nan}
    figure = plot_lineage(parents, fitness, 3, tmp_path / "lineage.png")
    (axes,) = figure.axes
    trials, line, best = axes.collections
    assert dots(trials) == [(0, 0.1), (2, 0.3), (3, 0.4), (4, 0.2)]
    assert dots(line) == [(0, 0.1), (2, 0.3)]
    assert dots(best) == [(3, 0.4)]
    assert [points(each) for each in axes.lines] == [
        [(0, 0.1), (2, 0.3)], [(2, 0.3), (3, 0.4)], [(0, 0.1), (3, 0.4)]]
    assert sorted(text.get_text() for text in axes.texts) == ["0", "2", "3"]
    assert num_colours(tmp_path / "lineage.png") > 10


def test_numbers_never_cover_each_other_or_a_dot(tmp_path: Path) -> None:
    count = 120
    parents = {trial: tuple(range(max(trial - 2, 0), trial)) for trial in range(count)}
    fitness = {trial: trial % 7 / 100 + trial / 50 for trial in range(count)}
    figure = plot_lineage(parents, fitness, count - 1, tmp_path / "lineage.png")
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    places = axes.transData.transform(list(fitness.items()))
    assert 5 < len(boxes) < count
    assert axes.texts[0].get_text() == str(count - 1)
    assert [box.count_overlaps(boxes) for box in boxes] == [1] * len(boxes)  # itself
    assert not any(box.count_contains(places) for box in boxes)


def test_a_best_trial_without_parents_has_a_picture(tmp_path: Path) -> None:
    figure = plot_lineage({0: ()}, {0: 0.5}, 0, tmp_path / "lineage.png")
    assert len(figure.axes[0].lines) == 0
    assert (tmp_path / "lineage.png").stat().st_size > 0


def test_trials_are_lines_over_their_genes_and_the_best_one_stands_out(tmp_path: Path) -> None:
    genes = {"lr0": [1.0, 2.0, 3.0], "box": [3.0, 1.0, 2.0], "obj": [5.0] * 3}
    (axes,) = plot_parallel(genes, [0.1, 0.3, 0.2], tmp_path / "parallel.png").axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["lr0", "box", "fitness (0.1 to 0.3)"]
    ends = [line.get_ydata().tolist() for line in axes.lines]
    assert ends == [[0.0, 1.0, 0.0], [1.0, 0.5, pytest.approx(0.5)], [0.5, 0.0, 1.0]]
    assert [line.get_linewidth() for line in axes.lines] == [0.9, 0.9, 2.0]
    plot_parallel({}, [], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()


def test_rungs_and_the_pairs_of_the_claim_are_one_picture(tmp_path: Path) -> None:
    results = {0: {3: 0.1, 9: 0.3}, 1: {3: 0.2}, 2: {3: 0.2, 9: 0.4}}
    left, right = plot_rungs(results, {5: (0.3, 0.4), 6: (0.35, 0.3)}, 2, tmp_path / "rungs.png").axes
    assert [points(line) for line in left.lines] == [[(3, 0.1), (9, 0.3)], [(3, 0.2)], [(3, 0.2), (9, 0.4)]]
    assert [line.get_linewidth() for line in left.lines] == [0.9, 0.9, 2.0]
    assert [points(line) for line in right.lines] == [[(0, 0.3), (1, 0.4)], [(0, 0.35), (1, 0.3)]]
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == (
        "Rungs of 3 trials", "Claim: 2 pairs of equal seeds")
    plot_rungs({}, {}, 0, tmp_path / "empty.png")
    assert num_colours(tmp_path / "rungs.png") > 10
