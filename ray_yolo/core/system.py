"""CPU cores and memory that this process may use under its cgroup limits, and its identity."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h has these numbers.


def keep_freed_memory() -> None:
    """Make malloc reuse large blocks instead of returning them to the kernel after each layer and each picture.

    Each returned page costs a page fault later, which is expensive in a virtual machine. Measured cost: a fifth of a
    training step on a CPU and more than half of decoding. Without glibc this does nothing.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return
    set_option(_M_TRIM_THRESHOLD, 2**31 - 1)  # free memory at the end of the heap that is kept
    set_option(_M_TOP_PAD, 2**28)  # The heap grows by so much.
    # Smaller blocks come from the heap. An older glibc refuses more than 32 MiB, and would keep its 128 KiB.
    if not set_option(_M_MMAP_THRESHOLD, 2**30):
        set_option(_M_MMAP_THRESHOLD, 2**25)


SPINS = {"GOMP_SPINCOUNT": "1000"}
"""Environment to set before torch is imported: how long waiting OpenMP threads spin before they sleep. On a shared CPU
libgomp's default of 300,000 spins doubled the CPU seconds and the time of a step (two threads)."""
_LEAST_MEASURED = 0.2  # seconds of `OtherPrograms`
BOOT = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 22 - 3  # /proc/PID/stat: its third field is the first one after the program's name.
OWN, CGROUPS, MEMORY = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/meminfo")


class Process(NamedTuple):
    """A process on any machine."""

    node: str
    space: str  # the id is valid in it: kernel boot and PID namespace; machines and containers may share a host name
    pid: int
    started: int  # clock ticks after the boot: the kernel gives the id of an ended process to another one

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended; False if this cannot be checked from here.

        A killed process stays listed until its parent reaps it. Process 1 of a plain container never does.
        """
        return self.is_here and not self._is_running()

    @property
    def is_here(self) -> bool:
        """Whether its id is one of the calling process's machine and namespace."""
        return self[:2] == (socket.gethostname(), _pid_space(BOOT))

    def kill(self) -> None:
        """Send SIGKILL, if the process is here and has not ended; no other process gets it."""
        if not self.is_here:
            return
        with suppress(ProcessLookupError):
            file = os.pidfd_open(self.pid)  # denotes this process, also after its id is given to another one
            try:
                if self._is_running():
                    signal.pidfd_send_signal(file, signal.SIGKILL)
            finally:
                os.close(file)

    def _is_running(self) -> bool:
        state, started = _state_of(self.pid)
        return started == self.started and state not in ("Z", "X")


def own_process() -> Process:
    """The calling process."""
    return process_of(os.getpid())


def process_of(pid: int) -> Process:
    """The process that has an id now, on this machine; of none, one that has ended."""
    return Process(socket.gethostname(), _pid_space(BOOT), pid, _state_of(pid)[1])


def _state_of(pid: int) -> tuple[str, int]:
    """The state of a process on this machine, by the kernel's letter (Z is a zombie, X is dead), and its start in clock
    ticks after the boot. Without such a process, dead and -1."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", -1
    fields = status.rpartition(")")[2].split()  # a program's name, in parentheses, may contain spaces
    return fields[0], int(fields[_START_FIELD])


def end_with_parent() -> None:
    """Make this process, a child by `multiprocessing`, end when the process that has created it ends in any way.

    Children of a fork server inherit the descriptor by which the server notices the end of its creator. Without this, a
    killed training would leave its fork server and all of the server's children for good.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="ray_yolo parent", daemon=True).start()


def processor_name(processor: Path = Path("/proc/cpuinfo")) -> str:
    """The model name of the CPU; its architecture where the kernel shows no name."""
    with suppress(OSError):
        for line in processor.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                return value.strip()
    return platform.machine()


def is_bf16_faster(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bf16 faster than fp32: a table, because two equal commands must decide equally.

    | flag | vendor | its rate, of fp32's |
    |---|---|---|
    | amx_bf16 | any | several times |
    | avx512_bf16 | AMD (Zen 4 and later) | 2 |
    | avx512_bf16 | Intel, without AMX or where it is masked | 1/2: `vdpbf16ps` runs on one port, in two passes |
    | neither | any | emulated |
    """
    try:
        lines = processor.read_text().splitlines()
    except OSError:
        return False
    fields: dict[str, str] = {}
    for line in lines:  # The first core stands for all.
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return "amx_bf16" in flags or ("avx512_bf16" in flags and fields.get("vendor_id") == "AuthenticAMD")


def cores() -> int:
    """Cores that this process may use at once, at least 1: the smaller of its affinity and its cgroup quota."""
    limits: list[float] = [len(os.sched_getaffinity(0))]
    for folder in _cgroups("cpu"):
        limits += _quotas(folder)
    return max(1, int(min(limits)))


class OtherPrograms:
    """What other programs of this machine compute, measured from its creation on."""

    def __init__(self, statistics: Path = Path("/proc/stat")) -> None:
        self._statistics = statistics
        self._began, self._all, self._own = time.monotonic(), self._busy_seconds(), time.process_time()

    def cores(self) -> float:
        """The mean number of cores that they have used so far; 0 if it is too early, or the kernel does not say."""
        seconds = time.monotonic() - self._began
        if seconds < _LEAST_MEASURED or not self._all:
            return 0.0
        own = time.process_time() - self._own
        return max(0.0, (self._busy_seconds() - self._all - own) / seconds)

    def _busy_seconds(self) -> float:
        """CPU seconds of all programs since the boot."""
        try:
            user, nice, system, _, _, irq, softirq, *_ = map(int, self._statistics.read_text().split()[1:9])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def available_memory() -> int:
    """Bytes that this process may still allocate: memory available on the machine or within its cgroups' limits."""
    fields = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
    kilobytes, _ = fields["MemAvailable"].split()
    limits = [int(kilobytes) * 1024]
    for folder in _cgroups("memory"):
        limits += _free_bytes(folder)
    return max(0, min(limits))


def undo_niceness() -> bool:
    """Give this process the niceness of its parent, if the system permits it. Ray runs its workers at niceness 15.

    Returns:
        Whether it now has the niceness of its parent.
    """
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
        if os.getpriority(os.PRIO_PROCESS, 0) > niceness:
            for thread in os.listdir("/proc/self/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
    except OSError:
        return False
    return True


def set_priority(pid: int, policy: str, nice: int) -> None:
    """Set the scheduling policy of a process, and the niceness of a session of its own, if the system permits it.

    Linux divides the processor between sessions first (autogroup). The policy has an effect within the session, so a
    process that leads a session also sets the niceness of the session. Where the policy is refused, the process gets
    the niceness instead.
    """
    try:
        os.sched_setscheduler(pid, getattr(os, policy), os.sched_param(0))
    except (AttributeError, OSError):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, nice)
    with suppress(OSError):
        if os.getsid(pid) == pid:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))


@cache
def _pid_space(boot: Path) -> str:
    """Boot id and PID namespace of this process; the namespace alone has the same number on every kernel."""
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of its ancestors; a container may show its own cgroup as the root."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller) or controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                yield from (CGROUPS / (controllers and controller) / part for part in (own, *own.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """The core limit of a cgroup (version 2 or 1), if it has one."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        yield int(quota) / int(period)  # ValueError: "max"
    with suppress(OSError, ValueError):
        quota_us = _number(folder / "cpu.cfs_quota_us")
        if quota_us > 0:  # -1: no limit
            yield quota_us / _number(folder / "cpu.cfs_period_us")


def _free_bytes(folder: Path) -> Iterator[int]:
    """Bytes left under a cgroup's memory limit, if it has one; inactive file cache counts as free."""
    for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        with suppress(OSError, ValueError, KeyError):
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield _number(folder / limit) - _number(folder / used) + int(statistics[cached])


def _number(file: Path) -> int:
    return int(file.read_text())
