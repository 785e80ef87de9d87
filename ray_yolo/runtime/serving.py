"""Trained weights behind HTTP: the Ray Serve application `ray_yolo.serve:app`.

    serve run ray_yolo.serve:app weights=runs/train/exp/weights/best.pt
    curl --data-binary @picture.jpg http://127.0.0.1:8000/predict

`Ingress` reads requests and refuses bodies that are too large or not a picture. `Model` replicas detect objects in
batches of images. `Ingress` keeps a request until it is answered. If its replica is lost, another replica processes the
request alone, and the client does not notice. A picture that crashes a second replica is refused from then on.

On a signal, the command first takes itself out of service: /health and new requests get 503, accepted requests are
answered, and then the application ends.

Settings are those of `ServeConfig`, as arguments or in the environment (RAY_YOLO_WEIGHTS, RAY_YOLO_IOU, ...).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import ray
import torch
from PIL import Image
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ray_yolo.checkpoints.weights_file import local_file
from ray_yolo.config.commands import ServeConfig
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import ConfigError, InputError
from ray_yolo.core.threads import run_in_thread
from ray_yolo.data.images import FORMATS as READ_FORMATS
from ray_yolo.data.images import UnreadableImageError, check_image, read_image
from ray_yolo.data.pixels import OWN_RANGE, PixelRange
from ray_yolo.engine.devices import local_device
from ray_yolo.inference.predictor import (
    build_predictor,
    check_classes,
    input_size,
    load_trained,
    warn_of_classes,
    warn_of_iou,
)
from ray_yolo.runtime.cluster import connect, is_shared, wait_for_room

# A GIF may have many pictures, and the reply has the detections of one.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", *(name for name in ("TIFF", "AVIF", "JPEG2000") if name in READ_FORMATS))
NAME = "ray_yolo"  # the application has a name of its own: "default" may be another one
VARIABLE = "RAY_YOLO_"
MOST_HELD = 1 << 30  # bytes of request bodies in memory at once
READ_SECONDS = 60.0  # a client may take this long to send its picture
DRAIN_SECONDS = 16.0  # accepted requests are answered for this long after a signal; a scheduler kills after 30 s
NOTICE_SECONDS = 2.0  # meanwhile the last responses leave, and a load balancer sees that /health has changed
REFUSAL_SECONDS = 4.0  # more, if requests that nothing has answered must be refused: there may be hundreds

_logger = logging.getLogger("ray.serve")


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application with these settings. The others come from the environment or from the defaults of `ServeConfig`.

    Raises:
        ConfigError: for invalid settings, by name.
    """
    known = ServeConfig.model_fields
    from_environment = {name: os.environ[VARIABLE + name.upper()] for name in known
                        if VARIABLE + name.upper() in os.environ}
    try:
        config = ServeConfig.model_validate(from_environment | dict(args))
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"ray_yolo.serve: {reasons} (settings: {', '.join(known)})") from None
    return application(config)


def application(config: ServeConfig) -> serve.Application:
    """The application with these settings."""
    # Applied here: a decorated class would be pickled by value, with everything that it refers to.
    # A group for each replica, as for workers: elastic trainings on a full cluster see that it waits.
    place = {"CPU": float(config.cpus_per_replica)}
    if config.gpus_per_replica:
        place["GPU"] = config.gpus_per_replica
    model = serve.deployment(
        num_replicas=config.num_replicas, max_ongoing_requests=2 * config.batch_size, max_constructor_retry_count=2,
        max_queued_requests=config.max_waiting, placement_group_bundles=[place],
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.gpus_per_replica})(Model)
    ingress = serve.deployment(max_ongoing_requests=max(1000, 2 * config.max_waiting),
                               ray_actor_options={"num_cpus": 0})(Ingress)
    return ingress.bind(config, model.bind(config))


def run(config: ServeConfig) -> None:
    """Serve until the command is stopped, on the cluster of RAY_ADDRESS or on a new local one.

    Raises:
        InputError: for weights or settings that cannot be used, before Ray starts.
        ResourcesError: if there is no cluster at RAY_ADDRESS, it denies access, or it can never hold the replicas.
    """
    config = check(config)
    replicas = Placement(num_workers=config.num_replicas, cpus_per_worker=config.cpus_per_replica,
                         gpus_per_worker=config.gpus_per_replica)
    wait_for_room(replicas, connect(replicas, logs=True), partial(print, file=sys.stderr), "replica")
    other = serve.status().applications.get(NAME)
    if other and other.status != ApplicationStatus.DELETING:
        raise InputError(f"this cluster has a server {NAME} already, which this one would replace; end its command "
                         f"first, or call ray.serve.delete({NAME!r})")

    def start() -> None:
        serve.start(http_options={"host": config.host, "port": config.port})
        serve.run(application(config), name=NAME)

    try:
        # In a thread: requests are accepted before this returns, and a signal must not end the process inside Ray.
        run_in_thread(start, "serve").result()
        shown = "127.0.0.1" if config.host == "0.0.0.0" else config.host
        print(f"POST picture files to http://{shown}:{config.port}/predict; Ctrl-C ends the server", flush=True)
        threading.Event().wait()
    except (KeyboardInterrupt, SystemExit):
        _drain()
        raise
    finally:
        if is_shared():
            serve.delete(NAME)
        else:
            ray.shutdown()  # at once: while an application is deleted, Serve answers 404, which no client tries again


def check(config: ServeConfig) -> ServeConfig:
    """The configuration with the weights' image size. Starts nothing.

    Raises:
        InputError: for weights, classes or an image size that cannot be used.
    """
    trained = load_trained(local_file(config.weights))
    check_classes(config.classes, trained.names)
    warn_of_classes(trained, config.classes)
    return config.model_copy(update={"imgsz": input_size(trained, config.imgsz)})


def _drain() -> None:
    """Refuse new requests, and wait until the accepted ones are answered, for at most `DRAIN_SECONDS`.

    A server that still starts accepts requests as soon as its ingress runs; before, there are none.
    """
    limit = DRAIN_SECONDS + NOTICE_SECONDS + REFUSAL_SECONDS + 1
    try:
        shown = serve.status().applications.get(NAME)
        deployment = shown and shown.deployments.get(Ingress.__name__)
        if not deployment or not deployment.replica_states.get("RUNNING"):
            return
        print("stopping: accepted requests are answered first (a second signal stops at once)", flush=True)
        left = serve.get_app_handle(NAME).drain.remote(DRAIN_SECONDS).result(timeout_s=limit)
    except (RayError, RayServeException, TimeoutError) as error:
        print(f"warning: accepted requests may be lost: {type(error).__name__}: {error}", file=sys.stderr)
        return
    if left:
        print(f"warning: {left} accepted requests were not answered within {DRAIN_SECONDS:g} s", file=sys.stderr)


class Model:
    """A replica with loaded weights."""

    def __init__(self, config: ServeConfig) -> None:
        torch.set_num_threads(config.cpus_per_replica)
        trained = load_trained(local_file(config.weights))
        check_classes(config.classes, trained.names)
        warn_of_iou(trained, config)
        self._predictor = build_predictor(trained, config, local_device(config.gpus_per_replica))
        self._broken = ""
        self.detect.set_max_batch_size(config.batch_size)
        self.detect.set_batch_wait_timeout_s(config.batch_wait_ms / 1e3)
        _logger.info("%s is ready on %s", config.weights, self._predictor.device)

    async def detect_alone(self, content: bytes) -> dict[str, Any] | str:
        """`detect_batch` of one suspect picture, in a batch of its own."""
        return (await asyncio.to_thread(self.detect_batch, [content]))[0]

    @serve.batch
    async def detect(self, files: list[bytes]) -> list[dict[str, Any] | str]:
        """`detect_batch` of the pictures of several requests."""
        return await asyncio.to_thread(self.detect_batch, files)

    def detect_batch(self, files: Sequence[bytes]) -> list[dict[str, Any] | str]:
        """The detections of each picture, or why it cannot be read."""
        try:
            answers = [read_picture(content, self._predictor.pixel_range) for content in files]
            pictures = [one for one in answers if not isinstance(one, str)]
            results = iter(self._predictor.detect(pictures) if pictures else ())
        except Exception as error:  # of the device or the model: the next request would fail, too
            self._broken = f"{type(error).__name__}: {error}"
            raise
        replies: list[dict[str, Any] | str] = []
        for answer in answers:
            if isinstance(answer, str):
                replies.append(answer)
            else:
                detections = next(results).detections.tolist()
                replies.append(self._answer(answer.shape, detections))
        return replies

    def check_health(self) -> None:
        """Called by Serve every few seconds: a replica that has failed once is replaced."""
        if self._broken:
            raise RuntimeError(self._broken)

    def _answer(self, shape: Sequence[int], rows: Sequence[Sequence[float]]) -> dict[str, Any]:
        return {"height": shape[0], "width": shape[1], "detections": [
            {"box": row[:4], "confidence": row[4], "class": int(row[5]), "name": self._predictor.names[int(row[5])]}
            for row in rows]}


class Ingress:
    """HTTP: POST /predict with a picture file as the body, GET /health."""

    def __init__(self, config: ServeConfig, model: DeploymentHandle) -> None:
        self._config, self._model = config, model
        at_replicas = 2 * self._config.batch_size * self._config.num_replicas
        self._most_requests = self._config.max_waiting + at_replicas
        self._most_bytes = max(MOST_HELD, self._config.max_bytes)
        self._requests = self._bytes = 0  # being read or waiting for a replica
        self._is_draining = False
        self._gives_up = asyncio.Event()  # the time to answer accepted requests is over
        self._suspects = asyncio.Lock()
        self._deadly: deque[bytes] = deque(maxlen=1000)  # digests of pictures that have crashed two replicas

    async def __call__(self, request: Request) -> Response:
        """The response to a request; errors are JSON with `error`: 4xx for a bad request, 503 if it may be retried."""
        try:
            match request.method, request.url.path.rstrip("/").rpartition("/")[2]:
                case "GET", "health":
                    self._refuse_if_draining()
                    return JSONResponse({"status": "ok"})
                case "POST", "predict":
                    return JSONResponse(await self._predict(request))
                case _, "health" | "predict":
                    raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, "use POST /predict, GET /health")
            raise HTTPException(HTTPStatus.NOT_FOUND, "there are POST /predict and GET /health")
        except HTTPException as refused:
            again = {"Retry-After": "1"} if refused.status_code == HTTPStatus.SERVICE_UNAVAILABLE else {}
            return JSONResponse({"error": refused.detail}, refused.status_code, again)

    async def drain(self, limit_seconds: float) -> int:
        """Refuse requests from now on, and wait until the accepted ones are answered. Returns how many are not, after
        the limit."""
        self._is_draining = True
        end = time.monotonic() + limit_seconds
        while self._requests and time.monotonic() < end:
            await asyncio.sleep(0.05)
        unanswered = self._requests
        self._gives_up.set()
        await asyncio.sleep(NOTICE_SECONDS + (REFUSAL_SECONDS if unanswered else 0.0))
        return unanswered

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "this server is about to stop")

    async def _predict(self, request: Request) -> dict[str, Any]:
        """The detections of a request's picture. The body is read only if there is room for it."""
        self._refuse_if_draining()
        size = int(request.headers.get("content-length", self._config.max_bytes))
        self._check_size(size)
        if self._requests >= self._most_requests or self._bytes + size > self._most_bytes:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "too many pictures wait already")
        self._requests, self._bytes = self._requests + 1, self._bytes + size
        try:
            return await self._unless_given_up(self._read_and_ask(request))
        finally:
            self._requests, self._bytes = self._requests - 1, self._bytes - size

    async def _read_and_ask(self, request: Request) -> dict[str, Any]:
        return await self._ask(await self._read(request))

    async def _unless_given_up(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """The answer, or a refusal that clients may try again if the server stops before it is there."""
        asked = asyncio.ensure_future(answer)
        given_up = asyncio.ensure_future(self._gives_up.wait())
        try:
            await asyncio.wait((asked, given_up), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:  # also if the client has gone
            asked.cancel()
            given_up.cancel()
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "this server is about to stop")

    def _check_size(self, size: int) -> None:
        if size > self._config.max_bytes:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                                f"the file has more than {self._config.max_bytes:,} bytes")

    async def _read(self, request: Request) -> bytes:
        """The body; reading stops at the limits of size and time."""
        content = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for part in request.stream():
                    content += part
                    self._check_size(len(content))
        except TimeoutError:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT,
                                f"the body has not arrived within {READ_SECONDS:g} s") from None
        check_header(content, self._config.max_pixels)
        return bytes(content)

    async def _ask(self, content: bytes) -> dict[str, Any]:
        """A replica's detections.

        If a replica is lost, one picture of its batch may be the cause. Each picture is therefore retried alone, one
        after the other. The cause crashes one more replica; the other requests are answered.
        """
        if self._deadly and hashlib.sha256(content).digest() in self._deadly:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the picture has crashed two replicas before")
        try:
            try:
                reply = await self._model.detect.remote(content)
            except RayActorError:
                async with self._suspects:
                    reply = await self._model.detect_alone.remote(content)
        except RayActorError:
            self._deadly.append(hashlib.sha256(content).digest())
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "the picture has ended two replicas") from None
        except BackPressureError:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "too many pictures wait already") from None
        except (DeploymentUnavailableError, RequestCancelledError):  # Serve is about to end the application
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "this server is about to stop") from None
        if isinstance(reply, str):
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"the picture {reply}")
        return reply


def check_header(content: bytes | bytearray, max_pixels: int) -> None:
    """Raise an HTTPException for a body that is not a picture, or is too large, before anything is decoded."""
    if not content:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is empty; send a picture file as it is")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
    except Image.DecompressionBombError:
        width = height = 1 << 16
    except Exception:  # Pillow's plugins raise many kinds for bad input
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                            f"the body is none of {', '.join(FORMATS)}; send a picture file as it is") from None
    if width * height > max_pixels:
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the picture has more than {max_pixels:,} pixels")


def read_picture(content: bytes, pixel_range: PixelRange = OWN_RANGE) -> Any:
    """The pixels of a picture file, checked and decoded as in `predict`; or a text with the reason of a failure."""
    try:
        check_image(content)
        return read_image(content, pixel_range=pixel_range)
    except UnreadableImageError as error:
        return str(error)
