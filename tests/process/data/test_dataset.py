import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from ray_yolo.core.structures import AnnotationIndex, SampleKey
from ray_yolo.core.system import process_of
from ray_yolo.data.dataset import (
    GROUP_SIGNALS,
    Sample,
    TrainDataset,
    worker_init,
)
from tests.unit.data.test_dataset import KEYS, WILD, dataset, index

__all__ = ["index"]  # fixtures


def same(first: Sample, second: Sample) -> bool:
    return first["index"] == second["index"] and first["draw"] == second["draw"] and all(
        torch.equal(first[name], second[name]) for name in ("image", "boxes", "classes"))


def _samples(data: TrainDataset, keys: list[SampleKey]) -> list[Sample]:
    worker_init(0)
    return [{name: value.numpy() if torch.is_tensor(value) else value for name, value in data[key].items()}
            for key in keys]


def test_the_same_key_gives_the_same_sample_in_any_order_and_process(index: AnnotationIndex) -> None:
    data = dataset(index, WILD)
    forwards = [data[key] for key in KEYS]
    backwards = [data[key] for key in reversed(KEYS)][::-1]
    assert all(map(same, forwards, backwards))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        elsewhere = pool.submit(_samples, data, KEYS).result()
    for here, there in zip(forwards, elsewhere, strict=True):
        assert all(np.array_equal(here[name], there[name]) for name in ("image", "boxes", "classes"))


def _as_loader(channel: Connection) -> None:
    channel.recv()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has this process's handler, such as Ray's
    worker_init(0)
    channel.send(os.getpgrp() == os.getpid())
    time.sleep(60)


@pytest.mark.parametrize("number", GROUP_SIGNALS)
def test_a_loader_process_leaves_the_group_that_a_terminal_signals(
        monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """What has reached it before is without effect. Then SIGTERM ends it, as torch ends a loader that hangs."""
    for library, function in ((cv2, "setNumThreads"), (torch, "set_num_threads")):
        monkeypatch.setattr(library, function, lambda number: None)  # a fork has no threads to end
    here, there = Pipe()
    loader = get_context("fork").Process(target=_as_loader, args=(there,), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)  # as in the server that starts loader processes
    try:
        loader.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    there.close()
    try:
        os.kill(loader.pid, number)
        here.send("go on")
        assert here.poll(10)
        assert here.recv()
        loader.terminate()
        loader.join(10)
        assert loader.exitcode == -signal.SIGTERM
    finally:
        loader.kill()


LOADING = """
import os, signal
from multiprocessing import forkserver, resource_tracker
from torch.utils.data import DataLoader
from ray_yolo.data.dataset import start_forkserver, worker_init

if __name__ == "__main__":
    start_forkserver()
    batches = iter(DataLoader(list(range(8)), num_workers=2, persistent_workers=True, worker_init_fn=worker_init,
                              multiprocessing_context="forkserver"))
    next(batches)
    print(forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid,
          *(each.pid for each in batches._workers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_training_leaves_no_loader_and_no_fork_server(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(LOADING)
    ended = subprocess.run([sys.executable, str(tmp_path / "training.py")], stdout=subprocess.PIPE, text=True,
                           stderr=subprocess.DEVNULL, check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    processes = [process_of(int(pid)) for pid in ended.stdout.split()]
    assert len(processes) == 4
    deadline = time.monotonic() + 12
    while not all(process.has_ended for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
