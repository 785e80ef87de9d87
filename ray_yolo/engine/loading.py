"""Loader processes: how their batches reach the training, and what their failures say.

A loader process of the training loads a part of a microbatch at once, a few images. So all processes work on the first
microbatch, and few images wait in memory. The parts become one batch on the device (`microbatches`).

A loader process passes each batch through shared memory. By default torch moves a batch there in a thread of its queue,
which prints an error and drops the batch: the training would wait for it for ever. Here the loader moves the batch
itself, and passes on a failure in the place of the batch.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ray_yolo.config.effects import renders_all
from ray_yolo.config.model_facts import GRID
from ray_yolo.config.recipe import QUAD, Recipe, resolved_batch
from ray_yolo.core.errors import LoaderError, RayYoloError
from ray_yolo.core.formatting import format_size
from ray_yolo.data.image_cache import SHARED_MEMORY, room_in_shared_memory
from ray_yolo.engine.devices import copy_images, empty_images
from ray_yolo.ops.torch_internals import exit_codes

PREFETCH = 2  # batches, or parts of microbatches, that a loader process has ready at least
AHEAD = 2  # microbatches that all loader processes have ready at least
FEWEST, MOST = 4, 8  # images of a part
_VIEW_BYTES = 16384  # of a sample without pixels: its view, its colours, and some 600 labels
LARGEST_GRID = 2 * GRID  # of any model; that of a YAML model is known only after it is built
_END_SECONDS = 1.0  # the end of a loader process is known this long after a failed connection to it
ENLARGE = "increase it (`--shm-size` of a container, in Kubernetes an emptyDir of medium Memory)"


class LoaderMemory(NamedTuple):
    """Shared memory that a worker needs, bytes."""

    per_loader: int  # what a loader process has ready
    in_use: int  # what all have ready besides, and the batches that the worker computes with


def loader_memory(recipe: Recipe, num_train: int, num_val: int, *, gpu: bool) -> LoaderMemory:
    """The shared memory of a training's loaders. While a worker validates, its training loaders fill their queues.

    Args:
        gpu: whether the worker has one, which may render the samples.
    """
    _, microbatch = resolved_batch(recipe)
    # The product is the same with `quad`, whose images are fewer and larger.
    sample = _VIEW_BYTES if gpu and renders_all(recipe) else 3 * recipe.imgsz ** 2
    images = min(microbatch, num_train)
    part = min(images, _largest_part(recipe))
    val_batch = val_batch_bytes(recipe.imgsz, recipe.evaluate.batch_size, num_val, LARGEST_GRID)
    in_use = (AHEAD + 2) * images
    return LoaderMemory(PREFETCH * (part * sample + val_batch), in_use * sample + 2 * val_batch)


def val_memory(imgsz: int, batch_size: int, num_images: int, grid: int) -> LoaderMemory:
    """The shared memory of a validation's loaders."""
    batch = val_batch_bytes(imgsz, batch_size, num_images, grid)
    return LoaderMemory(PREFETCH * batch, 2 * batch)


def val_batch_bytes(imgsz: int, batch_size: int, num_images: int, grid: int) -> int:
    """The largest batch of a validation; shapes are padded by up to a cell of the grid."""
    return min(batch_size, num_images) * (imgsz + grid) ** 2 * 3


def part_images(recipe: Recipe, images: int, processes: int) -> int:
    """The images that a loader process loads at once, of a worker's `images` of a microbatch.

    Without processes all of them. Samples that share the images of a block stay together, and those that `quad` merges.
    """
    if not processes:
        return images
    wanted = min(max(math.ceil(images / processes), FEWEST), _largest_part(recipe))
    wanted = max(wanted, recipe.augment.partners)
    return math.ceil(wanted / QUAD) * QUAD if recipe.quad else wanted


def _largest_part(recipe: Recipe) -> int:
    return max(MOST, recipe.augment.partners)


def prefetched_parts(images: int, part: int, processes: int) -> int:
    """The parts that each loader process has ready."""
    return max(PREFETCH, math.ceil(AHEAD * images / (part * processes)))


class _Failure(NamedTuple):
    """What a loader process passes on in the place of a batch."""

    error: RayYoloError


class LoadedDataset(Dataset[Any]):
    """What loads batches by their keys, as a data set whose batches and failures reach the training process."""

    def __init__(self, load: Callable[[Any], Mapping[str, Tensor]]) -> None:
        self.load = load

    def __getitem__(self, key: Any) -> Any:
        return _pass_on(self.load, key)


def _pass_on(load: Callable[[Any], Mapping[str, Tensor]], key: Any) -> Mapping[str, Tensor] | _Failure:
    """The batch of a key; in a loader process in shared memory, or the failure."""
    if get_worker_info() is None:  # this is the training process
        return load(key)
    try:
        batch = load(key)
    except RayYoloError as error:
        return _Failure(error)
    try:
        for tensor in batch.values():
            if tensor.numel():  # an empty tensor needs no memory
                tensor.share_memory_()
    except (RuntimeError, OSError) as error:
        reason, *_ = str(error).splitlines() or [""]
        size = format_size(sum(tensor.nbytes for tensor in batch.values()))
        return _Failure(LoaderError(
            f"a loader process cannot pass on a batch of {size} through {SHARED_MEMORY}, which has "
            f"{format_size(room_in_shared_memory())} free ({reason}); {ENLARGE}, or use fewer loaders (--workers 0)"))
    return batch


class Loader:
    """The batches of a torch loader, whose failures are errors that state what to do."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        """The batches. Loader processes begin at once.

        Raises, while iterating:
            LoaderError: if a loader process has ended, or cannot pass on its batch.
            DatasetError: if too many images cannot be read any more.
        """
        # torch's handler raises the error of an ended loader anywhere in the main thread, instead of in `next`.
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD) if is_main else None
        batches = iter(self.loader)
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        return _checked(batches)


def _checked(batches: Iterator[Any]) -> Iterator[Mapping[str, Tensor]]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:  # the latter two where it sent a batch as it ended
            codes = exit_codes(batches, _END_SECONDS)
            if not codes:
                raise
            raise LoaderError(_reason_of_end(codes[0])) from error
        if isinstance(batch, _Failure):
            raise batch.error
        yield batch


class MicrobatchLoader:
    """The microbatches whose parts a loader yields."""

    def __init__(self, parts: Loader, device: torch.device) -> None:
        self.parts, self._device = parts, device

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        """The microbatches. Loader processes begin at once. Raises as a loader does."""
        return microbatches(iter(self.parts), self._device)


def microbatches(parts: Iterator[Mapping[str, Tensor]], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """The microbatches of parts in order. The images of several parts are on the device: each part is copied to its
    place in the microbatch as soon as it is there. The other tensors, such as views, are on the host.
    """
    for part in parts:
        own = dict(part)
        _, size = own.pop("place").tolist()
        if len(_shown(own)) == size:
            yield own
            continue
        images = empty_images(device, size, own["images"]) if "images" in own else None
        taken: dict[str, list[Tensor]] = {name: [] for name in own}
        while True:
            first, _ = part["place"].tolist()
            end = first + len(_shown(part))
            if images is not None:
                copy_images(part["images"], images[first:end])
            for name, tensors in taken.items():
                tensors.append(part[name])
            if end == size:
                break
            part = next(parts)
        others = {name: _joined(tensors) for name, tensors in taken.items() if name != "images"}
        yield others if images is None else {"images": images, **others}


def _shown(batch: Mapping[str, Tensor]) -> Tensor:
    """What a batch shows, an entry for each sample: images, or views."""
    return batch["views"] if "views" in batch else batch["images"]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all tensors; in pinned memory as they are, so that a copy to a GPU does not block."""
    rows = sum(len(tensor) for tensor in tensors)
    joined = torch.empty((rows, *tensors[0].shape[1:]), dtype=tensors[0].dtype, pin_memory=tensors[0].is_pinned())
    return torch.cat(list(tensors), out=joined)


def _reason_of_end(code: int) -> str:
    """Why a loader process has ended, from its exit code (-n: by signal n)."""
    if code == -signal.SIGKILL:
        return ("a loader process was killed (SIGKILL), as by the system if memory is exhausted; use fewer loaders "
                "(--workers) or give the training more memory, and run the same command again")
    if code == -signal.SIGBUS:
        return (f"a loader process found no memory in {SHARED_MEMORY}, which has "
                f"{format_size(room_in_shared_memory())} free (SIGBUS); {ENLARGE}, or use fewer loaders (--workers 0)")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"a loader process has ended ({how}); run the same command again, or load without processes (--workers 0)"
