"""Leases: one holder at a time, takeover after expiry, and what the former holder notices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.storage import lease
from ray_yolo.storage.lease import Lease, acquire, read_terms
from ray_yolo.storage.store import FolderStore

Take = Callable[..., Lease | str]
KEY = "exp/lease.json"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


@pytest.fixture
def take(store: FolderStore) -> Iterator[Take]:
    taken: list[Lease] = []

    def take(holder: str, on_wait: Callable[[str], None] | None = None) -> Lease | str:
        result = acquire(store, KEY, holder, on_wait)
        if isinstance(result, Lease):
            taken.append(result)
        return result

    yield take
    for each in taken:
        each.release()


def held(result: Lease | str) -> Lease:
    assert isinstance(result, Lease), result
    return result


def aged(folder: Path, seconds: float) -> None:
    """Backdate the lease's last renewal by the store's clock."""
    then = (folder / KEY).stat().st_mtime - seconds
    os.utime(folder / KEY, (then, then))


def test_one_process_holds_it_and_the_next_after_release(take: Take) -> None:
    first = held(take("a"))
    assert (first.attempt, take("b")) == (1, f"{os.uname().nodename} {os.getpid()}")
    first.release()
    assert held(take("b")).attempt == 2


def test_the_same_holder_id_takes_it_over_at_once(take: Take) -> None:
    held(take("a"))
    assert held(take("a")).attempt == 2


def test_an_expired_lease_is_taken_over_and_the_old_holder_notices(take: Take, tmp_path: Path) -> None:
    first = held(take("a"))
    aged(tmp_path, lease.EXPIRES - 5)
    assert isinstance(take("b"), str)
    aged(tmp_path, lease.EXPIRES)
    assert held(take("b")).attempt == 2
    assert not first.renew()
    first.release()  # it no longer holds the lease
    assert isinstance(take("c"), str)


def test_the_holder_renews_it_and_notices_its_loss(take: Take, store: FolderStore, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWS", 0.02)
    lost = threading.Event()
    first = held(take("a"))
    first.on_loss = lost.set
    for _ in range(2):
        aged(tmp_path, 2 * lease.EXPIRES)
        before = read_terms(store, KEY)
        while read_terms(store, KEY) == before:
            pass
    assert not lost.is_set()
    taken = lease.Terms(2, "b", "elsewhere 1").to_bytes()
    while not store.put_if(KEY, taken, store.get(KEY).version):
        pass  # renewed meanwhile, which a plain `put` might have undone
    assert lost.wait(10)


def test_a_renewal_whose_response_was_lost_succeeds(take: Take, store: FolderStore,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    first, put_if = held(take("a")), store.put_if

    def repeated(*arguments: object) -> object:  # like a client without a response
        put_if(*arguments)
        return put_if(*arguments)

    monkeypatch.setattr(store, "put_if", repeated)
    assert first.renew()


def test_an_object_that_is_no_lease_is_not_overwritten(take: Take, store: FolderStore) -> None:
    store.put(KEY, b"{}")
    with pytest.raises(InputError):
        take("a")


@pytest.mark.parametrize("lost", [1, 3])
def test_a_probe_whose_response_was_lost_refuses_no_store(
        store: FolderStore, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """The client repeats the request, which then meets what it has written itself."""
    put_if, calls = store.put_if, []

    def lossy(key: str, data: bytes, version: Any = None) -> Any:
        calls.append(key)
        written = put_if(key, data, version)
        return None if len(calls) == lost else written

    monkeypatch.setattr(store, "put_if", lossy)
    lease.check_conditions(store, "s3://bucket")
    assert len(calls) == 4
    assert store.walk() == []


def test_a_store_that_cannot_be_written_is_no_store_without_conditions(
        store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the write is raised, not that of the clean-up after it."""
    def refuse(reason: str) -> None:
        raise OSError(reason)

    monkeypatch.setattr(store, "put_if", lambda *_: refuse("away"))
    monkeypatch.setattr(store, "delete", lambda *_: refuse("also away"))
    with pytest.raises(OSError, match=r"^away"):
        lease.check_conditions(store, "s3://bucket")
