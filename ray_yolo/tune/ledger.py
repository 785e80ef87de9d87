"""The ledger of a sweep: an append-only log of what was proposed, what it followed from, and what came of it.

    sweep      identity, space, search, recipe     once, the first line; `recipe` is resolved, the base of all trials
    proposed   trial, genes, seen, rungs, parents, command    seen: the trials that had finished before; rungs: theirs
    started    trial, attempt
    judged     trial, epoch, fitness               the scheduler lets it go on after so many epochs
    lost       trial, reason                       not by its recipe's fault: it is queued again
    exploited  trial, genes, origin, command       it goes on from another trial's checkpoint, with these genes
    finished   trial, fitness, metrics, losses, epochs, stopped; of the trial's last epoch; stopped: by the scheduler
    failed     trial, reason

The ledger is the truth: a restart reads it and nothing else. What has ended never runs again, what was proposed goes
on under the same number with the same genes, and every proposal can be recomputed from the rows before it. One without
`rungs` is of ray_yolo 0.1.0, which ranked all rows by fitness alone, and is recomputed so.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ray_yolo.config.recipe import Recipe, is_digest_of, recipe_digest
from ray_yolo.errors import InputError
from ray_yolo.runlog.event_log import EventLog, Line, plain, read_lines
from ray_yolo.tune import evolution
from ray_yolo.tune.evolution import Gene, Genes, Row, Space
from ray_yolo.tune.proposals import propose
from ray_yolo.tune.replay import Past, Stage, replay_command
from ray_yolo.tune.search import Search

LEDGER_FILE = "ledger.jsonl"

State = Literal["proposed", "running", "finished", "failed"]
_STATES: dict[str, State] = {"started": "running", "lost": "proposed", "finished": "finished", "failed": "failed"}
"""State after an event."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a trial goes on from under population based training."""

    trial: int  # whose it is
    epoch: int  # trained epochs
    state: str  # absolute path of its file
    sha256: str  # of the file

    @property
    def folder_name(self) -> str:
        """The run folder that the file is in."""
        return Path(self.state).parent.parent.name


@dataclass(frozen=True)
class Sweep:
    """What a sweep is: equal values continue each other's ledger, others are refused."""

    space: Space
    search: Search
    recipe: Recipe  # base of all trials, as it was asked for; its seed is the search's too
    labels: str  # digest of the data set's labels

    def identity(self) -> dict[str, str]:
        """Digests of what the ledger does not hold whole."""
        return {"data set": self.labels, "base recipe": recipe_digest(self.recipe)}


@dataclass(frozen=True)
class Trial:
    """One row of a sweep, as far as it has come."""

    number: int
    pasts: Mapping[str, Past]  # of the weights in each of its run folders
    seen: tuple[int, ...] = ()  # trials that had finished before this one was proposed
    parents: tuple[int, ...] = ()
    state: State = "proposed"
    attempts: int = 0
    fitness: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    epochs: int = 0
    rung: int = 0  # see `Search.rung`
    judged: tuple[tuple[int, float], ...] = ()  # (epochs, fitness) after which the scheduler let it go on
    reason: str = ""
    origins: tuple[Origin, ...] = ()

    @property
    def folder_name(self) -> str:
        """Its run folder; each exploit begins another one."""
        return trial_folder(self.number, len(self.origins))

    @property
    def past(self) -> Past:
        """What its weights were trained by, from the first epoch on."""
        return self.pasts[self.folder_name]

    @property
    def forebears(self) -> tuple[int, ...]:
        """Trials that its genes or its weights came from."""
        return (*self.parents, *(origin.trial for origin in self.origins))

    @property
    def genes(self) -> Genes:
        """Its genes; the last ones, where they have changed."""
        return self.past[-1].genes

    @property
    def has_ended(self) -> bool:
        """Whether it will never run again."""
        return self.state in ("finished", "failed")

    @property
    def row(self) -> Row:
        """What proposals see of it."""
        return Row(self.number, self.genes, self.fitness, self.rung)


class Ledger:
    """The one writer of a sweep's ledger; opening it continues what is there. Safe to use from several threads.

    Args:
        path: the file; made if it does not exist.
        sweep: what is searched.
        resolved: the base recipe with everything decided that was left open. Used by the first start only.

    Raises:
        InputError: if the file is the ledger of another sweep, naming what differs.
    """

    def __init__(self, path: str | os.PathLike[str], sweep: Sweep, resolved: Recipe) -> None:
        self.path = Path(path)
        self._sweep = sweep
        self._lock = threading.Lock()
        events = read_lines(self.path)
        if events:
            _check_identity(self.path, events[0], sweep)
        self._log = EventLog(self.path)
        if not events:
            self._log.append_line("sweep", identity=sweep.identity(), space=asdict(sweep.space),
                             search=sweep.search.model_dump(), recipe=resolved.model_dump(mode="json"))
            events = read_lines(self.path)
        self.recipe = Recipe.model_validate(events[0]["recipe"])
        self._rung = _rung_rule(events[0])
        self._trials = read_trials(events)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All rows by number."""
        with self._lock:
            return tuple(self._trials.values())

    @property
    def rungs(self) -> Sequence[int]:
        """Epochs after which the scheduler compares trials."""
        return self._sweep.search.rungs(self.recipe.epochs)

    @property
    def to_run(self) -> tuple[Trial, ...]:
        """Rows that a restart goes on with before it proposes any other: proposed or started, and not ended."""
        return tuple(trial for trial in self.trials if not trial.has_ended)

    def propose(self) -> Trial:
        """A new row, proposed from all rows finished so far; on disk before it is given out."""
        with self._lock:
            number = len(self._trials)
            rows = _finished(self._trials.values())
            seed = self.recipe.seed
            genes = propose(self._sweep.space, seed, number, rows)
            parents = evolution.parents_of(self._sweep.space, seed, number, rows)
            self._append("proposed", trial=number, genes=genes, seen=[row.trial for row in rows],
                         rungs=[row.rung for row in rows], parents=parents,
                         command=replay_command(self.recipe, [Stage(0, genes)]))
            return self._trials[number]

    def start(self, number: int) -> None:
        """A trial's training begins, or begins again after an interruption."""
        with self._lock:
            self._append("started", trial=number, attempt=self._trials[number].attempts + 1)

    def judge(self, number: int, epoch: int, fitness: float) -> None:
        """The scheduler has compared a trial with others after so many epochs, and lets it go on."""
        with self._lock:
            self._append("judged", trial=number, epoch=epoch, fitness=fitness)

    def lose(self, number: int, reason: str) -> None:
        """A trial was interrupted by what its recipe can do nothing for; it starts again."""
        with self._lock:
            self._append("lost", trial=number, reason=reason)

    def exploit(self, number: int, genes: Genes, origin: Origin) -> None:
        """A trial is about to go on from another one's checkpoint with changed genes."""
        with self._lock:
            past = _exploited(self._trials, self._trials[number], genes, origin).past
            self._append("exploited", trial=number, genes=genes, origin=asdict(origin),
                         command=replay_command(self.recipe, past))

    def finish(self, number: int, fitness: float | None, metrics: Mapping[str, float], losses: Mapping[str, float],
               epochs: int, *, stopped: bool = False) -> None:
        """A trial has ended, or was stopped, after so many epochs. Without a finite fitness it has failed."""
        if fitness is None or not math.isfinite(fitness):
            self.fail(number, f"no finite fitness after {epochs} epochs")
            return
        with self._lock:
            self._append("finished", trial=number, fitness=fitness, metrics=metrics, losses=losses, epochs=epochs,
                         stopped=stopped)

    def fail(self, number: int, reason: str) -> None:
        """A trial has failed for good."""
        with self._lock:
            self._append("failed", trial=number, reason=reason)

    def close(self) -> None:
        """Release the file."""
        self._log.close()

    def _append(self, type: str, **fields: Any) -> None:
        trial = self._trials.get(fields["trial"])
        assert trial is None or not trial.has_ended, f"trial {fields['trial']} has ended already"
        self._log.append_line(type, **fields)
        _fold(self._trials, {"type": type, **plain(fields)}, self._rung)


def trial_folder(number: int, num_exploits: int) -> str:
    """Name of a trial's run folder: trial3, and trial3-2 after its first exploit."""
    return f"trial{number}" + (f"-{num_exploits + 1}" if num_exploits else "")


def read_trials(events: Sequence[Line]) -> dict[int, Trial]:
    """The rows of a ledger by number, each as far as it has come. A row that ended twice keeps its first end."""
    trials: dict[int, Trial] = {}
    for event in events[1:]:
        _fold(trials, event, _rung_rule(events[0]))
    return trials


def _rung_rule(first: Line) -> Callable[[Line], int]:
    """What gives the rung of a `finished` event in the sweep that a ledger's first event begins."""
    search, epochs = Search.model_validate(first["search"]), first["recipe"]["epochs"]
    return lambda event: search.rung(event["epochs"], epochs, stopped=event.get("stopped", True))  # 0.1.0 did not say


def read_space_of(events: Sequence[Line]) -> Space:
    """The space that a ledger was opened with."""
    space = events[0]["space"]
    genes = tuple(Gene(**{**gene, "values": tuple(gene["values"])}) for gene in space["genes"])
    return Space(**{**space, "genes": genes, "starts": tuple(space["starts"])})


def verify(events: Sequence[Line]) -> list[str]:
    """What in a ledger does not follow from the rows before it; nothing if all is well.

    Each proposal must equal `propose(space, seed, number, rows)`, where the rows are those that finished before it
    in the file and are the ones it says it has seen, on the rungs it says; numbers must count from 0, and no trial may
    end twice.
    """
    space, seed, rung = read_space_of(events), events[0]["recipe"]["seed"], _rung_rule(events[0])
    trials: dict[int, Trial] = {}
    problems: list[str] = []
    for event in events[1:]:
        number, trial = event["trial"], trials.get(event["trial"])
        if event["type"] != "proposed":
            if trial is None or trial.has_ended:
                problems.append(f"trial {number}: {event['type']}, though it {'has ended' if trial else 'is unknown'}")
        elif trial or number != len(trials):
            problems.append(f"trial {number}: proposed where trial {len(trials)} was to come")
        else:
            problems += _check_proposal(event, space, seed, _finished(trials.values()))
        _fold(trials, event, rung)
    return problems


def _check_proposal(event: Line, space: Space, seed: int, rows: Sequence[Row]) -> list[str]:
    number = event["trial"]
    if event["seen"] != [row.trial for row in rows]:
        return [f"trial {number}: says it has seen {event['seen']}, but {[row.trial for row in rows]} had finished"]
    if "rungs" not in event:
        rows = [row._replace(rung=0) for row in rows]
    elif event["rungs"] != (rungs := [row.rung for row in rows]):
        return [f"trial {number}: says that what it has seen was on the rungs {event['rungs']}, but it was on {rungs}"]
    expected = plain(propose(space, seed, number, rows))
    return [f"trial {number}: {name} is {event['genes'].get(name)!r}, but {value!r} follows from its rows"
            for name, value in expected.items() if event["genes"].get(name) != value]


def _fold(trials: dict[int, Trial], event: Line, rung: Callable[[Line], int]) -> None:
    """Bring the rows up to date with one more event."""
    number = event["trial"]
    if event["type"] == "proposed":
        trials.setdefault(number, new_trial(number, event["genes"], tuple(event["seen"]), tuple(event["parents"])))
    elif event["type"] == "exploited":
        trials[number] = _exploited(trials, trials[number], event["genes"], Origin(**event["origin"]))
    elif number not in trials or trials[number].has_ended:
        return
    elif event["type"] == "judged":
        judged = (*trials[number].judged, (event["epoch"], event["fitness"]))
        trials[number] = replace(trials[number], judged=judged)
    else:
        keys = event.keys() & {"fitness", "metrics", "losses", "epochs", "reason"}
        told: dict[str, Any] = {key: event[key] for key in keys}
        if event["type"] == "finished":
            told["rung"] = rung(event)
        trials[number] = replace(trials[number], state=_STATES[event["type"]],
                                 attempts=event.get("attempt", trials[number].attempts), **told)


def new_trial(number: int, genes: Genes, seen: tuple[int, ...] = (), parents: tuple[int, ...] = ()) -> Trial:
    """A row that was proposed."""
    return Trial(number, {trial_folder(number, 0): (Stage(0, genes),)}, seen, parents)


def _exploited(trials: Mapping[int, Trial], trial: Trial, genes: Genes, origin: Origin) -> Trial:
    """The row, going on in a new folder: its weights have the donor's past, up to the origin."""
    past = (*trials[origin.trial].pasts[origin.folder_name], Stage(origin.epoch, genes))
    new = trial_folder(trial.number, len(trial.origins) + 1)
    return replace(trial, pasts={**trial.pasts, new: past}, origins=(*trial.origins, origin))


def _finished(trials: Iterable[Trial]) -> list[Row]:
    """What proposals may see: the rows with a fitness, by number."""
    return sorted((trial.row for trial in trials if trial.state == "finished"), key=lambda row: row.trial)


def _check_identity(path: Path, first: Line, sweep: Sweep) -> None:
    if first["type"] != "sweep":
        raise InputError(f"{path}: not the ledger of a sweep; choose another --name")
    then = first["identity"]
    holds = {"search space": plain(asdict(read_space_of([first]))) == plain(asdict(sweep.space)),
             "search settings": Search.model_validate(first["search"]) == sweep.search,
             "data set": then["data set"] == sweep.labels,
             "base recipe": is_digest_of(then["base recipe"], sweep.recipe)}
    if changed := [part for part, same in holds.items() if not same]:
        raise InputError(f"{path}: begun with another {' and another '.join(changed)}; give what it was begun with to "
                         "continue it, or another --name to start a new sweep (nothing was changed)")
