"""What small labels gain if they count as one cell when candidate points are chosen (`small_labels` of the loss).

    python tests/benchmarks/run.py small_labels --data COPY_OF_BCCD/data.yaml --imgsz 160

Each seed is trained twice in this process, without and with it. The figures are the highest mAP50 and mAP50-95 over the
epochs. Seeds that the folder `--work` has are not trained again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.models.families import FAMILY_OF
from ray_yolo.models.loss_anchor_free import AnchorFreeLoss
from ray_yolo.runs.event_log import epoch_rows, read_events, surviving
from ray_yolo.runtime import trainer
from tests.benchmarks.harness import machine


def train(recipe: Recipe, work: Path, name: str, *, small_labels: bool) -> tuple[float, float]:
    """Highest mAP50 and mAP50-95 of a training."""
    FAMILY_OF[recipe.model] = FAMILY_OF[recipe.model]._replace(
        build_loss=lambda head, gains, *_: AnchorFreeLoss(head, gains, small_labels=small_labels))
    folder = work / name
    if not (folder / "finished").exists():
        placement = Placement(num_workers=0, gpus_per_worker=0.0, cpus_per_worker=1, workers=0, cache="ram",
                              project=str(work), name=name, noplots=True, mlflow_uri="off")
        trainer.fit(RunConfig(recipe=recipe, placement=placement), quiet=True)
    metrics = [row.metrics or {} for row in epoch_rows(surviving(read_events(folder / "events.jsonl")))]
    return max(row["mAP50"] for row in metrics), max(row["mAP50-95"] for row in metrics)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print a line for each training, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="yolo11n")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/small_labels"))
    options = parser.parse_args(argv)
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for seed in range(options.seeds):
        for which, rows in found.items():
            recipe = Recipe.model_validate({
                "model": options.model, "data": options.data, "imgsz": options.imgsz, "epochs": options.epochs,
                "seed": seed, "batch_size": 16, "microbatch": 16})
            rows.append(train(recipe, options.work, f"{which}-{seed}", small_labels=which == "with"))
            print(f"seed {seed}, {which}: {rows[-1][0]:.4f} {rows[-1][1]:.4f}", flush=True)
    means = {which: [round(sum(column) / len(rows), 4) for column in zip(*rows, strict=True)]
             for which, rows in found.items()}
    print(json.dumps({"id": "small_labels", "model": options.model, "imgsz": options.imgsz, **found, "mean": means,
                      "machine": machine()}))


if __name__ == "__main__":
    main()
