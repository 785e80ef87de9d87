"""What the driver's machine does while a training runs, by MLflow's own monitor, if MLflow's own switch asks for it.

Its settings are MLflow's: MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING, MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL, ... Other
machines are not seen; Ray's metrics have them all (cluster/grafana.json).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_yolo.errors import InputError
from ray_yolo.redact import redact
from ray_yolo.runlog.mlflow import Mlflow
from ray_yolo.runlog.owed import read_run_file
from ray_yolo.runlog.projections import Projection

_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether MLflow's switch is on."""
    return environment.get(_SWITCH, "").lower() in ("true", "1")


class SystemMetrics(Projection):
    """system/NODE/cpu_utilization_percentage and their like in the MLflow run of a training.

    Args:
        mlflow: which makes the run.
    """

    name = "system metrics"

    def __init__(self, run_dir: Path, uri: str, mlflow: Mlflow) -> None:
        super().__init__()
        self._run_dir, self._uri, self._mlflow = run_dir, uri, mlflow
        self._monitor: Any = None

    def update(self, last: bool = False) -> None:
        """Begin once the run is there; what was posted by an earlier command is gone on from."""
        about = read_run_file(self._run_dir)
        if last or self._monitor or not self._mlflow.answered_at() or not about or about["uri"] != redact(self._uri):
            return
        if not importlib.util.find_spec("psutil"):
            raise InputError(f"{_SWITCH} needs pip install psutil")
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._monitor = SystemMetricsMonitor(about["run_id"], resume_logging=True, node_id=socket.gethostname(),
                                             tracking_uri=self._uri)
        self._monitor.start()

    def finish(self) -> None:
        """Post what is left."""
        if self._monitor:
            self._monitor.finish()
