"""The ledger: one truth for a sweep, whatever dies and whenever."""

import importlib.metadata
import json
import shlex
from dataclasses import replace

import pytest

from ray_yolo.cli import parse_train
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.runs.event_log import read_lines
from ray_yolo.tune.evolution import Gene, Space, TrialRow, parents_of, propose
from ray_yolo.tune.ledger import (
    Begun,
    Failed,
    Finished,
    Judged,
    Ledger,
    Lost,
    Proposed,
    Started,
    Sweep,
    read_ledger,
    read_trials,
    verify,
)
from ray_yolo.tune.search import Search
from ray_yolo.tune.trials import Origin, Segment, overlay, trained_recipe

SPACE = Space((Gene("lr0", low=0.001, high=0.1), Gene("augment.close_mosaic", "int", 1, 10),
               Gene("optimizer.name", "choice", values=("SGD", "AdamW"))),
              ({"lr0": 0.01, "augment.close_mosaic": 5, "optimizer.name": "SGD"},))
SWEEP = Sweep(SPACE, Search(), Recipe(seed=3), labels="0123")
RESOLVED = Recipe(seed=3, batch_size=16, microbatch=8, precision="fp32")
FAILING = 4  # the trial that always fails


def fitness_of(genes):
    """What training with these genes comes to."""
    return round(1 - abs(genes["lr0"] - 0.03) * 10 - abs(genes["augment.close_mosaic"] - 7) / 100, 6)


def end(ledger, number):
    trial = ledger.trials[number]
    if number == FAILING:
        ledger.append(Failed(trial=number, reason="the loss stays non-finite"))
    else:
        fitness = fitness_of(trial.genes)
        ledger.finish(number, fitness, {"mAP50": fitness, "recall": 0.5}, {"box": 0.1}, epochs=2)


def run_sweep(path, num_trials, slots=1):
    """A driver: goes on with what was begun, proposes when a slot is free; the longest-running trial ends first."""
    ledger = Ledger(path, SWEEP, RESOLVED)
    waiting = list(ledger.to_run)
    running = []
    while True:
        while len(running) < slots and (waiting or len(ledger.trials) < num_trials):
            trial = waiting.pop(0) if waiting else ledger.propose()
            ledger.start(trial.number)
            running.append(trial.number)
        if not running:
            break
        end(ledger, running.pop(0))
    ledger.close()
    return read_ledger(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sweep" / "ledger.jsonl"


def rewrite(path, change):
    """Pass every line's event through `change`."""
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return read_ledger(path)


def rows_of(events):
    trials = read_trials(events).values()
    return {trial.number: (trial.genes, trial.state, trial.fitness, trial.reason) for trial in trials}


class TestRows:
    def test_a_row_comes_as_far_as_its_events(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        trial = ledger.propose()
        assert (trial.number, trial.genes, trial.seen, trial.state) == (0, dict(SPACE.starts[0]), (), "proposed")
        ledger.start(0)
        assert (ledger.trials[0].state, ledger.trials[0].attempts) == ("running", 1)
        ledger.start(0)
        assert ledger.trials[0].attempts == 2
        ledger.finish(0, 0.5, {"mAP50": 0.5}, {"box": 0.1}, epochs=3)
        done = ledger.trials[0]
        assert (done.state, done.fitness, done.metrics, done.losses, done.epochs) == (
            "finished", 0.5, {"mAP50": 0.5}, {"box": 0.1}, 3)
        assert done.has_ended

    def test_what_the_writer_knows_is_what_the_file_says(self, path):
        run_sweep(path, 8, slots=3)
        assert Ledger(path, SWEEP, RESOLVED).trials == tuple(read_trials(read_ledger(path)).values())

    def test_a_failed_trial_has_a_reason_and_no_fitness_and_is_no_parent(self, path):
        events = run_sweep(path, 12)
        failed = read_trials(events)[FAILING]
        assert (failed.state, failed.fitness, failed.reason) == ("failed", None, "the loss stays non-finite")
        assert all(FAILING not in (*trial.seen, *trial.parents) for trial in read_trials(events).values())

    @pytest.mark.parametrize("fitness", [None, float("nan"), float("inf")])
    def test_without_a_finite_fitness_a_trial_has_failed(self, path, fitness):
        ledger = Ledger(path, SWEEP, RESOLVED)
        ledger.propose()
        ledger.finish(0, fitness, {}, {}, epochs=2)
        assert (ledger.trials[0].state, ledger.trials[0].fitness) == ("failed", None)
        assert ledger.trials[0].reason == "no finite fitness after 2 epochs"

    def test_a_sweep_whose_trials_all_fail_ends(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        for number in range(3):
            ledger.propose()
            ledger.append(Failed(trial=number, reason="no luck"))
        assert [trial.state for trial in ledger.trials] == ["failed"] * 3
        assert verify(read_ledger(path)) == []

    def test_ending_twice_is_our_own_mistake(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        ledger.propose()
        ledger.append(Failed(trial=0, reason="x"))
        with pytest.raises(AssertionError, match="has ended already"):
            ledger.start(0)

    def test_parents_are_recorded(self, path):
        trials = read_trials(run_sweep(path, 10))
        for trial in trials.values():
            rows = [trials[number].row for number in trial.seen]
            assert trial.parents == parents_of(SPACE, 3, trial.number, rows)
        assert trials[9].parents != ()


class TestProposals:
    @pytest.mark.parametrize("slots", [1, 3, 8])
    def test_every_row_follows_from_the_rows_before_it(self, path, slots):
        events = run_sweep(path, 12, slots)
        assert verify(events) == []
        for trial in read_trials(events).values():
            rows = [TrialRow(n, read_trials(events)[n].genes, read_trials(events)[n].fitness) for n in trial.seen]
            assert trial.genes == propose(SPACE, 3, trial.number, rows)

    def test_every_row_has_the_command_that_trains_its_recipe(self, path):
        for event in run_sweep(path, 8):
            if isinstance(event, Proposed):
                arguments = shlex.split(event.command)[3:]
                assert parse_train(arguments).config.recipe == overlay(RESOLVED, event.genes)

    def test_with_one_slot_a_row_has_seen_all_before_it(self, path):
        trials = read_trials(run_sweep(path, 8))
        assert trials[7].seen == (0, 1, 2, 3, 5, 6)

    def test_with_three_slots_children_do_not_wait_for_a_generation(self, path):
        trials = read_trials(run_sweep(path, 8, slots=3))
        assert [len(trials[number].seen) for number in range(8)] == [0, 0, 0, 1, 2, 3, 4, 4]

    def test_the_space_is_read_back_as_it_was(self, path):
        assert run_sweep(path, 1)[0].space == SPACE

    def test_optunas_estimator_proposes_what_can_be_computed_again(self, path):
        ledger = Ledger(path, replace(SWEEP, space=replace(SPACE, algorithm="tpe")), RESOLVED)
        for number in range(12):
            ledger.propose()
            ledger.finish(number, fitness_of(ledger.trials[number].genes), {}, {}, epochs=2)
        assert len({str(trial.genes) for trial in ledger.trials}) == 12
        assert verify(read_ledger(path)) == []


ASHA = replace(SWEEP, search=Search(scheduler="asha"), recipe=Recipe(seed=3, epochs=90))  # rungs after 10, 40 epochs


def asha_sweep(path, num_trials):
    """One trial after the other; every other one is stopped, with a fitness that no whole training has."""
    ledger = Ledger(path, ASHA, RESOLVED.model_copy(update={"epochs": 90}))
    while len(ledger.trials) < num_trials:
        number = ledger.propose().number
        short = number % 2 == 1
        ledger.finish(number, fitness_of(ledger.trials[number].genes) + 5 * short, {}, {}, 10 if short else 90,
                      stopped=short)
    ledger.close()
    return read_ledger(path)


class TestRungs:
    def test_trials_that_were_stopped_are_no_parents_beside_five_that_were_not(self, path):
        trials = read_trials(asha_sweep(path, 24))
        assert {trial.rung for trial in trials.values()} == {1, 3}
        assert all(number % 2 == 0 for trial in trials.values() if trial.number > 10 for number in trial.parents)
        assert any(trial.parents for trial in trials.values() if trial.number > 10)

    def test_every_proposal_follows_from_the_rows_and_rungs_before_it(self, path):
        events = asha_sweep(path, 24)
        assert verify(events) == []
        [last] = [event for event in events if isinstance(event, Proposed)][-1:]
        assert last.rungs == (*(3, 1) * 11, 3)

    def test_altered_rungs_are_reported(self, path):
        asha_sweep(path, 4)
        events = rewrite(path, lambda event: {**event, "rungs": [3, 3]} if event.get("rungs") == [3, 1] else event)
        assert verify(events) == [
            "trial 2: records the rungs [3, 3] of the finished trials, but they were [3, 1]"]

    def test_an_altered_end_shows_in_what_follows(self, path):
        asha_sweep(path, 4)
        assert verify(rewrite(path, lambda event: {**event, "epochs": 40} if event.get("epochs") == 10 else event))

    def test_what_the_scheduler_let_go_on_is_remembered_until_the_trial_has_ended_and_after(self, path):
        ledger = Ledger(path, ASHA, ASHA.recipe)
        assert list(ledger.rungs) == [10, 40]
        ledger.propose()
        ledger.append(Judged(trial=0, epoch=10, fitness=0.25))
        ledger.append(Lost(trial=0, reason="its process died"))
        ledger.start(0)
        ledger.append(Judged(trial=0, epoch=40, fitness=0.5))
        ledger.finish(0, 0.75, {}, {}, 90)
        ledger.close()
        again = Ledger(path, ASHA, ASHA.recipe).trials[0]
        assert (again.judged, again.rung, again.state) == (((10, 0.25), (40, 0.5)), 3, "finished")

    def test_a_lost_trial_is_to_run_again_under_its_number_with_its_genes(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        genes = ledger.propose().genes
        ledger.start(0)
        ledger.append(Lost(trial=0, reason="its process died"))
        ledger.close()
        again = Ledger(path, SWEEP, RESOLVED)
        [row] = again.to_run
        assert (row.number, row.genes, row.state, row.attempts) == (0, genes, "proposed", 1)
        assert verify(read_ledger(path)) == []


class TestExploits:
    ORIGIN = Origin(trial=1, epoch=10, state="/sweep/trials/trial1/weights/epoch9.pt", sha256="ab")

    def test_a_trial_goes_on_with_the_new_genes_in_a_folder_of_its_own(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        trials = [ledger.propose() for _ in range(2)]
        assert trials[0].folder_name == "trial0"
        genes = {**trials[0].genes, "lr0": 0.05}
        ledger.exploit(0, genes, self.ORIGIN)
        ledger.close()
        events = read_ledger(path)
        trial = read_trials(events)[0]
        assert (trial.genes, trial.origins, trial.folder_name) == (genes, (self.ORIGIN,), "trial0-2")
        assert trial.lineage == (Segment(0, trials[1].genes), Segment(10, genes))
        assert trial.ancestors == (1,)
        arguments = shlex.split(events[-1].command)[3:]
        assert parse_train(arguments).config.recipe == trained_recipe(RESOLVED, trial.lineage)
        assert Ledger(path, SWEEP, RESOLVED).to_run[0] == trial
        assert verify(events) == []

    def test_the_past_is_the_donors_in_the_folder_that_was_gone_on_from(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        zero, one = (ledger.propose().genes for _ in range(2))
        first, second, third = ({**zero, "lr0": lr0} for lr0 in (0.03, 0.04, 0.05))
        ledger.exploit(0, first, self.ORIGIN)
        ledger.exploit(1, second, Origin(0, 15, "/sweep/trials/trial0-2/weights/epoch14.pt", "cd"))
        ledger.exploit(0, third, Origin(1, 5, "/sweep/trials/trial1/weights/epoch4.pt", "ef"))  # older than the second
        forks = ledger.trials
        assert forks[1].lineage == (Segment(0, one), Segment(10, first), Segment(15, second))
        assert forks[0].lineage == (Segment(0, one), Segment(5, third))
        assert (forks[0].genes, forks[0].folder_name) == (third, "trial0-3")

    def test_what_has_ended_is_not_replaced(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        trials = [ledger.propose() for _ in range(2)]
        end(ledger, 0)
        with pytest.raises(AssertionError, match="has ended"):
            ledger.exploit(0, trials[0].genes, self.ORIGIN)


class TestVerify:
    def altered(self, path, number, **changes):
        run_sweep(path, 10, slots=2)

        def change(event):
            wanted = changes.keys() & event.keys() and event.get("trial") == number
            return {**event, **changes} if wanted else event

        return verify(rewrite(path, change))

    def test_altered_genes_are_reported(self, path):
        genes = {"lr0": 0.5, "augment.close_mosaic": 5, "optimizer.name": "SGD"}
        problems = self.altered(path, 6, genes=genes)
        assert problems[0].startswith("trial 6: lr0 is 0.5, but 0.0")
        assert problems[0].endswith("follows from its rows")

    def test_an_altered_fitness_of_a_parent_shows_in_its_children(self, path):
        problems = self.altered(path, 1, fitness=7.0)
        assert problems
        assert all(int(problem.split()[1].rstrip(":")) > 1 for problem in problems)

    def test_an_altered_seen_is_reported(self, path):
        assert self.altered(path, 5, seen=[0]) == [
            "trial 5: records the finished trials [0], but [0, 1, 2, 3] had finished"]

    def test_a_removed_row_is_reported(self, path):
        events = run_sweep(path, 6)
        kept = [event for event in events if isinstance(event, Begun) or event.trial != 2]
        assert "trial 3: proposed in the place of trial 2" in verify(kept)

    def test_a_trial_that_ends_twice_is_reported(self, path):
        events = run_sweep(path, 3)
        again = next(event for event in events if isinstance(event, Finished))
        assert verify([*events, again]) == ["trial 0: finished, although it has ended"]
        assert read_trials([*events, again.model_copy(update={"fitness": 9.0})])[0].fitness == again.fitness


class TestRestart:
    def test_killed_after_any_line_no_row_is_lost_or_doubled(self, tmp_path):
        """Every prefix of a ledger is a driver that was killed there; the next one ends the sweep."""
        uninterrupted = tmp_path / "uninterrupted.jsonl"
        events = run_sweep(uninterrupted, 7, slots=2)
        lines = uninterrupted.read_text().splitlines(keepends=True)
        for length in range(len(lines) + 1):
            path = tmp_path / f"{length}.jsonl"
            path.write_text("".join(lines[:length]))
            before = rows_of(read_ledger(path))
            after = run_sweep(path, 7, slots=2)
            assert verify(after) == []
            assert [event["seq"] for event in read_lines(path)] == list(range(len(after)))
            assert sorted(rows_of(after)) == list(range(7))
            assert all(state in ("finished", "failed") for _, state, *_ in rows_of(after).values())
            ends = [event.trial for event in after if isinstance(event, (Finished, Failed))]
            assert sorted(ends) == list(range(7))
            for number, (genes, state, *rest) in before.items():
                assert rows_of(after)[number][0] == genes
                if state in ("finished", "failed"):
                    assert rows_of(after)[number] == (genes, state, *rest)
                    assert starts(after, number) == starts(read_ledger(path)[:length], number)
        assert len(events) == len(lines)

    def test_with_one_slot_an_interrupted_sweep_equals_an_uninterrupted_one(self, tmp_path):
        uninterrupted = tmp_path / "uninterrupted.jsonl"
        expected = rows_of(run_sweep(uninterrupted, 7))
        text = uninterrupted.read_bytes()
        for cut in range(0, len(text), 97):  # inside lines too: a torn line is no line
            path = tmp_path / f"{cut}.jsonl"
            path.write_bytes(text[:cut])
            assert rows_of(run_sweep(path, 7)) == expected
            assert verify(read_ledger(path)) == []

    def test_a_torn_line_is_cut_off_and_its_trial_proposed_again(self, path):
        run_sweep(path, 3)
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"seq":10,"time":1,"type":"proposed","trial":3,"ge')
        ledger = Ledger(path, SWEEP, RESOLVED)
        assert len(ledger.trials) == 3
        assert ledger.propose().number == 3
        assert path.read_bytes().startswith(whole)
        assert verify(read_ledger(path)) == []

    def test_what_was_begun_goes_on_before_anything_is_proposed(self, path):
        ledger = Ledger(path, SWEEP, RESOLVED)
        for _ in range(3):
            ledger.propose()
        ledger.start(0)
        ledger.start(1)
        end(ledger, 1)
        ledger.close()
        again = Ledger(path, SWEEP, RESOLVED)
        assert [(trial.number, trial.state) for trial in again.to_run] == [(0, "running"), (2, "proposed")]

    def test_more_trials_may_be_asked_for(self, path):
        first = rows_of(run_sweep(path, 4))
        more = rows_of(run_sweep(path, 9))
        assert {number: more[number] for number in first} == first
        assert sorted(more) == list(range(9))

    def test_the_resolved_recipe_of_the_first_start_counts(self, path):
        assert Ledger(path, SWEEP, RESOLVED).recipe == RESOLVED
        later = RESOLVED.model_copy(update={"batch_size": 64})
        assert Ledger(path, SWEEP, later).recipe == RESOLVED


class TestIdentity:
    @pytest.mark.parametrize(("other", "part"), [
        (replace(SWEEP, space=replace(SPACE, genes=SPACE.genes[:2])), "another search space;"),
        (replace(SWEEP, space=replace(SPACE, starts=(*SPACE.starts, *SPACE.starts))), "another search space;"),
        (replace(SWEEP, search=Search(scheduler="asha")), "another search settings;"),
        (replace(SWEEP, labels="4567"), "another data set;"),
        (replace(SWEEP, recipe=Recipe(seed=4)), "another base recipe;"),
        (replace(SWEEP, labels="4567", recipe=Recipe()), "another data set and another base recipe;"),
    ])
    def test_the_ledger_of_another_sweep_is_refused_and_left_as_it_is(self, path, other, part):
        run_sweep(path, 2)
        before = path.read_bytes()
        with pytest.raises(InputError, match=part) as error:
            Ledger(path, other, RESOLVED)
        assert str(path) in str(error.value)
        assert "another --name" in str(error.value)
        assert path.read_bytes() == before

    def test_another_log_is_refused(self, path):
        path.parent.mkdir()
        path.write_text('{"seq":0,"time":1,"type":"run"}\n')
        with pytest.raises(InputError, match="not the ledger of a sweep"):
            Ledger(path, SWEEP, RESOLVED)

    def test_the_ledger_of_a_later_version_is_refused(self, path):
        run_sweep(path, 1)
        line = path.read_text().replace('"version":1', '"version":2', 1)
        path.write_text(line)
        with pytest.raises(InputError, match="written by a later ray_yolo"):
            Ledger(path, SWEEP, RESOLVED)

    def test_a_damaged_ledger_is_reported(self, path):
        run_sweep(path, 1)
        path.write_text(path.read_text().replace('"attempt"', '"atempt"'))
        with pytest.raises(InputError, match=r"ledger.jsonl: damaged: 1 validation error for Started attempt; restore"):
            Ledger(path, SWEEP, RESOLVED)

    def test_an_equal_sweep_goes_on(self, path):
        run_sweep(path, 2)
        equal = Sweep(replace(SPACE), Search.model_validate(SWEEP.search.model_dump()), Recipe(seed=3), labels="0123")
        assert len(Ledger(path, equal, RESOLVED).trials) == 2

    def test_a_sweep_warns_that_it_continues_with_another_version_of_its_searcher(self, path):
        tpe = replace(SWEEP, space=replace(SPACE, algorithm="tpe"))
        assert Ledger(path, tpe, RESOLVED).warning == ""
        version = importlib.metadata.version("optuna")
        assert json.loads(path.read_text().splitlines()[0])["identity"]["searcher"] == f"optuna {version}"
        assert Ledger(path, tpe, RESOLVED).warning == ""
        versions = f"started with optuna 4.8.0 and continues with optuna {version}"
        for before, warning in (("optuna 4.8.0", versions), ("", "")):
            rewrite(path, lambda event, before=before: {**event, "identity": {**event["identity"], "searcher": before}})
            ledger = Ledger(path, tpe, RESOLVED)
            assert warning in ledger.warning
            assert bool(warning) == bool(ledger.warning)

    def test_settings_that_are_added_with_a_default_orphan_no_ledger(self, path):
        """An older version's ledger: it lacks what this one has, here the last fields of its space and its search."""
        run_sweep(path, 2)

        def without(event):
            if event["type"] == "sweep":
                del event["space"]["random_share"], event["search"]["random_share"]
                event["identity"] |= {"search space": "its digest", "search settings": "its digest"}
            return event

        rewrite(path, without)
        assert len(Ledger(path, SWEEP, RESOLVED).trials) == 2
        with pytest.raises(InputError, match="another search space and another search settings;"):
            Ledger(path, replace(SWEEP, space=replace(SPACE, random_share=0.5), search=Search(random_share=0.5)),
                   RESOLVED)


def starts(events, number):
    return sum(isinstance(event, Started) and event.trial == number for event in events)
