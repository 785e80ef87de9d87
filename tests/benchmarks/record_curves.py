"""Record the table that `run.py evolve` replays: small trainings of our own, one row each.

    python tests/benchmarks/record_curves.py --table tests/benchmarks/yolo_curves.json

Can be stopped and started again at any time: finished rows are kept, a started one goes on from its checkpoint. The
first training, longer than the others, makes the weights that all of them start from.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_yolo.config import Placement, Recipe, RunConfig
from ray_yolo.engine.events import EventLog, read_events
from ray_yolo.errors import TrainingError
from ray_yolo.ops.evolution import Genes, GeneValue, Space, mutate, propose
from ray_yolo.tune_space import overlay, read_space

NUM_RANDOM, NUM_NEAR, NUM_REPEATS = 110, 80, 8  # 198 trainings
NEAR_GAIN = 3.0


def configurations(space: Space, num_random: int, num_near: int, num_repeats: int) -> Iterator[tuple[Genes, int]]:
    """(genes, training seed) of each row: the start with several seeds, then, in turns, children of the start and
    random draws, so that a table that was not finished is a smaller table."""
    start = dict(space.starts[0])
    for seed in range(num_repeats):
        yield start, seed
    bold = tuple(replace(gene, gain=gene.gain * NEAR_GAIN) for gene in space.genes)
    random = replace(space, algorithm="random", starts=())
    for number in range(max(num_random, num_near)):
        if number < num_random:
            yield propose(random, 0, number, ()), 0
        if number < num_near:
            yield mutate(bold, start, np.random.default_rng([10, number])), 0
