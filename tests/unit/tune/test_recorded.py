"""Ledgers that ray_yolo 0.2.0 has written: the schedules of today make the same decisions again."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import NoneType

import pytest

from ray_yolo import cli
from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import read_lines
from ray_yolo.runs.run_record import SweepRecord, write_record
from ray_yolo.tune.claim import PairsClaim
from ray_yolo.tune.ledger import Ledger, begun_of, read_ledger, verify
from ray_yolo.tune.ledger_events import ClaimedEvent, ClosedEvent, CountedEvent, FailedEvent, LedgerEvent
from ray_yolo.tune.mlflow import StudyMlflow
from ray_yolo.tune.pairs import PairSchedule, claim_from, pair_of, results_of
from ray_yolo.tune.schedule import Outcome, Task

LEDGERS = Path(__file__).parents[2] / "golden" / "ledgers"
SWEEPS = {"evolve": 90, "gp": 108, "grid": 42, "cost": 104, "continued": 70, "killed": 31, "trained_sweep": 32}
"""The lines after the first one, by name. `killed` ends in the middle, `continued` goes on after its first claim, and
the trainings of `trained_sweep` are real."""


@pytest.mark.parametrize("name", SWEEPS)
def test_each_line_follows_from_those_before(name: str) -> None:
    lines = read_ledger(LEDGERS / f"{name}.jsonl")
    assert len(lines) == 1 + SWEEPS[name]
    assert verify(lines) == []


@pytest.mark.parametrize("name", SWEEPS)
def test_a_new_schedule_writes_the_recorded_lines(name: str) -> None:
    lines = read_ledger(LEDGERS / f"{name}.jsonl")
    recorded = lines[1:]
    outcomes = {(line.trial, line.seed, line.epochs): Outcome.model_validate(line, from_attributes=True)
                for line in recorded if isinstance(line, (CountedEvent, FailedEvent))}
    written: list[LedgerEvent] = []

    def explores() -> bool:
        decisions = (line for line in recorded[len(written):] if not isinstance(line, (CountedEvent, FailedEvent)))
        return not isinstance(next(decisions, None), (ClosedEvent, NoneType))

    schedule = begun_of(lines).schedule(write=written.append)
    for _ in range(2 * len(recorded)):
        if len(written) >= len(recorded):
            break
        task = schedule.next(explores)
        if isinstance(task, Task) and (task.trial, task.seed, task.until) in outcomes:
            schedule.finish(task, outcomes[task.trial, task.seed, task.until])
    assert written[:len(recorded)] == recorded


COMPARISONS = {"better": 9, "level": 14, "diverged": 11, "holes": 1, "twice": 7, "trained_pairs": 7, "trained_pool": 7}
"""The lines of today after the first one. `better` has a pair more than its claim, `level` goes on after its first
claim, `holes` was killed while a training of the first pair was missing, and `twice` between the claim and its end."""


def recorded_claims(name: str) -> list[PairsClaim]:
    """The different claims of a recorded comparison, made again from its results by the law of today."""
    lines = read_lines(LEDGERS / f"{name}.jsonl")
    results = {(line["pair"], line["side"]): Outcome(fitness=line["fitness"])
               for line in lines if line["type"] == "trained"}
    claims = [claim_from(results, line["claim"]["pairs"]) for line in lines if line["type"] == "claim"]
    return [claim for number, claim in enumerate(claims) if claim not in claims[:number]]


def test_recorded_comparisons_decided_again() -> None:
    """0.2.0 claimed `better` after five pairs and `twice` after three; four that one side wins are the fewest now."""
    decided = {name: [(claim.better, claim.pairs) for claim in recorded_claims(name)] for name in COMPARISONS}
    assert decided == {
        "better": [("B", 4)], "level": [("", 4), ("", 6)], "diverged": [("", 5)], "holes": [], "twice": [("", 3)],
        "trained_pairs": [("", 3)], "trained_pool": [("", 3)]}


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_claims_of_a_comparison_follow_from_its_results(name: str) -> None:
    lines = read_ledger(LEDGERS / f"{name}.jsonl")
    assert len(lines) == 1 + COMPARISONS[name]
    assert verify(lines) == []
    assert [line.claim for line in lines if isinstance(line, ClaimedEvent)] == recorded_claims(name)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_new_comparison_makes_the_recorded_claims(name: str, slots: int) -> None:
    """It has the same trainings on the same seeds, whatever the number of slots."""
    recorded = {(line["pair"], line["side"]): line for line in read_lines(LEDGERS / f"{name}.jsonl")
                if line["type"] == "trained"}
    claims = recorded_claims(name)
    begun = begun_of(read_ledger(LEDGERS / f"{name}.jsonl"))
    written: list[LedgerEvent] = []
    schedule = begun.schedule(write=written.append, limit=lambda: slots)
    for claim in claims:
        running: list[Task] = []
        while not isinstance(reply := schedule.next(partial(has_fewer_pairs, schedule, claim.pairs)), ClaimedEvent):
            if isinstance(reply, Task):
                running.append(reply)
                continue
            task = running.pop()
            pair, side = pair_of(task.trial)
            line = recorded[pair, side]
            assert (task.seed, task.until) == (line["seed"], begun.recipes["AB".index(side)].epochs)
            schedule.finish(task, Outcome(
                fitness=line["fitness"], metrics=line["metrics"], classes=line["classes"], weights=line["weights"],
                reason=line["reason"], diverged=line["fitness"] is None))
    assert [line.claim for line in written if isinstance(line, ClaimedEvent)] == claims
    if claims:
        assert results_of(written) == results_of(read_ledger(LEDGERS / f"{name}.jsonl"))


def has_fewer_pairs(schedule: PairSchedule, pairs: int) -> bool:
    return schedule.num_pairs < pairs


@pytest.mark.parametrize("name", ["holes", "level", "twice", "better"])
def test_a_recorded_comparison_continues_in_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes((LEDGERS / f"{name}.jsonl").read_bytes())
    ledger = Ledger(path, begun_of(read_ledger(path)))
    schedule = ledger.begun.schedule(write=ledger.append)
    schedule.restore(ledger.lines)
    before = path.read_bytes()
    more = {"holes": 6, "level": 7, "twice": 9, "better": 9}[name]
    while not isinstance(reply := schedule.next(lambda: schedule.num_pairs < more), ClaimedEvent):
        assert isinstance(reply, Task)
        schedule.finish(reply, Outcome(fitness=0.4 + 0.01 * (reply.trial % 3)))
    ledger.close()
    assert path.read_bytes().startswith(before)
    if name == "better":  # decided by the results that are there
        assert reply.claim.pairs == 4
    lines = read_ledger(path)
    assert verify(lines) == []
    assert lines[-1] == reply


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a folder for each recorded study."""
    for path in LEDGERS.glob("*.jsonl"):
        folder = tmp_path / path.stem
        (folder / "trials").mkdir(parents=True)
        (folder / "ledger.jsonl").write_bytes(path.read_bytes())
        write_record(folder, SweepRecord(digest="ab", space="", trials=9, is_comparison=path.stem in COMPARISONS))
    return tmp_path


@pytest.mark.parametrize("name", [*SWEEPS, *COMPARISONS])
def test_an_older_study_is_shown_and_verified(
        name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (cli.status, cli.verify):
        assert command([str(project / name)]) == 0
    shown = capsys.readouterr().out
    assert "interrupted; the same command continues it" in shown
    assert shown.splitlines()[-1].split() == ["ledger.jsonl", "ok"]
    for claim in recorded_claims(name)[-1:]:
        assert str(claim) in shown


def spoil(path: Path, damage: str) -> None:
    """Make a ledger unreadable in some way."""
    lines = path.read_text().splitlines(keepends=True)
    header, result = lines[0], lines[3]
    if damage == "a later version":
        lines[0] = re.sub(r'"version":\d', '"version":99,"ray_yolo":"9.9.0"', header)
    elif damage == "another line":
        lines[3] = result[:30] + "\n"
    elif damage == "another type":
        lines[3] = re.sub(r'"type":"\w+"', '"type":"other"', result)
    else:
        lines[0] = re.sub(r'"version":\d', '"version":null', header)
    path.write_text("".join(lines))


@pytest.mark.parametrize("damage", ["a later version", "another line", "another type", "no version"])
@pytest.mark.parametrize("name", ["evolve", "level"])
def test_an_unreadable_ledger_is_a_row_of_the_list(
        name: str, damage: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / name / "finished").touch()
    spoil(project / name / "ledger.jsonl", damage)
    for command in (cli.status, cli.verify):
        with pytest.raises(InputError) as refused:
            command([str(project / name)])
    assert cli.list_runs([str(project)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert len(rows) == 1 + len(SWEEPS) + len(COMPARISONS)
    assert "unreadable: " in rows[name]
    assert str(refused.value).partition("ledger.jsonl")[2] in rows[name]
    assert "unreadable" not in rows["gp"]


def test_the_mlflow_run_of_a_comparison_follows_from_its_ledger(project: Path) -> None:
    folder = project / "trained_pairs"
    for name in ("pair3-b", "pair4-a"):
        (folder / "trials" / name).mkdir()
    content = StudyMlflow(folder, "sqlite://", None, "the command").content("KILLED")
    assert content.stopped_folders(folder) == ["pair4-a"]  # it has no result
    plan = content.plan(folder)
    [claim] = recorded_claims("trained_pairs")
    assert plan.params["A.optimizer.lr0"] != plan.params["B.optimizer.lr0"]
    assert [(point.key, point.epoch) for point in plan.points] == [
        *((f"{side}/fitness", pair) for pair in (1, 2, 3) for side in "AB"),
        ("claim/difference", 3)]
    assert plan.tags["ray_yolo.claim"] == str(claim)
    assert "| fitness |" in plan.tags["mlflow.note.content"]
    assert StudyMlflow(folder, "sqlite://", None).last_status() == "KILLED"
