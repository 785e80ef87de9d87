"""Servers that fail, or that only seem to be what they are taken for."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class BrokenServer:
    """One whose every answer is an error, while this lasts."""

    def __init__(self) -> None:
        requests = self.requests = list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                self.send_error(500, "on fire")

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> BrokenServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class MlflowServer:
    """`mlflow server` in processes of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                   "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--workers", "1",
                   "--artifacts-destination", f"{self.folder}/artifacts"]
        self.process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        pytest.fail("the MLflow server does not come up")


HEAD = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first answer of a gRPC server, such as a Ray head: an HTTP/2 frame of empty settings."""


@contextmanager
def answering(reply: bytes = HEAD) -> Iterator[str]:
    """The address of a server that gives each client one reply, and keeps the connection open."""
    clients: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = server.accept()
                clients.append(client)
                client.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()  # it may have accepted a client that it has not yet listed
            for client in clients:
                client.close()
