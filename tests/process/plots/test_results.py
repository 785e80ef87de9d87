"""The course of a training as a figure."""

from pathlib import Path

import numpy as np

from ray_yolo.core.events import EpochEvent
from ray_yolo.plots.results import plot_results
from tests.support import run_log
from tests.support.figures import num_colours, points


def row(epoch: int, *, validated: bool = True, best: bool = False) -> EpochEvent:
    losses = {"box": 0.1, "obj": 0.2, "cls": 0.3 / (epoch + 1)}
    metrics = {"precision": 0.5, "recall": 0.4, "mAP50": 0.3, "mAP50-95": 0.1 * epoch}
    return run_log.epoch(epoch, train=losses, val=losses if validated else None, lr=[0.1, 0.01, 0.02], best=best,
                         metrics=metrics if validated else None)


def test_six_panels_show_losses_metrics_and_rates(tmp_path: Path) -> None:
    figure = plot_results([row(0), row(1)], tmp_path / "results.png")
    panels = {axes.get_title(loc="left"): [line.get_label() for line in axes.lines] for axes in figure.axes}
    assert panels == {
        "Box loss": ["train", "val"], "Objectness loss": ["train", "val"], "Class loss": ["train", "val"],
        "Precision and recall": ["precision", "recall"], "Average precision": ["mAP50", "mAP50-95"],
        "Learning rate": ["biases", "weights", "norms"],
    }
    assert num_colours(tmp_path / "results.png") > 10


def test_lines_carry_the_values_of_their_rows(tmp_path: Path) -> None:
    figure = plot_results([row(0), row(1), row(2)], tmp_path / "results.png")
    assert points(figure.axes[2].lines[0]) == [(1, 0.3), (2, 0.15), (3, 0.3 / 3)]
    assert points(figure.axes[4].lines[1]) == [(1, 0.0), (2, 0.1), (3, 0.2)]
    assert points(figure.axes[5].lines[2]) == [(1, 0.02), (2, 0.02), (3, 0.02)]


def test_no_line_is_drawn_across_a_missing_number(tmp_path: Path) -> None:
    """A lone number between two gaps has a dot."""
    rows = [row(epoch, validated=epoch not in (1, 3, 8)) for epoch in range(40) if epoch != 30]
    figure = plot_results(rows, tmp_path / "results.png")
    train, val = figure.axes[0].lines
    assert np.flatnonzero(np.isnan(np.asarray(train.get_ydata()))).tolist() == [30]
    assert np.flatnonzero(np.isnan(np.asarray(val.get_ydata()))).tolist() == [1, 3, 8, 30]
    assert (train.get_markevery(), val.get_markevery()) == ([], [0, 2])


def test_a_spike_does_not_flatten_the_rest_of_a_curve(tmp_path: Path) -> None:
    def steep(epoch: int) -> EpochEvent:
        box = 9e4 if epoch in (5, 6) else 0.1 * 0.95**epoch
        return row(epoch).model_copy(update={"train": {"box": box, "obj": 0.2, "cls": 0.5 * 0.8**epoch}, "val": None})

    box, obj, cls, *_ = plot_results([steep(epoch) for epoch in range(40)], tmp_path / "results.png").axes
    assert 0.1 < box.get_ylim()[1] < 0.12
    assert box.get_title(loc="right") == "beyond: 9e+04 in epoch 6"
    assert [x for x, _ in points(box.lines[-1])] == [6, 7]
    assert cls.get_ylim()[1] > 0.5  # a loss that falls fast is no spike
    assert (cls.get_title(loc="right"), len(obj.lines)) == ("", 1)


def test_the_last_best_epoch_is_marked(tmp_path: Path) -> None:
    figure = plot_results([row(0, best=True), row(1, best=True), row(2)], tmp_path / "results.png")
    assert [text.get_text() for text in figure.axes[4].get_legend().get_texts()] == [
        "mAP50", "mAP50-95", "best fitness: epoch 2"]
    assert [x for x, _ in points(figure.axes[4].lines[-1])] == [2, 2]
    assert {axes.get_xlabel() for axes in figure.axes} == {"Epoch (counted from 1)"}
    shown = [tick for axes in figure.axes for tick in axes.get_xticks() if tick >= axes.get_xlim()[0]]
    assert min(shown) == 1


def test_a_training_never_validated_or_never_begun_has_a_picture(tmp_path: Path) -> None:
    plot_results([row(0, validated=False)], tmp_path / "one.png")
    plot_results([], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
