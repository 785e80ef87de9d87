"""Writes and reads the files of a sweep in YOLOv5's formats: evolve.csv and hyp_evolve.yaml.

They are computed from the ledger and can be rewritten from it at any time.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.checkpoints.remote_checkpoints import RemoteCheckpoints
from ray_yolo.checkpoints.weights_file import local_file
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import (
    GENES,
    LEGACY_GENES,
    canonical,
    config_fields,
    explain_unknown,
    read_config_file,
)
from ray_yolo.config.yaml import read_scalar, to_yaml
from ray_yolo.core.errors import InputError, StorageError
from ray_yolo.core.events import ANCHOR_TERMS
from ray_yolo.core.files import atomic_write
from ray_yolo.engine.evaluate import DETECTIONS_FILE
from ray_yolo.runs.working_copy import address_of
from ray_yolo.sinks.metric_names import COLUMNS, loss_column
from ray_yolo.storage.store import open_store
from ray_yolo.tune.evolution import NUM_PARENTS, GeneValue, Space, TrialRow, best_rows, nearest
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.search import SEARCH, Search
from ray_yolo.tune.space import WITH_ANCHORS, WITHOUT_ANCHORS
from ray_yolo.tune.trials import Trial, best_trial, overlay, recipe_value, replay_command, short_name

RUNG = "rung"  # epochs trained
WEIGHTS_FOLDERS = "checkpoints", "weights"
"""The folders of a trial from which it can go on, or be used."""
_RECIPE = config_fields(Recipe)
_log = logging.getLogger(__name__)


def format_evolve_csv(recipe: Recipe, trials: Iterable[Trial]) -> str:
    """The text of evolve.csv: YOLOv5's columns, all its genes, and the other genes of the sweep.

    It has one row for each trial with a result, by number. Cells are right-aligned, numbers exact. If trials were
    paused, a last column has the epochs trained by each, because only numbers after equally many epochs are comparable.
    """
    finished = [trial for trial in trials if trial.fitness is not None]
    genes = _gene_names(finished)
    has_paused = len({trial.epochs for trial in finished}) > 1
    terms = list(ANCHOR_TERMS)
    if finished and finished[0].losses:
        terms = list(finished[0].losses)

    header = [*COLUMNS.values(), *(loss_column("val", term) for term in terms), *genes]
    if has_paused:
        header.append(RUNG)
    lines = [header]
    for trial in finished:
        trained = overlay(recipe, trial.genes)
        numbers = [trial.metrics.get(name) for name in COLUMNS]
        numbers += [trial.losses.get(name) for name in terms]
        cells = ["nan" if number is None else str(number) for number in numbers]
        cells += [str(recipe_value(trained, gene)) for gene in genes]
        if has_paused:
            cells.append(str(trial.epochs))
        lines.append(cells)

    aligned = [[f"{cell:>20}" for cell in line] for line in lines]
    return "".join(",".join(line) + "\n" for line in aligned)


def format_hyp_evolve(recipe: Recipe, trials: Sequence[Trial], claim: ClaimedEvent | None = None) -> str | None:
    """The text of hyp_evolve.yaml, for `--hyp`: all genes of the winner.

    Args:
        claim: at the end of the sweep; without a claim, the winner is the best row so far.

    Returns:
        None if no row has a result.
    """
    best = trials[claim.winner] if claim else best_trial(trials)
    if best is None or best.fitness is None:
        return None
    trained = overlay(recipe, best.genes)
    metrics = ", ".join(f"{name} {value:.5g}" for name, value in best.metrics.items() if value is not None)
    values = {name: recipe_value(trained, name) for name in _gene_names([best])}
    if trained.weights:  # the learning rate is that of this optimiser, and the default depends on the weights
        values["optimizer.name"] = trained.optimizer.name
    if trained.changes:
        values["changes"] = [change.model_dump() for change in trained.changes]
    claimed = f"# {claim}\n" if claim else ""
    return (f"# Best of {len(trials)} trials: trial {best.number}, fitness {best.fitness:.5g} after {best.epochs} "
            f"epochs\n{claimed}# {metrics}\n# {replay_command(recipe, best.genes)}\n{to_yaml(values)}")


def write_sweep_files(folder: str | os.PathLike[str], recipe: Recipe, trials: Sequence[Trial],
                      claim: ClaimedEvent | None = None) -> None:
    """Write evolve.csv and, if there is a best row, hyp_evolve.yaml."""
    atomic_write(Path(folder) / "evolve.csv", format_evolve_csv(recipe, trials), durable=False)
    if text := format_hyp_evolve(recipe, trials, claim):
        atomic_write(Path(folder) / "hyp_evolve.yaml", text, durable=False)


def drop_weights(folder: str | os.PathLike[str]) -> None:
    """Remove checkpoints, weights and detections of a trial that cannot win. Its command can train it again, and so
    does a sweep that needs more of its epochs: a training without any checkpoint starts at its first step.

    An error of a store is ignored: the end of the sweep tries again.
    """
    for name in WEIGHTS_FOLDERS:
        shutil.rmtree(Path(folder) / name, ignore_errors=True)
    (Path(folder) / DETECTIONS_FILE).unlink(missing_ok=True)
    if address := address_of(Path(folder)):
        store = open_store(address)
        with suppress(OSError):
            RemoteCheckpoints(store, 0).drop()
            store.delete(DETECTIONS_FILE)


def used_bytes(*folders: Path) -> int:
    """The bytes of the files below some folders on this disk; a file with several names counts once."""
    sizes = {}
    for path in itertools.chain.from_iterable(folder.rglob("*") for folder in folders):
        with suppress(FileNotFoundError):  # its records may still be written
            if path.is_file():
                status = path.stat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def keep_best(folder: Path, runs: Iterable[Path]) -> bool:
    """Copy weights/best.pt and last.pt of the best trial to the sweep's folder. They come from its first run that has
    them. Returns whether there is one.

    Raises:
        StorageError: if the store of a run does not answer.
    """
    (folder / "weights").mkdir(exist_ok=True)
    for path in (folder / "weights").glob("[bl][ea]st.*"):  # an earlier end may have had another winner
        path.unlink()
    files = next(filter(None, map(_weights_of, runs)), [])
    for path in files:
        shutil.copyfile(path, folder / "weights" / path.name)
    return bool(files)


def _weights_of(run: Path) -> list[Path]:
    """The files of best.pt and last.pt of a run; none if they were removed."""
    address = address_of(run)
    if not address:
        return list((run / "weights").glob("[bl][ea]st.*"))
    try:  # another machine may have trained it
        entries = open_store(address).list("weights/")
    except OSError as error:
        raise StorageError(f"{address}: {error}; rerun the same command when storage answers") from None
    files = []
    for entry in entries:
        if entry.name in ("best.json", "last.json"):
            weights = local_file(f"{address}/weights/{entry.name.removesuffix('.json')}.pt")
            files += [weights, weights.with_suffix(".json")]  # the copy has its description beside it
    return files


class _OldResult(NamedTuple):
    """The genes of an old training."""

    genes: Mapping[str, Any]  # the keys are short names, the values as read
    origin: str  # file and line, for messages


def read_warm_start(path: str, space: Space, search: Search, recipe: Recipe) -> list[dict[str, GeneValue]]:
    """Starts from old results, with each gene clipped to the space. Missing genes are those of the space's first start.

    An evolve.csv gives its five best rows by this search's objective. A hyp file gives one start, a folder one start
    per hyp file. The old fitness is not used, because it is from another data set or schedule. Values that a start
    does not take over as they are, are warnings.

    Args:
        recipe: of all trials, except for their genes.

    Raises:
        InputError: if the file is none of these, is a search space, has no usable row, unknown settings, none of the
            genes, or a value of a range that is not a number.
    """
    results = _read_csv(path, search) if path.endswith(".csv") else _read_hyps(path)
    starts = []
    unsearched: dict[str, Any] = {}  # settings of the first result that differ
    for result in results:
        starts.append(_start_of(result, space))
        for name, value in _unsearched(result.genes, space, recipe):
            unsearched.setdefault(name, value)
    for name, value in unsearched.items():
        _log.warning("%s: %s %s is not searched: all trials have %s (give it by --hyp or --set)", path, name, value,
                     recipe_value(recipe, name))
    return starts


def _start_of(result: _OldResult, space: Space) -> dict[str, GeneValue]:
    """The start that an old result gives."""
    start = dict(space.starts[0])
    found = [gene for gene in space.genes if gene.name in result.genes]
    if not found:
        names = ", ".join(gene.name for gene in space.genes)
        raise InputError(f"{result.origin}: has none of the genes of this space ({names}); give another file, or leave "
                         "--warm-start out")
    for gene in found:
        value = result.genes[gene.name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if gene.kind != "choice" and not is_number:
            raise InputError(f"{result.origin}: {gene.name}: {value!r} is not a number; correct it, or remove it from "
                             "the file")
        start[gene.name] = nearest(gene, value)
        if start[gene.name] != value:
            _log.warning("%s: %s %s is not in the space: the start has %s", result.origin, gene.name, value,
                         start[gene.name])
    return start


def _unsearched(genes: Mapping[str, Any], space: Space, recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The settings of an old result that are no genes of the space and differ from the recipe."""
    searched = {gene.name for gene in space.genes}
    for name, value in genes.items():
        if name not in searched and canonical(name) in _RECIPE and value != recipe_value(recipe, name):
            yield name, value


def _read_csv(path: str, search: Search) -> list[_OldResult]:
    """The genes of the best rows of an evolve.csv, best first."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    header = lines[0][1] if lines else []
    missing = [name for name in COLUMNS.values() if name not in header]
    if missing:
        raise InputError(f"{path}:1: no column {missing[0]}; a warm start takes an evolve.csv of YOLOv5 or of "
                         "ray_yolo.tune, or a hyp file")
    results = []
    trials: list[TrialRow] = []
    for line, cells in lines[1:]:
        if cells == header:  # two files, one after the other
            continue
        # YOLOv5 writes the header once. A gene that is added to its hyp file later moves the cells of new rows.
        if len(cells) != len(header):
            raise InputError(f"{path}:{line}: {len(cells)} cells, and the header has {len(header)}: it is not known "
                             "which is which; remove the rows of another header")
        row = dict(zip(header, map(_scalar, cells), strict=True))
        genes = {short_name(name): value for name, value in row.items()}
        results.append(_OldResult(genes, f"{path}:{line}"))
        trials.append(TrialRow(len(trials), row, _old_fitness(row, search), int(row.get(RUNG, 0))))
    ranked = best_rows(trials, NUM_PARENTS)
    if not ranked:
        raise InputError(f"{path}: no row has finite metrics; give another file, or leave --warm-start out")
    return [results[row.trial] for row in ranked]


def _old_fitness(row: Mapping[str, Any], search: Search) -> float | None:
    return search.recipe_objective.fitness({
        ours: value for ours, name in COLUMNS.items() if isinstance(value := row.get(name), (int, float))})


def _read_hyps(path: str) -> list[_OldResult]:
    """The genes of a hyp file, or of each YAML file of a folder."""
    files = [path]
    if os.path.isdir(path):
        files = sorted(str(file) for file in Path(path).iterdir()
                       if file.suffix in (".yaml", ".yml") and file.name != "opt.yaml")  # beside hyp.yaml of a run
    if not files:
        raise InputError(f"{path}: no hyp file (*.yaml) in this folder; give another one, or leave --warm-start out")
    return [_OldResult(_read_hyp(file), file) for file in files]


def _read_hyp(path: str) -> dict[str, Any]:
    """The genes of a hyp file. A search space is refused: its ranges are not values."""
    values = read_config_file(path)
    for name, item in values.items():
        is_list = isinstance(item.value, list) and name in _RECIPE and _RECIPE[name].types in ((int,), (float,))
        is_of_space = name.partition(".")[0] in (SEARCH, WITH_ANCHORS, WITHOUT_ANCHORS)
        if is_of_space or is_list or canonical(name.rpartition(".")[0]) in _RECIPE:
            raise InputError(f"{item.origin}: {name}: a search space has no values to start from; give it as --space, "
                             "and to --warm-start an evolve.csv, a hyp file (lr0: 0.01), or a folder of hyp files")
        if name not in _RECIPE and name not in LEGACY_GENES:
            raise InputError(f"{item.origin}: {explain_unknown(name, _RECIPE)}")
    return {short_name(name): _scalar(item.value) for name, item in values.items()}


def _scalar(value: Any) -> Any:
    """A value as YAML reads it; text that YAML reads as null stays text."""
    read = read_scalar(value) if isinstance(value, str) else value
    return value if read is None else read


def _gene_names(trials: Iterable[Trial]) -> list[str]:
    """YOLOv5's genes, then the other genes of the trials."""
    return list(dict.fromkeys([*GENES, *(name for trial in trials for name in trial.genes)]))
