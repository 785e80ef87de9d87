"""HTTP requests to a server, and what is answered that is no detection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from ray_yolo.config.commands import ServeConfig
from ray_yolo.core.errors import ConfigError
from ray_yolo.runtime import serving
from tests.support.messages import Refusal
from tests.support.serving import Body, Collectives, ask_all, encoded


class AnsweredError(Exception):
    """A status and the text of an error, as answered."""


class Stalled(Body):
    """A body that never arrives."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("not reached")


class Routed(Body):
    """A request of another method."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(b"", path=path)
        self.scope["method"] = method


LIMITS = {"max_bytes": 50_000, "max_pixels": 250_000, "max_waiting": 1, "batch_size": 1}
DEADLY = encoded((64, 64)) + b"deadly"
OTHER = "415: the body is none of JPEG, PNG, WEBP, BMP…; send a picture file as it is"
ROUTES = "there are POST /predict and GET /health"

PICTURES: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "400: the body is empty; send a picture file as it is"),
    ("PostScript", b"%!PS-Adobe-3.0 EPSF-3.0", OTHER), ("GIF", encoded((8, 8), "GIF"), OTHER),
    ("too many bytes", bytes(50_001), "413: the file has more than 50,000 bytes"),
    ("too many pixels", encoded((600, 600)), "413: the picture has more than 250,000 pixels"),
    ("a deadly picture", DEADLY, "422: the picture has ended two replicas"),
]
"""Bodies of POST /predict."""

READ: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "is empty (0 bytes)"),
    ("three bytes", b"\xff\xd8\xff", "is not an image that can be read (UnidentifiedImageError)"),
    ("a thin picture", encoded((8, 8)), "has 8 x 8 pixels; both sides must have 10 or more"),
    ("half a picture", encoded((64, 64), "JPEG")[:-100], "is damaged or cut off (Truncated File Read)"),
]
"""Pictures that a replica cannot read."""


def _ask(*bodies: Body, **settings: Any) -> None:
    """Raise the last answer."""
    status, answer = ask_all(list(bodies), Collectives(DEADLY[-6:]), **{**LIMITS, **settings})[-1]
    raise AnsweredError(f"{status}: {answer['error']}")


def _ask_slowly() -> None:
    with mock.patch.object(serving, "READ_SECONDS", 0.1):
        _ask(Stalled(encoded((64, 64))))


def _ask_in_turn(*bodies: Body, is_draining: bool = False) -> None:
    async def main() -> None:
        door = serving.Ingress(ServeConfig(weights=""), Collectives(DEADLY[-6:]))
        door._is_draining = is_draining
        for body in bodies:
            answer = await door(body.request)
        raise AnsweredError(f"{answer.status_code}: {json.loads(answer.body)['error']}")

    asyncio.run(main())


def _read(content: bytes) -> None:
    """What a replica says about a picture whose header is in order."""
    raise AnsweredError(serving.read_picture(content))


def _refusals() -> Iterator[Refusal]:
    def case(name: str, message: str, cause: Callable[[], object]) -> Refusal:
        return Refusal(name, message, cause, AnsweredError)

    for name, content, message in PICTURES:
        yield case(name, message, partial(_ask, Body(content)))
    yield case("GET /predict", "405: use POST /predict, GET /health", partial(_ask, Routed("GET", "/predict")))
    yield case("POST /health", "405: use POST /predict, GET /health", partial(_ask, Routed("POST", "/health")))
    yield case("another path", f"404: {ROUTES}", partial(_ask, Routed("GET", "/nothing")))
    yield case("a body that does not arrive", "408: the body has not arrived within 0.1 s", _ask_slowly)
    yield case("a deadly picture again", "422: the picture has crashed two replicas before",
               partial(_ask_in_turn, Body(DEADLY), Body(DEADLY)))
    yield case("a server that stops", "503: this server is about to stop",
               partial(_ask_in_turn, Body(encoded((64, 64))), is_draining=True))
    for name, content, message in READ:
        yield case(f"read: {name}", message, partial(_read, content))
    yield case("more than may wait", "503: too many pictures wait already",
               partial(_ask, *(Body(encoded((64, 64))) for _ in range(4))))
    yield Refusal("settings of the application", "ray_yolo.serve: iou: Input should be less than or equal to 1; "
                  "weights: Field required (settings: …)", lambda: serving.app({"iou": 2}), ConfigError)


REFUSALS = list(_refusals())
