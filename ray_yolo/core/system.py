"""This process and its machine: what it may use of cores and main memory, under the limits of its cgroups."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple


def keep_freed_memory() -> None:
    """Have large blocks of memory reused instead of returned to the system after each layer and each picture.

    A page that comes back costs a page fault, a dear one in a virtual machine: a fifth of a training step on a CPU and
    more than half of decoding were measured. Nothing happens where the C library is not glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, num_bytes in ((-1, 2**31 - 1), (-2, 2**28), (-3, 2**30)):  # glibc's M_TRIM_THRESHOLD, M_TOP_PAD,
            set_option(option, num_bytes)  # M_MMAP_THRESHOLD


SPINS = {"GOMP_SPINCOUNT": "1000"}
"""Set before torch is imported: how long arithmetic threads that wait for one another spin before they sleep. Where
others run as well, libgomp's own 300,000 turns doubled the CPU seconds and the time of a step (two threads)."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
OWN, CGROUPS, MEMORY = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/meminfo")


class Process(NamedTuple):
    """A process, wherever it runs."""

    node: str
    space: str  # of process ids: its kernel's boot, and the namespace; machines and containers may share a host name
    pid: int

    @property
    def has_ended(self) -> bool:
        """Whether that can be seen from here, and is so."""
        return self.is_here and not Path(f"/proc/{self.pid}").exists()

    @property
    def is_here(self) -> bool:
        """Whether its id means the same process to the one that asks."""
        return self[:2] == own_process()[:2]


def own_process() -> Process:
    """The process that asks."""
    return Process(socket.gethostname(), _pid_space(BOOT), os.getpid())


def multiplies_bf16(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bf16 itself (avx512_bf16, amx_bf16); emulated it is slower than fp32."""
    with suppress(OSError):
        flags = next((line for line in processor.read_text().splitlines() if line.startswith("flags")), "")
        return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())
    return False


def cores() -> int:
    """Cores that this process may use at once, at least 1: its affinity, or its cgroups' quota if that is less."""
    quotas = [quota for folder in _cgroups("cpu") for quota in _quotas(folder)]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def available_memory() -> int:
    """Bytes that this process may still fill: what the machine has available, or its cgroups leave if that is less."""
    fields = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
    left = [room for folder in _cgroups("memory") for room in _rooms(folder)]
    return max(0, min([int(fields["MemAvailable"].split()[0]) * 1024, *left]))


@cache
def _pid_space(boot: Path) -> str:
    """Of this process: the first namespace of any kernel has the same number."""
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those that it is in; a container may show its own as the root."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller) or controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                yield from (CGROUPS / (controllers and controller) / part for part in (own, *own.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """The cores of a cgroup, if it has a limit: of version 2, or of version 1."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # ValueError: "max"
    with suppress(OSError, ValueError):
        if (quota_us := _number(folder / "cpu.cfs_quota_us")) > 0:
            yield quota_us / _number(folder / "cpu.cfs_period_us")


def _rooms(folder: Path) -> Iterator[int]:
    """The bytes that a cgroup's limit leaves, if it has one; what only caches files can be had back."""
    for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        with suppress(OSError, ValueError, KeyError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield _number(folder / limit) - _number(folder / used) + int(statistics[cached])


def _number(file: Path) -> int:
    return int(file.read_text())
