"""Servers of the test's own for objects: of S3, and of Azure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from ray_yolo.storage.store import FolderStore, open_store

_REQUESTS = ("get", "fetch", "put", "put_if", "walk", "list", "delete")
_SERVE = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment in which s3://bucket is there, as long as this lasts."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with _served([sys.executable, "-c", _SERVE, port], lambda: urllib.request.Request(f"{url}/bucket", method="PUT")):
        yield {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "tests",
               "AWS_SECRET_ACCESS_KEY": "canary-of-the-tests"}


@contextmanager
def azure_server(folder: Path) -> Iterator[dict[str, str]]:
    """The same of az://bucket, by Microsoft's own emulator: `npm install azurite`, and its programs in the PATH."""
    port, key = _free_port(), base64.b64encode(b"canary-of-the-tests").decode()
    url = f"http://127.0.0.1:{port}/tests"

    def make_bucket() -> urllib.request.Request:
        date = formatdate(usegmt=True)
        signed = "PUT" + 12 * "\n" + (
            f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/tests/tests/bucket\nrestype:container")
        digest = hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256).digest()
        return urllib.request.Request(f"{url}/bucket?restype=container", method="PUT", headers={
            "x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0",
            "Authorization": f"SharedKey tests:{base64.b64encode(digest).decode()}"})

    command = ["azurite-blob", "--location", str(folder), "--blobPort", port, "--skipApiVersionCheck",
               "--disableTelemetry"]
    with _served(command, make_bucket, AZURITE_ACCOUNTS=f"tests:{key}"):
        yield {"AZURE_STORAGE_ACCOUNT_NAME": "tests", "AZURE_STORAGE_ACCOUNT_KEY": key, "AZURE_STORAGE_ENDPOINT": url}


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def _served(command: list[str], make_bucket: Callable[[], urllib.request.Request], **env: str) -> Iterator[None]:
    """A server that has a bucket."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **env})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(make_bucket())
                break
            except OSError:
                assert time.monotonic() < deadline
                assert server.poll() is None
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


class DistantStore(FolderStore):
    """A folder whose requests take as long as a bucket's. It counts them, and how many wait at the same time."""

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        super().__init__(folder)
        self.delay, self._lock = delay, Lock()
        self.requests, self._waiting, self.most_at_once = Counter[str](), 0, 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self._request, name, found) if name in _REQUESTS else found

    def _request(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self.requests[name] += 1
            self._waiting += 1
            self.most_at_once = max(self.most_at_once, self._waiting)
        time.sleep(self.delay)
        with self._lock:
            self._waiting -= 1
        return call(*args, **kwargs)


class Relay:
    """A relay to a server. Each piece of a reply or request waits for `delay` seconds; if infinite, it is closed."""

    def __init__(self, url: str) -> None:
        self._port, self.delay = int(url.rpartition(":")[2]), 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._thread = Thread(target=self._accept, daemon=True)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # ends a waiting accept(), which closing does not
        self._thread.join()
        for each in (self._listening, *self._open):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed, or the server has ended
            while True:
                client, _ = self._listening.accept()
                self._open.append(client)
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open.append(server)
                for ends in ((client, server), (server, client)):
                    Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while self.delay < math.inf and (piece := source.recv(1 << 16)):
                time.sleep(min(self.delay, 60.0))
                target.sendall(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction closes the other one


def upload(folder: Path, address: str) -> None:
    """Store every file of a folder."""
    store = open_store(address)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(folder).as_posix(), path)
