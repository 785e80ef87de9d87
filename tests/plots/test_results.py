"""The course of a training as a figure."""

from pathlib import Path

from ray_yolo.events import EpochEvent
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


def test_epochs_without_validation_leave_a_gap_in_validation_only(tmp_path: Path) -> None:
    figure = plot_results([row(0), row(1, validated=False), row(2)], tmp_path / "results.png")
    train, val = figure.axes[0].lines
    assert [x for x, _ in points(train)] == [1, 2, 3]
    assert [x for x, _ in points(val)] == [1, 3]


def test_the_last_best_epoch_is_marked(tmp_path: Path) -> None:
    """With the digits that the console gives it."""
    second = row(1, best=True)
    second = second.model_copy(update={"metrics": {**(second.metrics or {}), "mAP50-95": 0.000788219}})
    figure = plot_results([row(0, best=True), second, row(2)], tmp_path / "results.png")
    assert figure.axes[4].get_title(loc="right") == "best: 0.0007882 in epoch 2"
    assert [x for x, _ in points(figure.axes[4].lines[-1])] == [2, 2]
    assert {axes.get_xlabel() for axes in figure.axes} == {"Epoch (counted from 1)"}


def test_a_training_never_validated_or_never_begun_has_a_picture(tmp_path: Path) -> None:
    plot_results([row(0, validated=False)], tmp_path / "one.png")
    plot_results([], tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
