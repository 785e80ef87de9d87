"""Record the tables that `search_landscapes.py` replays: small trainings of our own, one row each.

    python -m tests.benchmarks.record_curves --table tests/benchmarks/yolo_curves.json
    python -m tests.benchmarks.record_curves --table tests/benchmarks/bccd_curves.json --data COPY_OF_BCCD/data.yaml

    yolo_curves     yolov5n on shapes, from the defaults
    tuned_curves    the same from the best genes of yolo_curves: a default that is good
    yolo11n_curves  another model
    bccd_curves     other data: 154 images of BCCD

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
from dataclasses import replace
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
NUM_RANDOM, NUM_NEAR, NUM_REPEATS = 90, 62, 8  # 160 trainings
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


def base_of(table: str, data: str) -> tuple[Recipe, dict[str, Any]]:
    """What the rows of a table have in common, and its space."""
    if table == "tuned_curves":
        return overlay(BASE, TUNED), SPACE
    if table == "yolo11n_curves":
        return Recipe.model_validate(BASE.model_dump(exclude={"loss"}) | {"model": "yolo11n"}), ANCHOR_FREE
    if table == "bccd_curves":
        return BASE.model_copy(update={"data": data, "imgsz": 128, "fraction": 0.75}), SPACE
    return BASE, SPACE


def configurations(space: Space, num_random: int, num_near: int, num_repeats: int) -> Iterator[tuple[Genes, int]]:
    """(genes, training seed) of each row: the start with several seeds; then, in turns, random draws and children of
    the start, so that a table that is not finished is a smaller table of the same mixture."""
    start = dict(space.starts[0])
    for seed in range(num_repeats):
        yield start, seed
    bold = tuple(replace(gene, gain=gene.gain * NEAR_GAIN) for gene in space.genes)
    random = replace(space, algorithm="random", starts=())
    for number in range(max(num_random, num_near)):
        if number < num_random:
            yield propose(random, 0, number, ())[0], 0
        if number < num_near:
            yield mutate(bold, start, np.random.default_rng([10, number])), 0


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


def record(work: Path, table: Path, num_rows: int, cpus: float, data: str = "") -> None:
    """Train what is not recorded yet, and write the table after every row."""
    base, limits = base_of(table.stem, data)
    base = base.model_copy(update={"weights": base_weights(work, cpus, base.model)})
    space = read_space(limits, base).space
    wanted = list(configurations(space, NUM_RANDOM, NUM_NEAR, NUM_REPEATS))[:num_rows]
    recipes, rows = [overlay(base, genes).model_copy(update={"seed": seed}) for genes, seed in wanted], []
    for (values, seed), result in zip(wanted, train_missing(work, recipes, cpus), strict=True):
        rows.append({"genes": values, "seed": seed, **result})
        atomic_write(table, format_table(rows, base, limits), durable=False)


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
    parser.add_argument("--data", default="", help="of bccd_curves")
    parser.add_argument("--work", type=Path, default=Path("runs/curves"), help="folder of the trainings")
    parser.add_argument("--rows", type=int, default=NUM_RANDOM + NUM_NEAR + NUM_REPEATS)
    parser.add_argument("--cpus", type=float, default=2.0, help="threads of a training; 1 where others use the machine")
    options = parser.parse_args()
    record(options.work, options.table, options.rows, options.cpus, options.data)


if __name__ == "__main__":
    main()
