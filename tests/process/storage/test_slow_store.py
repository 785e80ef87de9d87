"""Downloads over slow, broken and stalled connections."""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from ray_yolo.storage import store as store_module
from ray_yolo.storage.store import ObjectStore, open_store

CONTENT = random.Random(0).randbytes(3_000_000)
PIECE = 1 << 14


class SlowServer:
    """An S3 server with one object, at a rate, whose connections break or stall after some bytes."""

    def __init__(self) -> None:
        self.content, self.rate = CONTENT, 1e9  # bytes/s
        self.breaks_after: int | None = None
        self.stalls_after: int | None = None
        self.ranges = list[int]()  # start offset of each request
        self.ends = Event()
        self.on_request: Callable[[], None] = lambda: None
        handler = type("Handler", (BaseHTTPRequestHandler,), {
            "protocol_version": "HTTP/1.1", "do_GET": lambda request: self.answer(request),
            "log_message": lambda *ignored: None})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.on_request()
        content, tag = self.content, f'"{hashlib.md5(self.content).hexdigest()}"'
        match = re.fullmatch(r"bytes=(\d+)-\d*", request.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        self.ranges.append(start)
        if request.headers.get("If-Match", tag) != tag:
            request.send_response(412)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if match else 200)
        request.send_header("Content-Length", str(len(content) - start))
        if match:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.send_header("ETag", tag)
        request.send_header("Last-Modified", "Mon, 02 Jan 2023 03:04:05 GMT")
        request.end_headers()
        for at in range(start, len(content), PIECE):
            if self.breaks_after is not None and at - start >= self.breaks_after:
                break
            if self.stalls_after is not None and at - start >= self.stalls_after:
                self.ends.wait(60)
                break
            try:
                request.wfile.write(content[at:at + PIECE])
            except OSError:
                break
            time.sleep(PIECE / self.rate)
        request.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowServer]:
    made = SlowServer()
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server.server_port}", "AWS_REGION": "us-east-1",
                        "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests"}.items():
        monkeypatch.setenv(name, value)
    for limit in ("READ_TIMEOUT", "RETRY_TIMEOUT"):
        monkeypatch.setattr(store_module, limit, timedelta(seconds=0.5))
    yield made
    made.ends.set()
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def store(server: SlowServer) -> ObjectStore:
    opened = open_store("s3://bucket")
    assert isinstance(opened, ObjectStore)
    return opened


def test_a_download_may_take_longer_than_every_limit_if_it_makes_progress(
        server: SlowServer, store: ObjectStore, tmp_path: Path) -> None:
    server.rate = 1e6  # 3 s; a request may be silent for 0.5 s, and is repeated for 0.5 s
    fetched = store.fetch("big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == CONTENT
    assert fetched.tag == fetched.md5 == hashlib.md5(CONTENT).hexdigest()
    assert server.ranges == [0]
    server.rate = 1e9
    assert store.get("big").data == CONTENT


def test_a_request_that_makes_progress_may_take_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore itself ends every request after 30 s."""
    options = dict[str, timedelta]()
    monkeypatch.setattr("obstore.store.from_url", lambda address, client_options, **_: options.update(client_options))
    open_store("s3://bucket")
    assert options["timeout"] >= timedelta(days=1)
    assert options["read_timeout"] <= timedelta(minutes=1)


def test_a_connection_that_breaks_is_resumed_where_it_broke(
        server: SlowServer, store: ObjectStore, tmp_path: Path) -> None:
    server.breaks_after, server.rate = 600_000, 1e6
    store.fetch("big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == CONTENT
    assert server.ranges == sorted(server.ranges)
    assert server.ranges[-1] > 2_000_000
    assert len(server.ranges) < 12


def test_a_connection_that_stalls_is_replaced(server: SlowServer, store: ObjectStore, tmp_path: Path) -> None:
    server.stalls_after = 1_000_000
    store.fetch("big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == CONTENT


def test_a_download_without_progress_fails(server: SlowServer, store: ObjectStore, tmp_path: Path) -> None:
    server.stalls_after, start = 0, time.monotonic()
    with pytest.raises(OSError, match="big: the download stopped after 0 of 3000000 bytes"):
        store.fetch("big", tmp_path / "big")
    assert time.monotonic() - start < 20


def test_an_object_that_is_replaced_meanwhile_is_not_mixed_with_the_new_one(
        server: SlowServer, store: ObjectStore, tmp_path: Path) -> None:
    def replace() -> None:
        if server.ranges:
            server.content = CONTENT[::-1]

    server.breaks_after, server.rate, server.on_request = 600_000, 1e6, replace
    with pytest.raises(OSError, match=r"condition|stopped"):
        store.fetch("big", tmp_path / "big")
