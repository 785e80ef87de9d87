"""The recipe that a state was trained with, beside the one in run.json: they must not contradict each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_yolo.checkpoints.layout import MANIFEST
from ray_yolo.checkpoints.local import newest_first
from ray_yolo.checkpoints.state_file import load_plain, verify_manifest
from ray_yolo.config.settings import leaves
from ray_yolo.core.errors import CheckpointError
from ray_yolo.runs.run_record import RECORD_FILE


def contradiction(run_dir: Path, recipe: Mapping[str, Any]) -> str:
    """How the newest intact checkpoint of a run contradicts the recipe of its run.json; '' if it does not.

    A state is read first and verified only if it contradicts, because verifying reads all of it.
    """
    for folder in newest_first(run_dir):
        state = folder / "state.pt"
        try:
            differences = contradicting_settings(state, recipe)
            if not differences:
                return ""
            if verify_manifest(state, folder / MANIFEST) is None:
                return f"{RECORD_FILE} says {differences[0]}, and {folder.name} was trained with {differences[1]}"
        except CheckpointError:  # the start of the training reports it
            continue
    return ""


def contradicting_settings(state: Path, recipe: Mapping[str, Any]) -> tuple[str, str] | None:
    """The settings that differ between a recipe and the one in a state: (as in the recipe, as in the state), or None.

    A setting that only one of them has is that of another version, and no contradiction.

    Raises:
        CheckpointError: if the state cannot be read.
    """
    try:
        trained = dict(leaves(json.loads(load_plain(state, mapped=True)["meta"]).get("recipe", {})))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{state}: is no state of a training ({error})") from None
    stated = dict(leaves(recipe))
    other = sorted(keys for keys in stated.keys() & trained.keys() if stated[keys] != trained[keys])
    if not other:
        return None
    ours, theirs = (", ".join(f"{'.'.join(keys)}={values[keys]}" for keys in other) for values in (stated, trained))
    return ours, theirs
