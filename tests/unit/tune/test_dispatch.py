"""Which task is trained next, and which is not trained at all."""

from pathlib import Path

import pytest

from ray_yolo.core.errors import ResourcesError
from ray_yolo.tune.ledger_events import CountedEvent
from ray_yolo.tune.schedule import Outcome
from tests.support.schedules import dispatcher_of, names_of, open_ledger, outcome_of, run_sweep


def test_tasks_are_dispatched_by_need_up_to_the_limit(tmp_path: Path) -> None:
    dispatcher = dispatcher_of(open_ledger(tmp_path / "ledger.jsonl", virtual_slots=4), 20, slots=2)
    taken = [task for _ in range(4) if (task := dispatcher.take())]
    assert names_of(taken) == [(0, 3, 3), (1, 3, 3)]
    dispatcher.finish("trial1", outcome_of(taken[1]))
    # its slot is free in virtual time, but the results of the others at that time are needed first
    following = dispatcher.take()
    assert following
    assert names_of([following]) == [(2, 3, 3)]
    dispatcher.finish("trial0", outcome_of(taken[0]))
    dispatcher.finish("trial2", outcome_of(following))
    following = dispatcher.take()
    assert following
    assert names_of([following]) == [(3, 3, 3)]


def test_a_closed_dispatcher_hands_out_no_task(tmp_path: Path) -> None:
    dispatcher = dispatcher_of(open_ledger(tmp_path / "ledger.jsonl"), 20)
    task = dispatcher.take()
    assert task
    dispatcher.close(ResourcesError("no room"))
    dispatcher.close(ResourcesError("a later reason"))
    dispatcher.finish("trial0", outcome_of(task))
    assert (dispatcher.take(), dispatcher.over, str(dispatcher.error)) == (None, None, "no room")


def test_the_configuration_of_a_task_names_its_run_folder(tmp_path: Path) -> None:
    dispatcher = dispatcher_of(open_ledger(tmp_path / "ledger.jsonl"), 20)
    task = dispatcher.take()
    assert task
    assert dispatcher.config(task) == {"trial": "trial0", "genes": task.genes, "seed": 3, "until": 3, "end": 3.0}


def test_trainings_on_fresh_seeds_have_folders_of_their_own(tmp_path: Path) -> None:
    dispatcher, names = dispatcher_of(open_ledger(tmp_path / "ledger.jsonl"), 3), set[str]()
    while not dispatcher.over:
        while task := dispatcher.take():
            names.add(dispatcher.name(task))
        name, task = next(iter(dispatcher.running.items()))
        dispatcher.finish(name, outcome_of(task))
    assert {"trial0", "trial1", "trial2"} <= names
    assert len(names) > 3
    assert all(name.endswith("-seed4") for name in names - {"trial0", "trial1", "trial2"})


def test_what_any_sweep_has_trained_is_not_trained_again(tmp_path: Path) -> None:
    ledger = run_sweep(tmp_path / "one" / "ledger.jsonl", 8)
    known = {(line.trial, line.seed, line.epochs): Outcome.model_validate(line.model_dump()) for line in ledger.lines
             if isinstance(line, CountedEvent)}
    again = open_ledger(tmp_path / "two" / "ledger.jsonl")
    dispatcher = dispatcher_of(again, 8, known=lambda task: known.get((task.trial, task.seed, task.until)))
    tasks = []
    while not dispatcher.over:
        while task := dispatcher.take():
            tasks.append(task)
        for name, task in list(dispatcher.running.items()):
            dispatcher.finish(name, outcome_of(task))
    assert {outcome_of(task).reason for task in tasks} <= {"the loss stays non-finite"}  # which is no result
    assert again.lines == ledger.lines


@pytest.mark.parametrize("trials", [1, 5])
def test_the_end_is_a_claim(tmp_path: Path, trials: int) -> None:
    ledger = run_sweep(tmp_path / "ledger.jsonl", trials)
    assert ledger.claim
    assert len(ledger.trials) == trials
