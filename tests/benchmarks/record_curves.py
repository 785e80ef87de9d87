"""Record the tables that `search_landscapes.py` replays: small trainings of our own, one row each.

    python -m tests.benchmarks.record_curves --table tests/benchmarks/yolo_curves.json
    python -m tests.benchmarks.record_curves --table tests/benchmarks/bccd_curves.json --data COPY_OF_BCCD/data.yaml

    yolo_curves              yolov5n on shapes, from the defaults
    tuned_curves             the same from the best genes of yolo_curves: a default that is good
    yolo11n_curves           another model
    bccd_curves              other data: 154 images of BCCD
    MODEL_DATA_EPOCHS_curves two models on half of BCCD and a third of cards, with the noise of three or five recipes

May be stopped and started again at any time: rows that are there are kept, a training that was begun goes on from its
checkpoint, and the table is whole after every row. The first training, on shapes1k, makes the weights that all rows
start from (their heads are new, shapes has other classes): from scratch, nothing is learnt in 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import TrainingError
from ray_yolo.core.files import atomic_write
from ray_yolo.runs.event_log import EventLog, epoch_rows, read_events, read_lines, surviving
from ray_yolo.tune.evolution import Genes, Space, mutate, propose
from ray_yolo.tune.space import read_space
from ray_yolo.tune.trials import overlay

FORMAT = 1
NEAR_GAIN = 3.0
SPACE: dict[str, Any] = {
    "lr0": {"type": "loguniform", "low": 1e-4, "high": 0.1},
    "momentum": {"low": 0.6, "high": 0.98, "gain": 0.3},
    "weight_decay": {"low": 0.0, "high": 0.001},
    "warmup_epochs": {"low": 0.0, "high": 5.0},
    "box": {"type": "loguniform", "low": 0.02, "high": 0.2},
    "cls": {"type": "loguniform", "low": 0.2, "high": 4.0},
    "obj": {"type": "loguniform", "low": 0.2, "high": 4.0},
    "hsv_v": {"low": 0.0, "high": 0.9},
    "translate": {"low": 0.0, "high": 0.9},
    "scale": {"low": 0.0, "high": 0.9},
    "fliplr": {"low": 0.0, "high": 1.0},
    "mosaic": {"low": 0.0, "high": 1.0},
}
COMMON = {"model": "yolov5n", "batch_size": 16, "microbatch": 16, "precision": "fp32", "patience": 0}
WEIGHTS = Recipe.model_validate({
    **COMMON, "data": "shapes1k", "imgsz": 128, "epochs": 14, "augment": {"scale": 0.3},
    "optimizer": {"name": "AdamW", "lr0": 0.002, "nominal_batch": 16},
    "schedule": {"warmup_bias_lr": 0.002, "ema_ramp": 200, "lrf": 0.05}})
BASE = Recipe.model_validate({
    **COMMON, "data": "shapes", "imgsz": 96, "epochs": 12, "optimizer": {"nominal_batch": 16},  # 8 steps an epoch
    "schedule": {"warmup_epochs": 1, "warmup_min_batches": 0, "warmup_bias_lr": 0.01, "ema_ramp": 40}})
TUNED = {  # the best row of yolo_curves
    "lr0": 0.0508, "momentum": 0.6147, "weight_decay": 0.0004, "warmup_epochs": 4.1563, "box": 0.0286, "cls": 0.8883,
    "obj": 1.5846, "hsv_v": 0.5892, "translate": 0.0293, "scale": 0.3002, "fliplr": 0.214, "mosaic": 0.1152}
ANCHOR_FREE = {gene: limits for gene, limits in SPACE.items() if gene != "obj"} | {
    "box": {"type": "loguniform", "low": 2.0, "high": 30.0},
    "loss.dfl": {"type": "loguniform", "low": 0.3, "high": 6.0}}


@dataclass(frozen=True)
class Contents:
    """What a table holds: the trainings of `base`, with genes of `space`.

    The start is followed, in turns, by `num_random` draws and `num_near` children of it. The first `num_repeated` of
    all these recipes are trained on `num_seeds` seeds, so that their noise is known; the others on one.
    """

    base: Recipe
    space: Mapping[str, Any]
    num_random: int = 90
    num_near: int = 62
    num_repeated: int = 1
    num_seeds: int = 8

    def rows(self, space: Space) -> Iterator[tuple[Genes, int]]:
        """(genes, training seed) of each row. A table that is not finished is a smaller table of the same mixture."""
        for number, genes in enumerate(self._recipes(space)):
            yield from ((genes, seed) for seed in range(self.num_seeds if number < self.num_repeated else 1))

    def _recipes(self, space: Space) -> Iterator[Genes]:
        start = dict(space.starts[0])
        yield start
        bold = tuple(replace(gene, gain=gene.gain * NEAR_GAIN) for gene in space.genes)
        random = replace(space, algorithm="random", starts=())
        for number in range(max(self.num_random, self.num_near)):
            if number < self.num_random:
                yield propose(random, 0, number, ())[0]
            if number < self.num_near:
                yield mutate(bold, start, np.random.default_rng([10, number]))


def trainings_of(model: str, data: str, epochs: int, num_repeated: int = 5, **settings: Any) -> Contents:
    """Contents of a table of other data: 16 recipes, the first few on three seeds."""
    base = base_of(model).model_copy(update={"data": data, "epochs": epochs, **settings})
    return Contents(base, SPACE if model == "yolov5n" else ANCHOR_FREE, 8, 7, num_repeated, 3)


def base_of(model: str) -> Recipe:
    """The recipe of `BASE` for another model, with the loss gains of its family."""
    return Recipe.model_validate(BASE.model_dump(exclude={"loss"}) | {"model": model})


TABLES = {
    "yolo_curves": Contents(BASE, SPACE),
    "tuned_curves": Contents(overlay(BASE, TUNED), SPACE),
    "yolo11n_curves": Contents(base_of("yolo11n"), ANCHOR_FREE),
    "bccd_curves": Contents(BASE.model_copy(update={"data": "bccd", "imgsz": 128, "fraction": 0.75}), SPACE),
    "yolov5n_bccd_27_curves": trainings_of("yolov5n", "bccd", 27, num_repeated=3, fraction=0.5),
    "yolov5n_cards_12_curves": trainings_of("yolov5n", "cards", 12, fraction=0.35, allow_names=True),
    "yolo11n_bccd_12_curves": trainings_of("yolo11n", "bccd", 12, fraction=0.5),
    "yolo11n_cards_27_curves": trainings_of("yolo11n", "cards", 27, fraction=0.35, allow_names=True)}


def train(recipe: Recipe, work: Path, name: str, cpus: float) -> dict[str, Any]:
    """The curve of one training in this process: `fitness` and `seconds` of each epoch, `start_seconds` before them.

    A training that fails has no fitness and its reason in `failed`.
    """
    from ray_yolo.runtime import trainer

    placement = Placement(num_workers=0, gpus_per_worker=0.0, cpus_per_worker=cpus, workers=0, cache="ram",
                          project=str(work), name=name, noplots=True, mlflow_uri="off", nosave=True)
    began = time.monotonic()
    try:
        run = trainer.fit(RunConfig(recipe=recipe, placement=placement), quiet=True).run_dir
    except TrainingError as error:
        return {"fitness": None, "seconds": None, "failed": str(error)}
    took = time.monotonic() - began
    rows = epoch_rows(surviving(read_events(run / "events.jsonl")))
    seconds = [row.seconds for row in rows]
    return {"fitness": [round(row.fitness or 0.0, 5) for row in rows], "seconds": [round(s, 3) for s in seconds],
            "start_seconds": round(took - sum(seconds), 3)}


def base_weights(work: Path, cpus: float, model: str = BASE.model) -> str:
    """The weights that all rows start from; trained at the first call."""
    path = work / "weights" / "weights" / "last.pt"
    if not (work / "weights" / "finished").exists():
        train(Recipe.model_validate(WEIGHTS.model_dump(exclude={"loss"}) | {"model": model}), work, "weights", cpus)
    return str(path)


def train_missing(work: Path, recipes: Sequence[Recipe], cpus: float) -> Iterator[dict[str, Any]]:
    """The curve of each recipe, in order; those that `work` has are not trained again."""
    work.mkdir(parents=True, exist_ok=True)
    done = {event["row"]: event["result"] for event in read_lines(work / "rows.jsonl")}
    log = EventLog(work / "rows.jsonl")
    for number, recipe in enumerate(recipes):
        if number not in done:
            done[number] = train(recipe, work, f"row-{number:03d}", cpus)
            log.append_line("row", row=number, result=done[number])
            last = (done[number]["fitness"] or ["failed"])[-1]
            print(f"{number + 1}/{len(recipes)}: {last}, {sum(done[number]['seconds'] or [0]):.1f} s", flush=True)
        yield done[number]
    log.close()


def record(work: Path, table: Path, num_rows: int | None, cpus: float, data: str = "") -> None:
    """Train what is not recorded yet, and write the table after every row."""
    contents = TABLES[table.stem]
    base = contents.base.model_copy(update={"data": data} if data else {})
    base = base.model_copy(update={"weights": base_weights(work, cpus, base.model)})
    wanted = list(contents.rows(read_space(contents.space, base).space))[:num_rows]
    recipes, rows = [overlay(base, genes).model_copy(update={"seed": seed}) for genes, seed in wanted], []
    for (values, seed), result in zip(wanted, train_missing(work, recipes, cpus), strict=True):
        rows.append({"genes": values, "seed": seed, **result})
        atomic_write(table, format_table(rows, base, contents.space), durable=False)


def format_table(rows: Sequence[Mapping[str, Any]], base: Recipe, space: Mapping[str, Any]) -> str:
    """The text of a table, a row on each line."""
    starts = [row["start_seconds"] for row in rows if row["fitness"]]
    about = {"made by": "python -m tests.benchmarks.record_curves", "python": platform.python_version(),
             "machine": platform.processor() or platform.machine()}
    no_paths = {"weights": "", "data": Path(base.data).parent.name or base.data}
    head = {"format": FORMAT, "about": about, "space": space, "recipe": base.model_dump(mode="json") | no_paths,
            "epochs": base.epochs, "start_seconds": statistics.median(starts or [0.0])}
    keys = ("genes", "seed", "fitness", "seconds")
    lines = ",\n".join(json.dumps({key: row[key] for key in keys}) for row in rows)
    return f"{json.dumps(head, indent=1)[:-2]},\n \"rows\": [\n{lines}\n]}}\n"


def main() -> None:
    """Record as many rows as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="its name says what is trained")
    parser.add_argument("--data", default="", help="data.yaml of a copy of BCCD or cards")
    parser.add_argument("--work", type=Path, default=Path("runs/curves"), help="folder of the trainings")
    parser.add_argument("--rows", type=int, help="of the table; default: all")
    parser.add_argument("--cpus", type=float, default=2.0, help="threads of a training; 1 where others use the machine")
    options = parser.parse_args()
    record(options.work, options.table, options.rows, options.cpus, options.data)


if __name__ == "__main__":
    main()
