"""What this process may use of its machine, on machines of files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ray_yolo.core import system
from ray_yolo.core.system import OtherPrograms


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight cores and 64 MiB available, whose cgroups are in a folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, file in (("OWN", "own"), ("CGROUPS", "cgroups"), ("MEMORY", "meminfo")):
        monkeypatch.setattr(system, name, tmp_path / file)
    (tmp_path / "meminfo").write_text("MemTotal: 131072 kB\nMemAvailable:   65536 kB\n")
    return tmp_path


def test_a_process_is_known_by_its_machine_and_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pid namespace has one number on all machines, and machines may share a name."""
    own = system.own_process()
    assert (own.node, own.pid) == (os.uname().nodename, os.getpid())
    assert own.space.split() == [system.BOOT.read_text().strip(), os.readlink("/proc/self/ns/pid")]
    assert own.is_here
    assert not own.has_ended
    ended = own._replace(pid=2**22 + 1)  # there is no such number
    assert ended.has_ended
    assert own._replace(started=own.started + 1).has_ended  # its number has been given again
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(system, "BOOT", tmp_path / "boot_id")
    assert not own.is_here
    assert not ended.has_ended  # as far as can be seen from there


@pytest.mark.parametrize("permitted", [True, False])
def test_a_process_gets_back_the_priority_of_its_parent(monkeypatch: pytest.MonkeyPatch, permitted: bool) -> None:
    threads = {int(thread): 15 for thread in os.listdir("/proc/self/task")}

    def set_priority(which: int, thread: int, niceness: int) -> None:
        if not permitted:
            raise PermissionError(13, "Permission denied")
        threads[thread] = niceness

    monkeypatch.setattr(os, "getpriority", lambda which, pid: 3 if pid == os.getppid() else threads[os.getpid()])
    monkeypatch.setattr(os, "setpriority", set_priority)
    assert system.undo_niceness() == permitted
    assert set(threads.values()) == {3 if permitted else 15}


def write(folder: Path, **content: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_cgroups_the_affinity_and_the_machine_count(files: Path) -> None:
    assert (system.cores(), system.available_memory()) == (8, 64 * 2**20)


def test_the_tightest_cgroup_counts(files: Path) -> None:
    (files / "own").write_text("0::/jobs/mine\n")
    write(files / "cgroups", cpu__max="max 100000")
    write(files / "cgroups" / "jobs", cpu__max="250000 100000", memory__max="3000", memory__current="2500",
          memory__stat="anon 2000\ninactive_file 400")
    write(files / "cgroups" / "jobs" / "mine", cpu__max="400000 100000", memory__max="max", memory__current="9",
          memory__stat="inactive_file 0")
    assert (system.cores(), system.available_memory()) == (2, 3000 - 2500 + 400)


def test_cgroups_of_version_1_count_too(files: Path) -> None:
    (files / "own").write_text("4:memory:/pod/box\n3:cpu,cpuacct:/\n0::/\n")  # shown from outside, mounted from inside
    write(files / "cgroups" / "memory", memory__limit_in_bytes="1000", memory__usage_in_bytes="700",
          memory__stat="total_inactive_file 50")
    write(files / "cgroups" / "cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert (system.cores(), system.available_memory()) == (1, 350)
    write(files / "cgroups" / "cpu", cpu__cfs_quota_us="-1")
    assert system.cores() == 8


def test_other_programs_are_what_is_busy_beyond_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, own = [10.0], [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: own[0])
    ticks = os.sysconf("SC_CLK_TCK")

    def write(busy: float) -> Path:
        path = tmp_path / "stat"
        path.write_text(f"cpu  {round(busy * ticks)} 0 0 999999 7 0 0 0 0 0\ncpu0 1 1 1 1\n")
        return path

    others = OtherPrograms(write(100.0))
    assert others.cores() == 0.0  # it is too early
    now[0], own[0] = 14.0, 3.0
    write(108.0)  # in four seconds 8, of which 2 are of this process
    assert others.cores() == 1.5
    own[0] = 20.0
    assert others.cores() == 0.0
    assert OtherPrograms(tmp_path / "none").cores() == 0.0
