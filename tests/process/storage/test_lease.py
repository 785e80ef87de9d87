"""Leases: one holder at a time, takeover after expiry, and what the former holder notices."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ray_yolo.storage import lease
from ray_yolo.storage.lease import Lease, acquire
from ray_yolo.storage.store import FolderStore, open_store
from tests.unit.storage.test_lease import KEY, Take, aged, held, store, take

__all__ = ["store", "take"]  # fixtures


def test_waiting_distinguishes_live_holders_from_dead_ones(take: Take, store: FolderStore, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWS", 0.05)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    living = held(take("a"))
    waits: list[str] = []
    assert isinstance(acquire(store, KEY, "b", waits.append), str)
    assert waits == [f"{os.uname().nodename} {os.getpid()}"]
    living._stop.set()  # it dies
    living._thread.join()
    aged(tmp_path, lease.EXPIRES - 0.5)
    assert held(take("b", waits.append)).attempt == 2


@pytest.mark.usefixtures("s3")
def test_of_many_concurrent_processes_one_acquires_it() -> None:
    store = open_store("s3://bucket/leases")
    results: list[Lease | str] = []
    threads = [threading.Thread(target=lambda name=f"holder {number}": results.append(acquire(store, KEY, name)))
               for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [each for each in results if isinstance(each, Lease)]
    assert winner.attempt == 1
    assert winner.renew()
    winner.release()
    assert held(acquire(store, KEY, "next")).attempt == 2
