"""Population based training that really exchanges: weights of the donor, hyper-parameters of its own."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ray_yolo.cli import parse_train
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import EpochEvent, StartEvent
from ray_yolo.runs.event_log import read_events, read_lines, surviving
from ray_yolo.runtime.trainer import fit
from ray_yolo.tune.ledger import ExploitedEvent, read_ledger, verify
from ray_yolo.tune.trials import Trial
from ray_yolo.tune.tuner import search
from tests.support import run_log
from tests.support.checkpoints import newest
from tests.support.jobs import make_config
from tests.support.sweeps import assert_cpus_return, make_sweep

SPACE = """
search: {algorithm: random, scheduler: {name: pbt, interval_epochs: 30, quantile: 0.5, resample: 0.0}}
lr0: {type: loguniform, low: 0.0001, high: 0.01}
momentum: [0.8, 0.98]
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("ray_session")
def test_a_bad_trial_goes_on_from_a_good_ones_checkpoint_with_other_genes(tmp_path: Path) -> None:
    # long enough for the two to meet, whichever starts first
    recipe = {"epochs": 300, "noval": False, "exact": True}
    config = make_sweep(tmp_path, SPACE, recipe=recipe, trials=2, workers_per_trial=2, keep_weights=True)
    result = search(config, quiet=True)
    events = read_ledger(result.folder / "ledger.jsonl")
    assert [trial.state for trial in result.trials] == ["finished"] * 2
    assert verify(events) == []
    exploits = [event for event in events if isinstance(event, ExploitedEvent)]
    assert exploits
    for event in exploits:
        assert hashlib.sha256(Path(event.origin.state).read_bytes()).hexdigest() == event.origin.sha256
        assert event.origin.trial != event.trial
        assert event.origin.epoch < 300
    fork_trial = result.trials[exploits[-1].trial]
    check_fork(result.folder / "trials" / fork_trial.folder_name, exploits[-1])
    assert fork_trial.genes == exploits[-1].genes
    assert all(0.0001 <= trial.genes["lr0"] <= 0.01 for trial in result.trials)
    assert_cpus_return()
    written = [line for line in read_lines(result.folder / "ledger.jsonl") if line["type"] == "exploited"]
    check_replay(tmp_path, result.folder / "trials" / fork_trial.folder_name, written[-1]["command"], fork_trial)
    hyp = parse_train(["--epochs", "300", "--hyp", str(result.folder / "hyp_evolve.yaml")]).config.recipe
    assert len(hyp.changes) == len(result.best.lineage) - 1


def check_replay(tmp_path: Path, folder: Path, command: str, fork_trial: Trial) -> None:
    """The row's one command trains the same weights from the start, without Ray."""
    recipe = parse_train(shlex.split(command)[3:]).config.recipe
    assert len(recipe.changes) == len(fork_trial.lineage) - 1 > 0
    placement = make_config(tmp_path, 0, {"project": "runs/replay"}).placement
    again = fit(RunConfig(recipe=recipe, placement=placement), quiet=True)
    one, other = map(newest, (again.run_dir, folder))
    for part in ("model", "ema"):
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())
    assert again.best_fitness == pytest.approx(fork_trial.fitness, abs=1e-6)


def check_fork(folder: Path, exploit: ExploitedEvent) -> None:
    """The folder's run began with exactly the donor's tensors, and goes by the new genes."""
    origin = exploit.origin
    record = json.loads((folder / "run.json").read_text())
    assert record["origin"] == asdict(origin)
    trained = Recipe.model_validate(record["recipe"]).at(origin.epoch)
    assert trained.optimizer.lr0 == exploit.genes["lr0"]
    started = [event for event in run_log.events_of(folder, StartEvent) if not event.regrouped][-1]
    assert started.epoch == origin.epoch
    epochs = [event.epoch for event in run_log.only(EpochEvent, surviving(read_events(folder / "events.jsonl")))]
    assert epochs[-1] == 299
    donor = torch.load(origin.state, weights_only=True)
    assert json.loads(donor["meta"])["progress"][0] == origin.epoch
