"""Where checkpoints are in a run folder, and the lock of its driver. This module does not import torch.

    checkpoints/step-N/state.pt, MANIFEST.json    of step N
    weights/KIND.pt, KIND.json                    links to a checkpoint's, or reduced to what inference needs
"""

from __future__ import annotations

from pathlib import Path

MANIFEST = "MANIFEST.json"
DRIVER_LOCK = ".lock"
"""File in a run folder that the driver keeps locked."""


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def manifest_of(state: Path) -> Path:
    """The manifest of a state file."""
    return state.with_name(MANIFEST) if state.name == "state.pt" else state.with_suffix(".json")
