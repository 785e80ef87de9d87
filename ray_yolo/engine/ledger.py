"""The ledger of a sweep: an append-only log that says what was proposed, what came of it, and from what it followed.

    sweep      digest, parts, space, search, recipe, seed      once, the first line
    proposed   trial, genes, seen                              seen: trials that had finished before (and not failed)
    started    trial, attempt
    finished   trial, fitness, metrics, losses, epochs         of the trial's last epoch
    failed     trial, reason

The ledger is the truth. A restart reads it and nothing else: what has ended is never run again, what was proposed
goes on under the same number with the same genes, and every proposal can be recomputed from the rows before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ray_yolo.config import Recipe
from ray_yolo.config_fields import canonical, config_fields
from ray_yolo.engine.events import Event, EventLog, read_events
from ray_yolo.errors import InputError
from ray_yolo.ops.evolution import Gene, Genes, GeneValue, Row, Space, best_rows, propose
from ray_yolo.tune_space import overlay

State = Literal["proposed", "running", "finished", "failed"]
Propose = Callable[[Space, int, int, Sequence[Row]], Genes]


@dataclass(frozen=True)
class Trial:
    """One row of a sweep, as far as it has come."""

    number: int
    genes: Genes
    seen: tuple[int, ...]
    state: State = "proposed"
    attempts: int = 0
    fitness: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    epochs: int = 0
    reason: str = ""
