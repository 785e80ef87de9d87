"""The ingress of a server without Serve: requests, and a stand-in for its replicas."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

from PIL import Image
from ray.exceptions import RayActorError
from starlette.requests import Request

from ray_yolo.config.commands import ServeConfig
from ray_yolo.runtime import serving


def encoded(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind)
    return file.getvalue()


class Collectives:
    """Those of a stand-in for Serve: a picture that is deadly ends the one that looks at it, and what it has beside."""

    def __init__(self, deadly: bytes = b"none", batch: int = 4) -> None:
        self.deadly, self.batch, self.lost = deadly, batch, 0
        self.together = list[list[bytes]]()
        self.release = asyncio.Event()
        self.release.set()
        self._waiting = list[tuple[bytes, asyncio.Future[dict[str, str]]]]()
        self.detect = self.detect_alone = self

    async def remote(self, content: bytes) -> dict[str, str]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((content, future))
        await asyncio.sleep(0.01)
        await self.release.wait()
        batch, self._waiting = self._waiting[:self.batch], self._waiting[self.batch:]
        if batch:
            self.together.append([one for one, _ in batch])
            dies = any(one.endswith(self.deadly) for one, _ in batch)
            self.lost += dies
            for one, answer in batch:
                if dies:
                    answer.set_exception(RayActorError())
                else:
                    answer.set_result({"found": one.hex()})
        return await future


class Body:
    """A request whose body comes in pieces."""

    def __init__(self, content: bytes, *, declared: bool = True, path: str = "/predict") -> None:
        self.content, self.read = content, 0
        self.scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [
            (b"content-length", str(len(content)).encode())] if declared else []}

    async def receive(self) -> dict[str, Any]:
        piece = self.content[self.read:self.read + 1000]
        self.read += len(piece)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": piece, "more_body": self.read < len(self.content)}

    @property
    def request(self) -> Request:
        return Request(self.scope, self.receive)


def ask_all(bodies: list[Body], replicas: Collectives, **settings: Any) -> list[tuple[int, Any]]:
    async def main() -> list[tuple[int, Any]]:
        door = serving.Ingress(ServeConfig(weights="", **settings), replicas)
        waiting = [asyncio.ensure_future(door(body.request)) for body in bodies]
        await asyncio.sleep(0.2)
        replicas.release.set()
        return [(answer.status_code, json.loads(answer.body)) for answer in await asyncio.gather(*waiting)]

    return asyncio.run(main())
