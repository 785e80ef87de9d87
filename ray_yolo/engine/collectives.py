"""Collective operations and process groups; only this file and gradients.py use torch.distributed.

Callers of `Collectives` identify workers by their ranks. With one worker, nothing here communicates. All workers must
call every function marked "Collective", in the same order.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_yolo.core.errors import PeerDepartedError
from ray_yolo.core.internals import internal

BACKENDS = "cpu:gloo,cuda:nccl"  # A group of GPUs has both: the host waits for gloo only, which reports errors.
LOOPBACK = "127.0.0.1"  # no other host can connect to it

_MEETING_SECONDS = 30.0  # timeout for all live workers to meet, and then to connect
_CONNECT_SECONDS = 1.0  # An attempt to connect to the store takes so long at most; an abort waits for it.
_RETRY_SECONDS = 0.2  # two attempts are this far apart
_ABORT_SECONDS = 30.0  # timeout for NCCL to abort its operations
_SIOCGIFADDR = 0x8915  # Linux: get the address of an interface


@dataclass
class _Group:
    """The parts of this process's group, formed or forming, that an abort needs."""

    connections: frozenset[str] = frozenset()  # names of its sockets in /proc; while it forms, those to the store
    nccl: tuple[dist.ProcessGroup, ...] = ()  # the groups, if their devices use NCCL
    cut: Tensor | None = None  # () 1.0 after an abort; pinned, so that a device reads it in stream order
    is_aborted: threading.Event = field(default_factory=threading.Event)


_group = _Group()  # the newest one
_aborting = threading.Lock()


def _set_group_timeout(group: dist.ProcessGroup | None, seconds: float) -> None:
    """Set the time limit of a group's operations, by a private name where torch has no public one."""
    change = getattr(dist, "set_timeout", None) or internal("torch.distributed.distributed_c10d", "_set_pg_timeout")
    change(timedelta(seconds=seconds), group)


class _GlobalSum(torch.autograd.Function):
    """y = sum over workers of x. Every worker's loss depends on every x, so the gradient is summed as well."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _GlobalSum.apply(gradient)


@dataclass(frozen=True)
class NodeGroups:
    """Groups of workers for an exchange that leaves each node once, not once per worker."""

    workers: tuple[tuple[int, ...], ...]  # the workers of each node, equally many
    here: int  # the place of this node in `workers`
    inside: dist.ProcessGroup  # the group of this node's workers
    across: dist.ProcessGroup  # the group of the workers with the same place on each node


@dataclass(frozen=True)
class Collectives:
    """The collective operations of one worker of a generation, which has a rank from 0 to `num_workers` - 1."""

    rank: int = 0
    num_workers: int = 1
    node_groups: NodeGroups | None = None

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over the workers, differentiable. Collective."""
        return x if self.num_workers == 1 else _GlobalSum.apply(x)

    def stack(self, x: Tensor) -> Tensor:
        """Each worker's `x`, in the order of their ranks, (workers, *shape), on their device. Collective."""
        if self.num_workers == 1:
            return x[None]
        stacked = x.new_empty(self.num_workers, *x.shape)
        dist.all_gather_into_tensor(stacked, x[None])
        return stacked

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All workers' rows in the order of their ranks, (sum of counts, d), on their device. Collective.

        Args:
            rows: (counts[rank], d). All workers know `counts`, so no sizes are exchanged.
        """
        if self.num_workers == 1:
            return rows
        most = max(counts)
        padded = rows.new_zeros(most, rows.shape[1])
        padded[: len(rows)] = rows
        return torch.cat([part[:count] for part, count in zip(self.stack(padded), counts, strict=True)])

    def gather_step(self, row: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """One row of each worker for a step, (workers, d), and whether all belong to this step, () bool. Collective.

        NCCL reports no abort: its kernels end and may leave any value, such as zeros, another step's row or half of
        this one. Each number is therefore sent twice, as its bits b and as b XOR k. The value k is ~step, so it differs
        between steps and is never 0. The two numbers match only if both belong to this step; a repeated value does not
        match.

        Args:
            row: (d,) float32.
        """
        if self.num_workers == 1:
            return row[None], torch.ones((), dtype=torch.bool, device=row.device)
        bits = row.view(torch.int32)
        sent = torch.stack([bits, bits ^ ~step])
        received = sent.new_zeros(self.num_workers * 2, len(row))
        dist.all_gather_into_tensor(received, sent)
        values, check = received.view(self.num_workers, 2, -1).unbind(1)
        return values.contiguous().view(torch.float32), (values ^ check).eq(~step).all()

    def gather(self, rows: Tensor) -> Tensor:
        """All workers' rows in the order of their ranks, on the host. Workers need not know each other's counts.
        Collective.
        """
        rows = rows.cpu()
        if self.num_workers == 1:
            return rows
        counts = self.gather_rows(torch.tensor([[len(rows)]]), [1] * self.num_workers).flatten().tolist()
        return self.gather_rows(rows, counts) if max(counts) else rows

    def gather_on_first(self, rows: Tensor) -> Tensor:
        """All workers' rows in the order of their ranks, on the host of rank 0; the others get no rows. Collective.

        For rows of which all workers together have too many for each of them.
        """
        rows = rows.cpu()
        if self.num_workers == 1:
            return rows
        counts = self.gather(torch.tensor([[len(rows)]])).flatten().tolist()
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        if self.rank > 0:
            dist.gather(padded, dst=0)
            return rows[:0]
        parts = [torch.empty_like(padded) for _ in counts]
        dist.gather(padded, parts, dst=0)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def broadcast_state(self, state: dict[str, Any] | None, source: int) -> dict[str, Any]:
        """The state of rank `source`, on all workers. Collective.

        Args:
            state: plain containers of tensors and text; None on the other workers.
        """
        if self.num_workers == 1:
            assert state is not None
            return state
        buffer = io.BytesIO()
        if self.rank == source:
            torch.save(state, buffer)
        length = torch.tensor([buffer.tell()])  # the others allocate as many bytes before they receive them
        dist.broadcast(length, source)
        if self.rank == source:
            data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        else:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, source)
        # Tensors of a GPU would be made on the GPU of the same number, which is another worker's or does not exist
        received: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu",
                                              weights_only=True)
        return received

    def was_cut(self, device: torch.device) -> Tensor:
        """() 1.0 if this worker's group was aborted before the device reached this point, else 0.0.

        At 0.0 every earlier exchange has completed, because only an abort ends an NCCL kernel early.
        """
        if self.num_workers == 1 or _group.cut is None:
            return torch.zeros((), device=device)
        return _group.cut.to(device, non_blocking=True, copy=True)


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Context that raises `PeerDepartedError` if a collective fails because a peer has departed or does not respond."""
    try:
        yield
    except RuntimeError as error:
        words = ("gloo", "pair closure", "NCCL")  # gloo, and NCCL after an abort, raise RuntimeErrors of no other type
        if isinstance(error, dist.DistError) or any(word in str(error) for word in words):
            raise PeerDepartedError(str(error).splitlines()[0]) from error
        raise


def serve_rendezvous_store(host: str) -> dist.TCPStore:
    """A rendezvous store for the workers of a group. It listens only on this worker's address `host`, at a free
    port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    return dist.TCPStore(host, listening.getsockname()[1], is_master=True, wait_for_workers=False,
                         timeout=timedelta(seconds=_MEETING_SECONDS), master_listen_fd=listening.detach())


def use_interface(address: str) -> None:
    """Make gloo use the network interface with this worker's IPv4 address, unless the user has chosen one.

    By default, gloo uses the address of the host's name. On Debian and Ubuntu this is 127.0.1.1, which other hosts
    cannot reach. NCCL's default is good; if all workers are on this host, NCCL is also restricted to the loopback
    interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    if address == LOOPBACK:
                        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def set_up_nccl() -> None:
    """Set NCCL's environment for groups whose peers may depart. Apart from the first, the user's own values stay."""
    # Otherwise NCCL's watchdog ends the process when a peer departs. The coordinator decides which worker has departed
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # Otherwise creating a communicator waits forever, ignoring aborts, for a peer that departs meanwhile
    os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{_MEETING_SECONDS:.0f}")
    # Otherwise torch's watchdog sleeps for up to a minute after an error, and the abort waits for it
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def form_process_group(own: dist.TCPStore, address: tuple[str, int], rank: int, num_workers: int,
                       timeout_seconds: float, device: torch.device, nodes: Sequence[str] = ()) -> Collectives:
    """Form the process group of the workers that meet in the store of rank 0, at `address`. Collective.

    Args:
        own: this worker's store; its host is the address at which the others reach this worker.
        timeout_seconds: of a collective operation. Rendezvous and connection take at most `_MEETING_SECONDS` each.
        device: of this worker; no other worker uses it.
        nodes: of the workers; (): not known, or one.

    Raises:
        PeerDepartedError: if a worker does not appear, or departs before all are connected.
    """
    global _group
    _group = _Group()
    if num_workers == 1:
        return Collectives()
    gpus = device.type == "cuda"
    if gpus:
        set_up_nccl()
    use_interface(own.host)
    with collective_errors():
        meeting = timedelta(seconds=_MEETING_SECONDS)
        if rank == 0:
            store = own
        else:
            await_store(address)
            store = dist.TCPStore(*address, is_master=False, timeout=meeting)
        _group.connections = connections_to(address)
        if _group.is_aborted.is_set():  # before an abort could close the connections
            raise PeerDepartedError("a worker departed while the others met")
        if store.add("come", 1) == num_workers:
            store.set("all", "")
        store.wait(["all"], meeting)
        before = _sockets().keys()
        dist.init_process_group(BACKENDS if gpus else "gloo", store=dist.PrefixStore("group", store), rank=rank,
                                world_size=num_workers, timeout=meeting, device_id=device if gpus else None)
        world = dist.group.WORLD
        assert world is not None
        if gpus:
            _group.nccl = (world,)  # so that an abort ends the forming of the others
        node_groups = form_node_groups(nodes, rank, meeting)
        groups = [world] if node_groups is None else [world, node_groups.inside, node_groups.across]
        formed = _Group(frozenset(_sockets().keys() - before), tuple(groups) if gpus else (),
                        torch.zeros((), pin_memory=gpus), _group.is_aborted)
        _group = formed
        if gpus:
            connect_gpus(groups, device)
        for group in groups:
            _set_group_timeout(group, timeout_seconds)
        if formed.is_aborted.is_set():
            raise PeerDepartedError("a worker departed while the group formed")
    return Collectives(rank, num_workers, node_groups)


def connect_gpus(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Make one exchange and one gather in each group of GPUs. Collective.

    The first ones connect the workers, for which NCCL waits no longer than for a communicator. Here all workers are at
    the same point; in the first step, one may still load its images.
    """
    for group in groups:
        size = dist.get_world_size(group)
        own = torch.zeros(size, device=device)
        dist.all_to_all_single(torch.empty_like(own), own, group=group)
        dist.all_gather_into_tensor(torch.empty(size, device=device), own[:1], group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def await_store(address: tuple[str, int]) -> None:
    """Return once the store of rank 0 accepts connections.

    torch's client retries for `_MEETING_SECONDS`, and nothing interrupts it.

    Raises:
        PeerDepartedError: if rank 0 has departed: its store was open before the others knew the address, so it does not
            refuse a connection. Also after an abort, and after `_MEETING_SECONDS`.
    """
    until = time.monotonic() + _MEETING_SECONDS
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            is_gone = isinstance(error, ConnectionRefusedError)
            if is_gone or _group.is_aborted.is_set() or time.monotonic() > until:
                raise PeerDepartedError(f"rank 0 at {address[0]} port {address[1]}: {error}") from error
        _group.is_aborted.wait(_RETRY_SECONDS)


def connections_to(address: tuple[str, int]) -> frozenset[str]:
    """The names of this process's sockets that are connected to an address."""
    names = set()
    for name, number in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family == socket.AF_UNIX:
                continue
            host, port = connection.getpeername()[:2]  # raises without a peer
            if (host.removeprefix("::ffff:"), port) == address:  # torch's sockets have IPv4 addresses in IPv6
                names.add(name)
    return frozenset(names)


def form_node_groups(nodes: Sequence[str], rank: int, timeout: timedelta) -> NodeGroups | None:
    """The groups of an exchange that leaves each node once. Collective.

    None if there is one node, if a node has one worker, if they have different numbers of workers, or if the workers of
    a node are not numbered one after the other.

    Args:
        nodes: of the workers.
        timeout: for the workers of a group to connect.
    """
    by_node: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        by_node.setdefault(node, []).append(number)
    workers = tuple(map(tuple, by_node.values()))
    sizes = {len(team) for team in workers}
    numbers = [number for team in workers for number in team]
    if len(workers) < 2 or len(sizes) > 1 or sizes == {1} or numbers != sorted(numbers):
        return None
    inside = across = None
    here = 0
    for place, team in enumerate(workers):  # every worker takes part in forming each group, in the same order
        group = dist.new_group(list(team), timeout=timeout)
        if rank in team:
            inside, here = group, place
    for same_place in zip(*workers, strict=True):
        group = dist.new_group(list(same_place), timeout=timeout)
        if rank in same_place:
            across = group
    assert isinstance(inside, dist.ProcessGroup)
    assert isinstance(across, dist.ProcessGroup)
    return NodeGroups(workers, here, inside, across)


def abort_process_group() -> None:
    """Make the collectives that another thread of this worker waits for fail, and disconnect from the group's workers.
    A meeting of workers that form a group fails as well.

    gloo's abort and shutdown do not end operations in progress, and a broken network closes no connection. The group's
    sockets are shut down instead. NCCL raises no error: its kernels end and leave unreceived values unset.
    """
    group = _group  # once the kernels end, the main thread may form the next one
    group.is_aborted.set()
    if group.cut is not None:
        group.cut.fill_(1.0)  # before the kernels end
    _abort_nccl(group)
    for name, number in _sockets().items():
        if name in group.connections:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for a listening socket; gloo ends the process if one is shut down
                connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl(group: _Group) -> None:
    """End NCCL's kernels and connections. If that hangs, kill this process, which is then replaced.

    The thread that sends heartbeats aborts, and the main thread when it leaves the group. Each waits for the other: an
    abort of a communicator that another thread aborts or destroys may crash.
    """
    with _aborting:
        parts, group.nccl = group.nccl, ()
        if not parts:
            return

        def abort() -> None:
            for part in reversed(parts):  # those that were split from the first one come first
                part.abort()

        thread = threading.Thread(target=abort, name="ray_yolo abort", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            os.kill(os.getpid(), signal.SIGKILL)


def _sockets() -> dict[str, int]:
    """File descriptors of this process's sockets by their names. Names are unique; descriptors are reused."""
    names = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            names[os.readlink(f"/proc/self/fd/{number}")] = int(number)
    return {name: number for name, number in names.items() if name.startswith("socket:")}


def is_distributed() -> bool:
    """Whether this worker is in a process group with others."""
    return dist.is_initialized() and dist.get_world_size() > 1


def wrap_in_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on its device, wrapped by DDP if this worker is in a group with others."""
    model = model.to(device)
    return DistributedDataParallel(model, **ddp_options()) if is_distributed() else model


def leave_process_group() -> None:
    """Leave the process group, if there is one. Collectives of workers that wait for this one fail.

    A worker that leaves regularly has compared weights before, so no other worker waits for its last step.
    """
    if dist.is_initialized():
        _abort_nccl(_group)  # an orderly shutdown would wait for operations with departed workers
        dist.destroy_process_group()


def ddp_options() -> dict[str, Any]:
    """Keyword arguments for DDP: gradients are views of its buckets, and it broadcasts no BatchNorm buffers. The loop
    combines their statistics itself."""
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False, "gradient_as_bucket_view": True}
