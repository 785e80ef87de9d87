"""Which recipe fine-tunes best: optimiser x frozen layers x final epochs without mosaic, on two small data sets.

    python tests/benchmarks/run.py fine_tune --data COPY_OF_BCCD/data.yaml COPY_OF_CARDS/data.yaml --imgsz 160

Released weights are not at hand, so each set starts from weights that are trained here: on `shapes`, and then on the
other set. Every recipe is trained with each seed, two trainings at a time. The figures are mAP50-95 of the last epoch's
weights. Trainings that the folder `--work` has are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.runs.event_log import epoch_rows, read_events, surviving
from ray_yolo.runtime import trainer
from tests.benchmarks.harness import machine

SGD = {"optimizer": {"lr0": 0.01}}
SLOW_SGD = {"optimizer": {"lr0": 0.001}, "schedule": {"warmup_bias_lr": 0.0}}
BY_THE_RULE: dict[str, Any] = {}  # AdamW: see `ray_yolo.config.fine_tuning`
FREEZES = (0, 10)
CLOSE_MOSAICS = (0, 10)


class Job(NamedTuple):
    """One training."""

    work: Path
    name: str
    recipe: dict[str, Any]


def train(job: Job) -> float:
    """mAP50-95 of the last epoch."""
    folder = job.work / job.name
    if not (folder / "finished").exists():
        placement = Placement(num_workers=0, gpus_per_worker=0.0, cpus_per_worker=1, workers=0, cache="ram",
                              project=str(job.work), name=job.name, noplots=True, mlflow_uri="off")
        trainer.fit(RunConfig(recipe=Recipe.model_validate(job.recipe), placement=placement), quiet=True)
    *_, last = epoch_rows(surviving(read_events(folder / "events.jsonl")))
    assert last.metrics is not None
    score = last.metrics["mAP50-95"]
    assert score is not None
    return score


def recipes() -> dict[str, dict[str, Any]]:
    """The compared settings by name."""
    optimizers = {"SGD 0.01": SGD, "SGD 0.001": SLOW_SGD, "AdamW": BY_THE_RULE}
    found = {}
    for (name, settings), freeze, close in itertools.product(optimizers.items(), FREEZES, CLOSE_MOSAICS):
        found[f"{name}, freeze {freeze}, close_mosaic {close}"] = {
            **settings, "freeze": freeze, "augment": {"close_mosaic": close}}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print a line for each recipe and set, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs=2, required=True)
    parser.add_argument("--model", default="yolov5n")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--base-epochs", type=int, default=40, help="of each training that makes initial weights")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--work", type=Path, default=Path("runs/fine_tune"))
    options = parser.parse_args(argv)
    work = options.work.absolute()
    common = {"model": options.model, "imgsz": options.imgsz, "batch_size": 16, "microbatch": 16,
              "precision": options.precision}
    sets = [str(Path(data).absolute()) for data in options.data]

    def base(name: str, data: str, weights: str = "") -> Job:
        recipe = {**common, **SGD, "data": data, "weights": weights, "epochs": options.base_epochs,
                  "match_classes": bool(weights)}
        return Job(work, name, recipe)

    def weights_of(name: str) -> str:
        return str(work / name / "weights" / "best.pt")

    scores: dict[str, dict[str, list[float]]] = {data: {} for data in sets}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(train, base("shapes", "shapes")).result()
        bases = [base(f"base-{number}", data, weights_of("shapes")) for number, data in enumerate(sets)]
        list(pool.map(train, bases))
        jobs = []
        for number, data in enumerate(sets):
            weights = weights_of(f"base-{1 - number}")
            for (name, settings), seed in itertools.product(recipes().items(), range(options.seeds)):
                folder = f"{number}-{name}-{seed}".replace(" ", "").replace(",", "-")
                recipe = {**common, **settings, "data": data, "weights": weights, "epochs": options.epochs,
                          "seed": seed, "match_classes": True}
                jobs.append((data, name, Job(work, folder, recipe)))
        for (data, name, _), score in zip(jobs, pool.map(train, [job for *_, job in jobs]), strict=True):
            scores[data].setdefault(name, []).append(score)
            print(f"{Path(data).parent.name}, {name}: {score:.4f}", flush=True)
    means = {Path(data).parent.name: {name: round(statistics.mean(values), 4) for name, values in rows.items()}
             for data, rows in scores.items()}
    print(json.dumps({"id": "fine_tune", "model": options.model, "imgsz": options.imgsz, "precision": options.precision,
                      "epochs": options.epochs,
                      "mean": means, "scores": scores, "machine": machine()}))


if __name__ == "__main__":
    main()
