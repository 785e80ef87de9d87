"""A sink that exports a training's event log as Ray metrics, which Prometheus collects from every node.

Ray prefixes each name with `ray_`. It drops a series some seconds after its last update, so an ended training is not
shown. All metrics are gauges, even counts, because the next driver continues them and a counter would restart at zero.
`cluster/grafana.json` is a dashboard for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ray.util.metrics import Gauge

from ray_yolo.core.events import DatasetEvent, EpochEvent, Event, Number, ShardEvent, StartEvent, StepEvent
from ray_yolo.runs.event_log import last_of
from ray_yolo.runs.run_state import state_of
from ray_yolo.runs.status import read_members
from ray_yolo.sinks.base import History, Sink

RUN_METRICS = {
    "yolo_workers": "Workers that train together",
    "yolo_step": "Newest optimiser step",
    "yolo_epochs": "Completed epochs",
    "yolo_images_per_second": "Images that all workers train per second",
    "yolo_data_wait_share": "Share of a step in which its first worker waits for images",
    "yolo_best_fitness": "Fitness of the best epoch",
    "yolo_restarts": "Restarts of all workers from a checkpoint, since the run began",
    "yolo_regroupings": "Workers lost, replaced or added while the others continued, since the run began",
    "yolo_goodput": "Training time over training time plus the time lost to interruptions",
}
WORKER_METRICS = {
    "yolo_worker_step": "Newest step of a worker",
    "yolo_worker_phase_seconds": "Seconds that a worker has been in its phase; a growing value is a stall",
    "yolo_worker_images_per_second": "Images that a worker trained per second of its last epoch",
    "yolo_worker_data_wait_share": "Share of its last epoch in which a worker waited for images",
}
_RUN_TAGS, _WORKER_TAGS = ("run",), ("run", "worker", "node")


class RayMetrics(Sink):
    """Exports the metrics of a run; the process must be connected to Ray."""

    name = "Ray metrics"

    def __init__(self, run_dir: Path) -> None:
        self.history = History(DatasetEvent, StartEvent, StepEvent, EpochEvent)
        self._run_dir, self._run = run_dir, "/".join(run_dir.parts[-2:])
        self._shards: dict[int, ShardEvent] = {}
        self._gauges = {name: Gauge(name, text, tags) for metrics, tags in (
            (RUN_METRICS, _RUN_TAGS), (WORKER_METRICS, _WORKER_TAGS)) for name, text in metrics.items()}

    def event(self, event: Event) -> None:
        """Add an event."""
        self.history.add(event)
        if isinstance(event, ShardEvent):
            self._shards[event.worker] = event

    def update(self, last: bool = False) -> None:
        """Set all metrics, including unchanged ones."""
        self._set(run_numbers(self.history.events), {"run": self._run})
        start = last_of(self.history.events, StartEvent)
        for worker, shard in self._shards.items():
            if start and worker < start.num_workers:
                self._set({"yolo_worker_images_per_second": _share(shard.images, shard.seconds),
                           "yolo_worker_data_wait_share": _share(shard.wait_seconds, shard.seconds)},
                          {"run": self._run, "worker": str(worker), "node": shard.node})
        for member in read_members(self._run_dir) or ():
            self._set({"yolo_worker_step": member.step, "yolo_worker_phase_seconds": member.seconds},
                      {"run": self._run, "worker": str(member.worker), "node": member.node})

    def _set(self, numbers: Mapping[str, Number], tags: Mapping[str, str]) -> None:
        for name, number in numbers.items():
            if number is not None:
                self._gauges[name].set(number, dict(tags))


def run_numbers(events: Sequence[Event]) -> dict[str, Number]:
    """The values of `RUN_METRICS` according to a log; None: not known yet."""
    state = state_of(events)
    start, step, best, cost = state.start, state.step, state.best, state.goodput
    return {"yolo_workers": start.num_workers if start else None, "yolo_step": step.step if step else None,
            "yolo_epochs": len(state.rows), "yolo_images_per_second": step.images_per_second if step else None,
            "yolo_data_wait_share": _share(step.wait_seconds, step.seconds) if step else None,
            "yolo_best_fitness": best.fitness if best else None, "yolo_restarts": cost.restarts,
            "yolo_regroupings": cost.regroupings, "yolo_goodput": cost.goodput}


def _share(part: float, whole: float) -> Number:
    return part / whole if whole else None
