"""The pictures of a finished run, drawn on the driver from its events and arrays; training never waits for them."""

from __future__ import annotations

from pathlib import Path

from ray_yolo.engine.build import Job


def draw_plots(run_dir: Path, job: Job) -> None:
    """Draw what the run folder should show."""
