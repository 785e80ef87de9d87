"""An S3 server of the test's own, and storage that fails when it is told to."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_yolo.storage.store import open_store

_SERVE = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment in which s3://bucket is there, as long as this lasts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([sys.executable, "-c", _SERVE, url.rpartition(":")[2]],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
                break
            except OSError:
                assert time.monotonic() < deadline
                assert server.poll() is None
                time.sleep(0.1)
        yield {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "tests",
               "AWS_SECRET_ACCESS_KEY": "canary-of-the-tests"}
    finally:
        server.terminate()
        server.wait()


def upload(folder: Path, address: str) -> None:
    """Store every file of a folder."""
    store = open_store(address)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path.relative_to(folder).as_posix(), path)
