"""Who trains a run that lies in a store: an object that names him, for as long as he renews it.

    {"attempt": 3, "holder": "...", "owner": "node 4711", "renewed": 17}

A lease that nobody has renewed for `EXPIRES` seconds, by the store's clock, may be taken over on condition that it
still is the version that was looked at. Each holder has the next attempt: what he writes has its number in its key, so
that it is told from what an earlier one, who has come back, still writes. One that was given back stays, for its
number. Whoever has an object of his own lock on a machine says so by `holder`: then the one before him is dead.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, Any

from ray_yolo.core.errors import InputError
from ray_yolo.core.redact import redact
from ray_yolo.storage.store import Store, StoredObject


def try_lock(file: int | IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. False if another process has it.

    Raises:
        OSError: if its file system has no locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


EXPIRES = 60.0
RENEWS = 10.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Terms:
    """What a lease says."""

    attempt: int
    holder: str  # '': given back
    owner: str
    renewed: int = 0

    def to_bytes(self) -> bytes:
        """As an object has it."""
        return json.dumps(vars(self)).encode()


def read_terms(store: Store, key: str) -> tuple[Terms, StoredObject] | None:
    """What the lease at a key says; None if there never was one."""
    try:
        found = store.get(key)
        return Terms(**json.loads(found.data)), found
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(f"{key}: is no lease of this ray_yolo; remove it if nobody trains this run") from None


def store_time(store: Store, prefix: str) -> float:
    """The store's clock, in Unix seconds; what it takes to write there.

    Raises:
        OSError: if that is refused.
    """
    key = f"{prefix}.probe-{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        return store.get(key).modified
    finally:
        store.delete(key)


def check_conditions(store: Store, address: str) -> None:
    """Refuse a store that ignores the conditions of `put_if`: two processes would train one run.

    Raises:
        InputError: if it does.
        OSError: if it cannot be written to.
    """
    key = f".probe-{uuid.uuid4().hex}"
    try:
        first = store.put_if(key, b"1")
        created_twice = store.put_if(key, b"2") is not None
        replaced = first and store.put_if(key, b"3", first)
        replaced_twice = store.put_if(key, b"4", first) is not None
    finally:
        store.delete(key)
    if created_twice or replaced_twice or not replaced:
        header = "If-None-Match" if created_twice else "If-Match"
        raise InputError(f"storage_path: {redact(address)} ignores conditional writes ({header}), without which two "
                         "commands would train the same run; give a bucket of a server that honours them, or a folder")


class Lease:
    """One that this process holds, and renews in a thread until it is given back.

    Args:
        on_loss: called once if another process has it now.
    """

    def __init__(self, store: Store, key: str, terms: Terms, version: Any,
                 on_loss: Callable[[], None] = lambda: None) -> None:
        self._store, self._key, self._terms, self._version, self.on_loss = store, key, terms, version, on_loss
        self._ends, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ray_yolo lease", daemon=True)
        self._thread.start()

    @property
    def attempt(self) -> int:
        """The number of this holder, from 1."""
        return self._terms.attempt

    def give_back(self) -> None:
        """Let others have it; storage that fails lets it expire."""
        self._ends.set()
        self._thread.join()
        try:
            self._store.put_if(self._key, Terms(self.attempt, "", self._terms.owner).to_bytes(), self._version)
        except OSError:
            return

    def renew(self) -> bool:
        """Renew it once. Returns whether it still is this process's."""
        with self._renewing:
            terms = replace(self._terms, renewed=self._terms.renewed + 1)
            version = self._store.put_if(self._key, terms.to_bytes(), self._version)
            if version is None:  # or an answer was lost on its way, and the request repeated
                told = read_terms(self._store, self._key)
                version = told[1].version if told and told[0] == terms else None
            if version is not None:
                self._terms, self._version = terms, version
            return version is not None

    def _run(self) -> None:
        while not self._ends.wait(RENEWS):
            try:
                if not self.renew():
                    self.on_loss()
                    return
            except (OSError, InputError):  # away: its version says later whether somebody has come in between
                continue


def acquire(store: Store, key: str, holder: str, patience: float = 0.0,
            tell_wait: Callable[[str], None] = lambda owner: None) -> Lease | str:
    """The lease at a key, or who holds it.

    Args:
        holder: an id of whom only one can live at a time.
        patience: seconds for which it is watched whether the one who holds it lives.
        tell_wait: called with who that is, before.

    Raises:
        OSError: if storage refuses.
    """
    owner, began = f"{os.uname().nodename} {os.getpid()}", time.monotonic()
    first: tuple[Any, float] | None = None  # the version that was seen, and its age then
    while True:
        told = read_terms(store, key)
        terms, version = (told[0], told[1].version) if told else (Terms(0, "", ""), None)
        if told and terms.holder not in ("", holder):
            if first is None:
                first = version, store_time(store, key.rpartition("/")[0] + "/") - told[1].modified
                if patience and first[1] < EXPIRES:
                    tell_wait(terms.owner)
            waited = time.monotonic() - began
            if first[1] + waited < EXPIRES:
                if version != first[0] or waited >= patience:
                    return terms.owner
                time.sleep(_POLL_SECONDS)
                continue
        mine = Terms(terms.attempt + 1, holder, owner)
        taken = store.put_if(key, mine.to_bytes(), version)
        if taken is None:
            again = read_terms(store, key)
            if not again or again[0] != mine:
                first, began = None, time.monotonic()
                continue
            taken = again[1].version
        return Lease(store, key, mine, taken)
