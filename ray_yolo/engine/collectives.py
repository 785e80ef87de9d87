"""The replicas of a model and what they say to each other; only this file and gradients.py know torch.distributed.

Whoever holds a `Replicas` speaks of workers as plain integers; with one worker nothing here communicates.
Every method marked collective must be called by all workers in the same order.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import io
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.core.errors import PeerLostError
from ray_yolo.ops.torch_internals import import_compiler

BACKENDS = "cpu:gloo,cuda:nccl"  # of a group of GPUs: what the host waits for anyhow goes by gloo, which has errors

LOOPBACK = "127.0.0.1"  # where no other host comes

_MEETING_SECONDS = 30.0  # in which all who are alive have come to a group that is formed, and then are connected
_ABORT_SECONDS = 30.0  # for NCCL to give up what is under way
_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


@dataclass
class _Group:
    """What this process has to know of its process group to cut it."""

    connections: frozenset[str] = frozenset()  # as /proc names them
    nccl: dist.ProcessGroup | None = None  # the group, if its devices talk by NCCL
    cut: Tensor | None = None  # () 1.0 once it was cut; pinned, so that a device reads it when it comes there


_group = _Group()  # the one that was formed last
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # its name in older torch


class _GlobalSum(torch.autograd.Function):
    """y = sum over workers of x. Each worker's loss depends on every x, so the gradient is summed as well."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


@dataclass(frozen=True)
class Collectives:
    """This worker's number and how many there are."""

    worker: int = 0
    num_workers: int = 1

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over the workers, differentiable. Collective."""
        return x if self.num_workers == 1 else _GlobalSum.apply(x)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in worker order, (sum of counts, d), on their device. Collective.

        Args:
            rows: (counts[worker], d); `counts` is known to everyone, so no sizes travel.
        """
        if self.num_workers == 1:
            return rows
        most = max(counts)
        padded = rows.new_zeros(most, rows.shape[1])
        padded[: len(rows)] = rows
        found = rows.new_empty(len(counts) * most, rows.shape[1])
        dist.all_gather_into_tensor(found, padded)
        return torch.cat([part[:count] for part, count in zip(found.split(most), counts, strict=True)])

    def gather_step(self, row: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """One row of each worker for a step, (workers, d), and whether all are of this step, () bool. Collective.

        NCCL reports no abort: its kernels end and leave anything, such as zeros, another step's row or half of this
        one. So each number travels twice, as its bits b and as b XOR k; the two match only if both are of the step.
        k is ~step, which no two steps share and which is not 0, so that a repeated value is no match.

        Args:
            row: (d,) float32.
        """
        if self.num_workers == 1:
            return row[None], torch.ones((), dtype=torch.bool, device=row.device)
        bits = row.view(torch.int32)
        sent = torch.stack([bits, bits ^ ~step])
        received = sent.new_zeros(self.num_workers * 2, len(row))
        dist.all_gather_into_tensor(received, sent)
        values, sealed = received.view(self.num_workers, 2, -1).unbind(1)
        return values.contiguous().view(torch.float32), (values ^ sealed).eq(~step).all()

    def gather(self, rows: Tensor) -> Tensor:
        """All workers' rows in worker order, on the host, when nobody knows how many the others have. Collective."""
        rows = rows.cpu()
        if self.num_workers == 1:
            return rows
        counts = self.gather_rows(torch.tensor([[len(rows)]]), [1] * self.num_workers).flatten().tolist()
        return self.gather_rows(rows, counts) if max(counts) else rows

    def share(self, state: dict[str, Any] | None, source: int) -> dict[str, Any]:
        """The state that worker `source` gives: plain containers of tensors and text. Collective."""
        if self.num_workers == 1:
            assert state is not None
            return state
        buffer = io.BytesIO()
        if self.worker == source:
            torch.save(state, buffer)
        length = torch.tensor([buffer.tell()])
        dist.broadcast(length, source)
        data = torch.frombuffer(bytearray(buffer.getvalue() or int(length)), dtype=torch.uint8)
        dist.broadcast(data, source)
        received: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        return received

    def num_parts(self, spread: bool) -> int:
        """Into how many parts a microbatch falls: one for each worker where it is spread over them."""
        return self.num_workers if spread else 1

    def was_cut(self, device: torch.device) -> Tensor:
        """() 1.0 if this worker's group was cut before the device came here, else 0.0.

        Then an exchange before this one may have been aborted; otherwise each has ended by itself, as nothing else
        ends a kernel of NCCL early.
        """
        if self.num_workers == 1 or _group.cut is None:
            return torch.zeros((), device=device)
        return _group.cut.to(device, non_blocking=True, copy=True)


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Context of collectives; one that fails because a peer is gone, or does not answer, is a `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        words = ("gloo", "pair closure", "NCCL")
        if isinstance(error, dist.DistError) or any(word in str(error) for word in words):
            raise PeerLostError(str(error).splitlines()[0]) from error
        raise


def serve_rendezvous_store(host: str) -> dist.TCPStore:
    """A place where others may meet this worker. It listens at a free port of `host`, its own address, alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    return dist.TCPStore(host, listening.getsockname()[1], is_master=True, wait_for_workers=False,
                         timeout=timedelta(seconds=_MEETING_SECONDS), master_listen_fd=listening.detach())


def use_interface(address: str) -> None:
    """Have gloo talk over the network interface that has this worker's IPv4 address, unless the user has chosen one.

    gloo would take the address that the host's name stands for: on Debian and Ubuntu 127.0.1.1, where no other host is.
    NCCL chooses well by itself; where all workers are on this host, it listens on the loopback interface alone as well.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    if address == LOOPBACK:
                        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def form_process_group(
    own: dist.TCPStore,
    address: tuple[str, int],
    worker: int,
    num_workers: int,
    timeout_seconds: float,
    device: torch.device,
) -> Collectives:
    """The process group of those who meet in the store of worker 0, at `address`, with one device each. Collective.

    Args:
        own: this worker's store; its host is the address at which the others reach this worker.
        timeout_seconds: of a collective operation; to meet and to connect take `_MEETING_SECONDS` each at most.

    Raises:
        PeerLostError: if they do not all come, or one is lost before all are connected.
    """
    global _group
    _group = _Group()
    if num_workers == 1:
        return Collectives()
    gpus = device.type == "cuda"
    if gpus:  # or NCCL's own watchdog ends the process when a peer is lost; who is lost is the roster's to say
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # or who makes a communicator waits without end, deaf to aborts, for a peer that is lost while it is made
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{_MEETING_SECONDS:.0f}")
    use_interface(own.host)
    with collective_errors():
        meeting = timedelta(seconds=_MEETING_SECONDS)
        store = own if worker == 0 else dist.TCPStore(*address, is_master=False, timeout=meeting)
        if store.add("come", 1) == num_workers:
            store.set("all", "")
        store.wait(["all"], meeting)
        before = _sockets().keys()
        dist.init_process_group(BACKENDS if gpus else "gloo", store=dist.PrefixStore("group", store), rank=worker,
                                world_size=num_workers, timeout=meeting, device_id=device if gpus else None)
        _set_timeout(timedelta(seconds=timeout_seconds))
        _group = _Group(frozenset(_sockets().keys() - before), dist.group.WORLD if gpus else None,
                        torch.zeros((), pin_memory=gpus))
    return Collectives(worker, num_workers)


def abort_process_group() -> None:
    """Have what another thread of this worker waits for in its group fail at once, and tell the others in it.

    gloo's abort and shutdown end nothing that is under way, and a wire that is cut closes no connection. NCCL has no
    errors that anybody would wait for: its kernels end, and leave what they had not received as it was.
    """
    if _group.cut is not None:
        _group.cut.fill_(1.0)  # before kernels are ended
    _abort_nccl()
    for name, number in _sockets().items():
        if name in _group.connections:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # not of what listens: gloo ends the process if that is taken away
                connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    """Have NCCL's kernels and connections end. Where they do not, this process does, and is replaced."""
    if _group.nccl is None:
        return
    aborting = threading.Thread(target=_group.nccl.abort, name="ray_yolo abort", daemon=True)
    aborting.start()
    aborting.join(_ABORT_SECONDS)
    if aborting.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def _sockets() -> dict[str, int]:
    """This process's sockets by their names, which are not used again, and their numbers, which are."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            found[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    return {name: number for name, number in found.items() if name.startswith("socket:")}


def is_distributed() -> bool:
    """Whether this worker has others to talk to."""
    return dist.is_initialized() and dist.get_world_size() > 1


def wrap_in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """A model on its device, in DDP's wrapper if this worker is in a group with others."""
    model = model.to(device)
    return DistributedDataParallel(model, **ddp_options()) if is_distributed() else model


def leave_process_group() -> None:
    """Leave the process group, if there is one; those who still wait for this worker in it are told.

    Whoever left in order has compared weights before, and so knows that nobody waits for its last step.
    """
    if dist.is_initialized():
        _abort_nccl()  # whose orderly end would wait for what was begun with those who are lost
        _group.nccl = None
        dist.destroy_process_group()


def bare(replica: nn.Module) -> nn.Module:
    """The model inside DDP's wrapper."""
    return replica.module if isinstance(replica, DistributedDataParallel) else replica


def preload() -> None:
    """Import what DDP's constructor imports, which takes seconds: before others wait for this worker."""
    import_compiler()


def ddp_options() -> dict[str, Any]:
    """How DDP must wrap a model: it must not overwrite the other workers' BatchNorm buffers (the loop combines the
    statistics itself), and gradients live in its buckets."""
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False, "gradient_as_bucket_view": True}
