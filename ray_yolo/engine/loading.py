"""Loader processes: how their batches reach the training, and what their failures say.

A loader process passes each batch through shared memory. By default torch moves a batch there in a thread of its queue,
which prints an error and drops the batch: the training would wait for it for ever. Here the loader moves the batch
itself, and passes on a failure in the place of the batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ray_yolo.config.model_facts import GRID
from ray_yolo.config.recipe import Recipe, resolved_batch
from ray_yolo.core.errors import LoaderError, RayYoloError
from ray_yolo.core.formatting import format_size
from ray_yolo.data.image_cache import SHARED_MEMORY, room_in_shared_memory
from ray_yolo.ops.torch_internals import exit_codes

PREFETCH = 2  # batches that a loader process has ready
_END_SECONDS = 1.0  # after a failed connection to a loader process, in which its end is known
ENLARGE = "increase it (`--shm-size` of a container, in Kubernetes an emptyDir of medium Memory)"


class LoaderMemory(NamedTuple):
    """Shared memory that a worker needs, bytes."""

    per_loader: int  # the batches that a loader process has ready
    in_use: int  # the batches that the worker computes with


def loader_memory(recipe: Recipe, num_train: int, num_val: int, grid: int = GRID) -> LoaderMemory:
    """The shared memory of a training's loaders. While a worker validates, its training loaders fill their queues."""
    _, microbatch = resolved_batch(recipe)
    # The product is the same with `quad`, whose images are fewer and larger.
    pixels = min(microbatch, num_train) * recipe.imgsz ** 2
    return _memory_of(3 * pixels + val_batch_bytes(recipe.imgsz, recipe.evaluate.batch_size, num_val, grid))


def val_memory(imgsz: int, batch_size: int, num_images: int, grid: int) -> LoaderMemory:
    """The shared memory of a validation's loaders."""
    return _memory_of(val_batch_bytes(imgsz, batch_size, num_images, grid))


def val_batch_bytes(imgsz: int, batch_size: int, num_images: int, grid: int) -> int:
    """The largest batch of a validation; shapes are padded by up to a cell of the grid."""
    return min(batch_size, num_images) * (imgsz + grid) ** 2 * 3


def _memory_of(batch: int) -> LoaderMemory:
    return LoaderMemory(PREFETCH * batch, 2 * batch)


class _Failure(NamedTuple):
    """What a loader process passes on in the place of a batch."""

    error: RayYoloError


class LoadedDataset(Dataset[Any]):
    """A data set whose batches and failures reach the training process."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data: Any = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: Any) -> Any:
        return _pass_on(self.data.__getitem__, number)

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        return _pass_on(self.data.__getitems__, keys)


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
