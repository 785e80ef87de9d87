"""Leases in a store. A lease is an object that names the process that trains a run and renews it.

    {"attempt": 3, "holder": "...", "owner": "node 4711", "renewed": 17}

A lease that was not renewed for `EXPIRES` seconds of the store's clock may be taken over. The write is conditional on
the version read. Each acquisition increments the attempt. Keys that the holder writes contain this number as a fencing
token, because a process that lost its lease may still write (a zombie). A released lease keeps its object and thus the
number. A `holder` id is backed by a lock on its machine: if the same id appears again, the previous process is dead.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray_yolo.core.errors import InputError
from ray_yolo.core.redact import redact
from ray_yolo.storage.store import Store, StoredObject

LEASE = "lease.json"  # key of the lease of a run
EXPIRES = 60.0  # seconds
RENEWS = 10.0  # seconds
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Terms:
    """The contents of a lease."""

    attempt: int
    holder: str  # '': released
    owner: str  # the holder in words, for messages
    renewed: int = 0

    def to_bytes(self) -> bytes:
        """The object's bytes."""
        return json.dumps(vars(self)).encode()


class Lease:
    """A lease that this process holds. A thread renews it until its release. If another process has taken it over, the
    thread calls `on_loss` once."""

    def __init__(self, store: Store, key: str, terms: Terms, version: Any) -> None:
        self._store, self._key, self._terms, self._version = store, key, terms, version
        self.attempt = terms.attempt  # the number of this holder, from 1
        self.on_loss: Callable[[], None] = lambda: None
        self._stop, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ray_yolo lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the lease; if storage fails, it expires."""
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            self._store.put_if(self._key, Terms(self.attempt, "", self._terms.owner).to_bytes(), self._version)

    def renew(self) -> bool:
        """Renew the lease once. Returns whether this process still holds it."""
        with self._renewing:
            terms = replace(self._terms, renewed=self._terms.renewed + 1)
            version = _replace(self._store, self._key, terms, self._version)
            if version is not None:
                self._terms, self._version = terms, version
            return version is not None

    def _run(self) -> None:
        while not self._stop.wait(RENEWS):
            with suppress(OSError, InputError):  # unreachable: a later renewal finds out whether it was taken over
                if not self.renew():
                    self.on_loss()
                    return


def acquire(store: Store, key: str, holder: str, on_wait: Callable[[str], None] | None = None) -> Lease | str:
    """Acquire the lease at a key. Returns the lease, or its current owner.

    Args:
        holder: an id that at most one live process has.
        on_wait: called with another holder's owner before waiting for its lease to expire; None: do not wait.

    Raises:
        OSError: if storage fails.
    """
    owner = f"{os.uname().nodename} {os.getpid()}"
    start = time.monotonic()
    first: tuple[Any, float] | None = None  # the first version read, and its age then
    while True:
        lease = read_terms(store, key)
        if lease is None:
            terms, version = Terms(0, "", ""), None
        else:
            terms, version = lease[0], lease[1].version
        if lease and terms.holder not in ("", holder):  # another process's
            if first is None:
                folder = key.rpartition("/")[0] + "/"
                age = store_time(store, folder) - lease[1].modified
                first = version, age
                if on_wait and age < EXPIRES:
                    on_wait(terms.owner)
            first_version, first_age = first
            waited = time.monotonic() - start
            if first_age + waited < EXPIRES:
                was_renewed = version != first_version
                if was_renewed or not on_wait:
                    return terms.owner
                time.sleep(_POLL_SECONDS)
                continue
        terms = Terms(terms.attempt + 1, holder, owner)
        version = _replace(store, key, terms, version)
        if version is not None:
            return Lease(store, key, terms, version)
        first, start = None, time.monotonic()  # another process was faster: read the lease again


def read_terms(store: Store, key: str) -> tuple[Terms, StoredObject] | None:
    """The contents of the lease at a key and its object; None if there has never been one."""
    try:
        stored = store.get(key)
        return Terms(**json.loads(stored.data)), stored
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(f"{key}: is not a lease of this ray_yolo; remove it if no process trains this run") from None


def store_time(store: Store, prefix: str) -> float:
    """The store's clock in Unix seconds, by writing a probe object.

    Raises:
        OSError: if the store cannot be written to.
    """
    key = f"{prefix}.probe-{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        return store.get(key).modified
    finally:
        store.delete(key)


def check_conditions(store: Store, address: str) -> None:
    """Refuse a store that ignores or refuses the conditions of `put_if`: two processes would train one run.

    Raises:
        InputError: if it does.
        OSError: if it cannot be written to.
    """
    key = f".probe-{uuid.uuid4().hex}"
    problem = ""
    try:
        first = _put_if(store, key, b"1", None)
        ignores_create = store.put_if(key, b"2") is not None  # it exists
        second = _put_if(store, key, b"3", first)
        ignores_match = store.put_if(key, b"4", first) is not None  # `second` has replaced it
    finally:
        with suppress(OSError):  # an error above says more
            store.delete(key)
    if ignores_create:
        problem = "ignores conditional writes (If-None-Match)"
    elif first is None:
        problem = "refuses conditional writes (If-None-Match)"
    elif ignores_match:
        problem = "ignores conditional writes (If-Match)"
    elif second is None:
        problem = "refuses conditional writes (If-Match)"
    if problem:
        raise InputError(f"storage_path: {redact(address)} {problem}, without which two commands would train the same "
                         "run; use a bucket whose server supports them, or a folder")


def _replace(store: Store, key: str, terms: Terms, version: Any) -> Any:
    """Write a lease if its version is unchanged. Returns the new version, or None if another process was faster."""
    return _put_if(store, key, terms.to_bytes(), version)


def _put_if(store: Store, key: str, data: bytes, version: Any) -> Any:
    """`Store.put_if`. It has also written if the response was lost, and the repeated request was refused."""
    written = store.put_if(key, data, version)
    if written is not None:
        return written
    try:
        stored = store.get(key)
    except FileNotFoundError:
        return None
    return stored.version if stored.data == data else None
