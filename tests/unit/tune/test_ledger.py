"""The ledger: one truth for a sweep, whatever dies and whenever."""

import errno
import json
import os
import resource
import shlex
import signal
from dataclasses import replace

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError, TrainingError
from ray_yolo.runs.event_log import read_lines
from ray_yolo.tune.evolution import propose as proposal
from ray_yolo.tune.ledger import (
    CountedEvent,
    Ledger,
    ProposedEvent,
    ScheduledEvent,
    claim_of,
    read_ledger,
    read_trials,
    results_elsewhere,
    verify,
)
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.schedule import address
from ray_yolo.tune.study import VERSION
from ray_yolo.tune.trials import best_trial, overlay
from ray_yolo.tune.verification import compare
from tests.support.schedules import RESOLVED, RUNGS, SEARCH, SPACE, open_ledger, run_sweep, sweep_of

TRIALS = 12


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sweep" / "ledger.jsonl"


def rewrite(path, change):
    """Pass every line through `change`."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_ledger(path)


def propose(ledger, number, **genes):
    genes = {**SPACE.starts[0], **genes}
    ledger.append(ProposedEvent(trial=number, genes=genes, how="start", parents=(), at=0.0))


def count(ledger, number, epochs, fitness, seed=3):
    ledger.append(CountedEvent(trial=number, seed=seed, epochs=epochs, fitness=fitness, metrics={"mAP50": fitness},
                          losses={"box": 0.1}, weights="ab"))


def test_a_line_is_on_the_device_before_the_sweep_acts_on_it(path, monkeypatch):
    ledger, flushed = open_ledger(path), []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_size))
    propose(ledger, 0)
    assert flushed == [path.stat().st_size]


def test_a_sweep_does_not_act_on_a_line_that_the_disk_refuses(path):
    ledger = open_ledger(path)
    propose(ledger, 0)
    full, before = path.stat().st_size + 40, read_ledger(path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes beyond the limit then fail, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limit[1]))
    try:
        for number in range(1, 4):
            with pytest.raises(TrainingError):
                propose(ledger, number)
            assert len(ledger.trials) == len(ledger.lines) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    propose(ledger, 1)  # there is room again
    ledger.close()
    assert len(read_ledger(path)) == len(before) + 1
    assert [line["seq"] for line in read_lines(path)] == [0, 1, 2]


def test_a_line_that_did_not_reach_the_device_is_not_read_later(path, monkeypatch):
    ledger = open_ledger(path)

    def fail(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        with pytest.raises(TrainingError):
            propose(ledger, 0)
    assert read_ledger(path)[1:] == []
    propose(ledger, 0)
    assert [line["seq"] for line in read_lines(path)] == [0, 1]


class TestRows:
    def test_a_row_comes_as_far_as_its_lines(self, path):
        ledger = open_ledger(path)
        propose(ledger, 0)
        assert ledger.trials[0].state == "proposed"
        ledger.append(ScheduledEvent(trial=0, seed=3, until=3, start=0.0, end=3.0, why="new"))
        assert ledger.trials[0].state == "running"
        count(ledger, 0, 3, 0.5)
        row = ledger.trials[0]
        assert (row.state, row.fitness, row.epochs, row.metrics, row.losses, row.weights) == (
            "paused", 0.5, 3, {"mAP50": 0.5}, {"box": 0.1}, "ab")
        ledger.append(ScheduledEvent(trial=0, seed=4, until=9, start=3.0, end=12.0, why="seed", closing=True))
        count(ledger, 0, 9, 0.75, seed=4)
        assert ledger.trials[0] == replace(row, seeds={4: 0.75})
        count(ledger, 0, 9, 0.7)
        assert (ledger.trials[0].state, ledger.trials[0].fitness, ledger.trials[0].has_ended) == (
            "finished", 0.7, True)

    def test_what_the_writer_knows_is_what_the_file_says(self, path):
        run_sweep(path, TRIALS)
        assert open_ledger(path).trials == tuple(read_trials(read_ledger(path)).values())

    def test_a_failed_trial_has_a_reason_and_no_fitness_and_is_no_parent(self, path):
        rows = read_trials(read_ledger(run_sweep(path, 40).path))
        failed = [row for row in rows.values() if row.state == "failed"]
        assert failed
        assert {(row.fitness, row.reason) for row in failed} == {(None, "the loss stays non-finite")}
        assert not {row.number for row in failed} & {parent for row in rows.values() for parent in row.parents}

    def test_the_best_row_is_the_best_of_those_that_were_trained_longest(self, path):
        ledger = open_ledger(path)
        for number, (epochs, fitness) in enumerate([(3, 0.9), (9, 0.5), (9, 0.6), (3, 0.8)]):
            propose(ledger, number)
            count(ledger, number, epochs, fitness)
        assert best_trial(ledger.trials).number == 2

    def test_parents_are_recorded(self, path):
        run_sweep(path, 30, slots=1, virtual_slots=1)
        lines = read_ledger(path)
        recorded = {line.trial: line.parents for line in lines if isinstance(line, ProposedEvent)}
        assert recorded == {
            line.trial: proposal(SPACE, 3, line.trial, [trial.row for trial in read_trials(lines[:number]).values()])[1]
            for number, line in enumerate(lines) if isinstance(line, ProposedEvent)}
        assert any(recorded.values())


class TestProposals:
    def test_every_row_has_the_command_that_trains_it_to_its_end(self, path):
        run_sweep(path, TRIALS)
        proposed = [line for line in read_lines(path) if line["type"] == "proposed"]
        assert len(proposed) >= TRIALS
        for line in proposed:
            assert parse_train(shlex.split(line["command"])[3:]).config.recipe == overlay(RESOLVED, line["genes"])

    def test_the_space_is_read_back_as_it_was(self, path):
        assert read_ledger(run_sweep(path, 1).path)[0].space == SPACE


class TestFunction:
    """A sweep is a function of space, seed, budget and virtual slots."""

    @pytest.mark.parametrize(("slots", "order"), [(1, 0), (2, 1), (3, 2)])
    def test_the_ledger_does_not_depend_on_slots_and_the_order_of_results(self, tmp_path, slots, order):
        one = read_ledger(run_sweep(tmp_path / "one" / "ledger.jsonl", TRIALS).path)
        other = read_ledger(run_sweep(tmp_path / "other" / "ledger.jsonl", TRIALS, slots=slots, order=order).path)
        assert compare(one, other) is None
        assert verify(other) == []

    @pytest.mark.parametrize("stop_after", range(0, 24, 3))
    def test_a_killed_driver_continues_to_the_same_ledger(self, tmp_path, stop_after):
        one = read_ledger(run_sweep(tmp_path / "one" / "ledger.jsonl", TRIALS).path)
        killed = tmp_path / "other" / "ledger.jsonl"
        run_sweep(killed, TRIALS, order=1, stop_after=stop_after)
        assert compare(one, read_ledger(run_sweep(killed, TRIALS, order=2).path)) is None

    def test_a_line_cut_short_by_the_kill_is_written_again(self, path):
        whole = read_ledger(run_sweep(path, 6).path)
        content = path.read_bytes()
        for size in range(0, len(content), 499):  # the first is an empty file, the second is cut in its first line
            path.write_bytes(content[:size])
            assert compare(whole, read_ledger(run_sweep(path, 6).path)) is None, size

    def test_two_sweeps_of_other_lines_differ_in_the_first_of_them(self, tmp_path):
        one, other = (tmp_path / name / "ledger.jsonl" for name in ("one", "other"))
        run_sweep(one, TRIALS)
        other.parent.mkdir()
        other.write_bytes(one.read_bytes())
        lines = rewrite(other, lambda line: {**line, "weights": "x"} if line["type"] == "counted" else line)
        assert compare(read_ledger(one), lines).startswith("line 8: CountedEvent {")
        assert compare(read_ledger(one)[:-1], read_ledger(one)).startswith(f"line {len(lines)}: None in the first")

    def test_more_trials_continue_a_finished_sweep(self, path):
        first = read_ledger(run_sweep(path, 6).path)
        assert isinstance(first[-1], ClaimedEvent)
        whole = run_sweep(path, 12)
        assert read_ledger(path)[:len(first)] == first
        assert len(whole.trials) == 12
        assert claim_of(whole.lines) == whole.claim is not None
        assert verify(read_ledger(path)) == []

    @pytest.mark.parametrize(("version", "is_fine"), [(5, False), (VERSION, True)])
    def test_a_ledger_keeps_the_rounding_of_the_version_that_began_it(self, path, version, is_fine):
        genes = replace(SPACE.genes[0], low=1e-6, high=1e-3), *SPACE.genes[1:]
        space = replace(SPACE, genes=genes, starts=({**SPACE.starts[0], "lr0": 4e-5},), random_share=0.0)
        run_sweep(path, TRIALS, space=space, version=version)
        lines = read_ledger(run_sweep(path, 2 * TRIALS, space=space).path)
        assert verify(lines) == []
        rates = {line.genes["lr0"] for line in lines if isinstance(line, ProposedEvent)} - {1e-6, 1e-3}
        assert (rates != {round(rate, 5) for rate in rates}) == is_fine

    def test_each_line_that_is_removed_or_repeated_shows(self, path):
        lines = read_ledger(run_sweep(path, TRIALS).path)
        assert verify(lines[:-1]) == []  # a sweep that has not ended yet
        for number in range(1, len(lines)):
            assert verify(lines[:number] + lines[number + 1:]) or number == len(lines) - 1, lines[number]
            assert verify(lines[:number + 1] + lines[number:]), lines[number]

    @pytest.mark.parametrize("change", [{"fitness": 0.1}, {"genes": {**SPACE.starts[0], "lr0": 0.02}}, {"end": 1e9}])
    def test_an_altered_line_shows(self, path, change):
        run_sweep(path, TRIALS)
        (name,) = change
        seen = iter(range(1000))
        lines = rewrite(path, lambda line: {**line, **change} if name in line and next(seen) == 5 else line)
        assert verify(lines)
        if name != "genes":  # those are taken as they are recorded: other processors may have other last bits
            with pytest.raises(InputError):
                run_sweep(path, 2 * TRIALS)


class TestAddresses:
    def test_results_of_other_sweeps_of_the_project_are_known_by_genes_seed_and_recipe(self, tmp_path):
        ledger = run_sweep(tmp_path / "one" / "ledger.jsonl", TRIALS)
        elsewhere = list(results_elsewhere(tmp_path, {"data set": "0123"}, tmp_path / "two" / "ledger.jsonl"))
        known = {key: outcome for key, _, outcome in elsewhere}
        counted = [line for line in ledger.lines if isinstance(line, CountedEvent)]
        assert len(known) == len({(line.trial, line.seed, line.epochs) for line in counted}) > TRIALS
        for line in counted:
            outcome = known[address(RESOLVED, ledger.trials[line.trial].genes, line.seed), line.epochs]
            assert (outcome.fitness, outcome.weights) == (line.fitness, line.weights)
        (finalist,) = (line.trial for line in counted if line.seed == 4)
        for seed, name in ((3, f"trial{finalist}"), (4, f"trial{finalist}-seed4")):
            key = address(RESOLVED, ledger.trials[finalist].genes, seed), RUNGS[-1]
            folders = [folder for other, folder, _ in elsewhere if other == key]
            assert folders == [tmp_path / "one" / "trials" / name]

    def test_other_labels_and_the_own_ledger_are_left_out(self, tmp_path):
        run_sweep(tmp_path / "one" / "ledger.jsonl", 2)
        assert not list(results_elsewhere(tmp_path, {"data set": "other"}, tmp_path / "ledger.jsonl"))
        assert not list(results_elsewhere(tmp_path, {"data set": "0123"}, tmp_path / "one" / "ledger.jsonl"))
        (tmp_path / "one" / "ledger.jsonl").write_text("no ledger")
        assert not list(results_elsewhere(tmp_path, {"data set": "0123"}, tmp_path / "ledger.jsonl"))


class TestIdentity:
    def test_another_sweep_is_refused_and_nothing_changes(self, path):
        run_sweep(path, 1)
        before = path.read_bytes()
        with pytest.raises(InputError):
            Ledger(path, sweep_of("4567"))
        assert path.read_bytes() == before

    def test_rungs_slots_and_resolved_recipe_are_those_of_the_first_start(self, path):
        run_sweep(path, 1)
        begun = Ledger(path, sweep_of(recipe=Recipe(), rungs=(1, 2), virtual_slots=7)).begun
        assert (begun.rungs, begun.virtual_slots, begun.recipe) == (RUNGS, 3, RESOLVED)

    def test_settings_that_were_added_with_a_default_leave_older_ledgers_valid(self, path):
        run_sweep(path, 2)

        def without(line):
            if line["type"] == "sweep":
                del line["latencies"], line["recipe"]["patience"]
                del line["space"]["random_first"], line["search"]["random_share"], line["search"]["limit"]
            return line

        rewrite(path, without)
        assert (len(run_sweep(path, 4).trials), verify(read_ledger(path))) == (4, [])
        with pytest.raises(InputError):
            open_ledger(path, space=replace(SPACE, random_first=1),
                        search=SEARCH.model_copy(update={"random_share": 0.5}))
