"""What `status` says of a sweep and of a training that were interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.cli import run, status
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import Event, WorkerEvent
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.usage import usage_of
from ray_yolo.tune.pool_log import log_pool
from ray_yolo.tune.status import describe_study
from tests.support import run_log

RECIPE = Recipe(epochs=3, batch_size=8, microbatch=4, precision="fp32")


def test_a_sweep_is_described_with_its_trials_and_left_as_it_is(sweep: Path) -> None:
    before = sorted(sweep.rglob("*"))
    first, header, best, second, *_ = describe_study(sweep)
    assert first == (f"{sweep}: interrupted; the same command continues it; 2 trials, 1 trained to the end; "
                     "best 0.2500 (trial 0)")
    assert (header.split(), best.split()) == (["trial", "epochs", "fitness"], ["0", "3", "0.2500"])
    assert second == f"  {sweep}/trials/trial1: stopped (interrupted); the same command continues it"
    assert sorted(sweep.rglob("*")) == before


def test_the_newest_events_of_the_workers_are_part_of_a_sweeps_status(sweep: Path) -> None:
    for number in range(5):
        log_pool(sweep, f"worker place {number} is given to another program")
    said = [line for line in describe_study(sweep) if line.startswith("workers: ")]
    assert [line.rpartition("  ")[2] for line in said] == [
        f"worker place {number} is given to another program" for number in (2, 3, 4)]


def test_the_command_tells_a_training_too(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(training)]) == 0
    first, progress = capsys.readouterr().out.splitlines()
    assert first == f"{training}: stopped (interrupted); the same command continues it"
    assert progress.startswith("epoch 2 of 3, step 15, 100 images/s, ")


def hours(number: int, market_type: str, name: str = "exp") -> list[Event]:
    """The log of a training on one worker."""
    return [run_log.run(name=name), WorkerEvent(worker=0, node="n", pid=1, market_type=market_type),
            run_log.start(num_workers=1, members=(0,), gpus=1),
            run_log.step(1).model_copy(update={"time": 1800.0 * number}),
            run_log.end(5).model_copy(update={"time": 3600.0 * number})]


def write_log(folder: Path, events: list[Event]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "run.json").touch()
    (folder / EVENTS_FILE).write_text("".join(event.model_dump_json() + "\n" for event in events))


def test_a_price_adds_the_cost_of_a_training(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(training, hours(3, "spot"))
    assert status([str(training), "--price", "spot=0.5,on-demand=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3.00 GPU hours: 3.00 spot" in lines
    assert lines[-5].split() == ["GPU", "hours", "price", "cost", "lost", "hours", "their", "cost"]
    assert lines[-4].split() == ["spot", "3.00", "0.50", "1.50", "0.00", "0.00"]
    assert lines[-1].split() == ["saved", "75", "%", "4.50"]


def test_a_sweep_costs_what_its_trials_do(
        sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(sweep / "trials" / "trial0", hours(1, "spot", "a"))
    write_log(sweep / "trials" / "trial1", hours(2, "on-demand", "b"))
    assert usage_of(sweep).hours == {"spot": 1.0, "on-demand": 2.0}
    assert status([str(sweep), "--price", "spot=0.5,on-demand=2"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].split() == ["all", "3.00", "4.50", "0.00", "0.00"]


@pytest.mark.parametrize("prices", ["spot=x", "on-demand=2"])
def test_a_price_that_cannot_be_used_is_refused(
        training: Path, capsys: pytest.CaptureFixture[str], prices: str) -> None:
    write_log(training, hours(3, "spot"))
    assert run(lambda: status([str(training), "--price", prices])) == 2
    assert capsys.readouterr().out == ""


def test_a_price_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        status(["--price", "spot=1"])
    assert ended.value.code == 2
    assert "--price: needs a run or sweep" in capsys.readouterr().err
