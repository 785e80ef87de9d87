"""The driver's side of the process that makes the records of a run or sweep: its start, its messages, its end."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ray_yolo.core.deadline import seconds_left
from ray_yolo.core.events import EndEvent, EpochEvent, Event, StepEvent
from ray_yolo.core.system import set_priority
from ray_yolo.sinks.base import Sink
from ray_yolo.sinks.earlier_runs import incomplete_runs
from ray_yolo.sinks.records import END, INCOMPLETE, URI_VARIABLE, note_incomplete
from ray_yolo.sinks.retry import Warn

PROMPT_SECONDS, JOB_SECONDS = 3.5, 60.0
"""How long a command waits at its end, where the process survives it: for a user at a prompt, and in a job."""
FAILING_SECONDS = 10.0
"""How long it waits at most for records that fail again and again."""
_MOST_STARTS = 3
_POLL_SECONDS = 0.05

_SHELLS = ("bash", "sh", "zsh", "fish", "dash", "ksh", "csh", "tcsh", "busybox")
_OPTIONS_WITH_VALUE = ("--rcfile", "--init-file")  # a shell has these beside -o and -O

_left: list[subprocess.Popen[bytes]] = []  # still at work when their run ended


class RecordProcess:
    """The process of one run or sweep.

    Args:
        module: with the process's `main`.
        folder: of the run or sweep.
        uri: the MLflow server; None: no tracking.
        warn: receives the warnings of the process.
        own_session: whether it gets a session of its own. Idle priority yields at once to other processes of the same
            session (see `set_priority`), so only beside workers of other sessions one of its own is better.
    """

    def __init__(self, module: str, folder: Path, uri: str | None, warn: Warn, *, own_session: bool) -> None:
        self._module, self._folder, self._uri, self._warn = module, folder, uri, warn
        self._own_session = own_session
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._unread = b""
        self._failing: set[str] = set()
        self._notes: dict[str, None] = {}  # lines for the end of the command, each once
        self.pending: list[str] = []
        """The names of the records that are not complete."""

    @property
    def is_running(self) -> bool:
        """Whether the process is at work."""
        return self._process is not None and self._process.poll() is None

    def keep_running(self) -> None:
        """Start the process if there is none, and again if it was killed. Take its messages."""
        self._read()
        process = self._process
        has_failed = process is not None and process.poll() not in (None, 0, INCOMPLETE)
        if process is None or (has_failed and self._starts < _MOST_STARTS):
            self._start()
        if process is None:
            self._complete_earlier_runs()

    def finish(self, limit_seconds: float) -> None:
        """Tell the process that the log is complete, and wait for its end, but not longer than the limit."""
        start = time.monotonic()
        limit_seconds = seconds_left(limit_seconds)  # after a signal there is a deadline
        failing_since = math.inf
        while True:
            self.keep_running()
            self._send_end()
            if self._process is not None:  # on a busy machine it may not even have begun
                set_priority(self._process.pid, "SCHED_OTHER", 0)
            if not self.is_running:
                self._read()
                break
            now = time.monotonic()
            all_fail = bool(self.pending) and self._failing.issuperset(self.pending)
            failing_since = min(failing_since, now) if all_fail else math.inf
            if now - start > limit_seconds or now - failing_since > FAILING_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        self._let_go()

    def _start(self) -> None:
        self._starts += 1
        if self._process is not None:
            _close_pipes(self._process)  # it was killed
        self._failing.clear()  # the new process has not tried any record
        note_incomplete(self._folder)
        self._unread = b""
        self._process = start_detached(self._module, str(self._folder), {URI_VARIABLE: self._uri or ""},
                                       own_session=self._own_session)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        set_priority(self._process.pid, "SCHED_IDLE", 19)  # not by itself: its imports would take seconds from training

    def _complete_earlier_runs(self) -> None:
        """Start the process that completes the records of other runs of the project, if there are any."""
        if incomplete_runs(self._folder):
            process = start_detached("ray_yolo.sinks.earlier_runs", str(self._folder), {URI_VARIABLE: self._uri or ""},
                                     own_session=self._own_session)
            set_priority(process.pid, "SCHED_IDLE", 19)
            _close_pipes(process)  # it reads and says nothing
            _left.append(process)  # nothing waits for it

    def _send_end(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.closed:
            with suppress(OSError):  # it has ended
                process.stdin.write(END)
                process.stdin.flush()
            with suppress(OSError):
                process.stdin.close()

    def _read(self) -> None:
        """Take the messages of the process, one JSON object per line."""
        if self._process is None or self._process.stdout is None or self._process.stdout.closed:
            return
        with suppress(OSError):
            self._unread += self._process.stdout.read() or b""
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "warning" in message:
                self._warn(message["warning"])
            elif "note" in message:
                self._notes.setdefault(message["note"])
            else:
                self.pending, self._failing = message["pending"], set(message["failing"])

    def _let_go(self) -> None:
        """Close the pipes. If the process goes on, it writes its warnings into the log from now on."""
        process = self._process
        if process is None:
            return
        _left[:] = [other for other in _left if other.poll() is None]
        if process.poll() is None:
            _left.append(process)
        if process.stdout is not None:
            process.stdout.close()

    def describe_rest(self) -> str:
        """Lines for the user after `finish`: what the records tell, and what is not complete; '' if there are none."""
        return "\n".join(filter(None, (*self._notes, self._incomplete_line())))

    def _incomplete_line(self) -> str:
        command = f"python -m ray_yolo.sync {shlex.quote(str(self._folder))}"
        names = ", ".join(self.pending) or "records"
        if self.is_running:
            return f"{names}: still being written in the background; if this machine stops, {command} completes them"
        if self._process is not None and self._process.returncode == 0:
            return ""
        return f"{names}: not complete; {command} completes them"


class RecordSink(Sink):
    """Runs the record process of a training, from its first step on: before it, imports would delay training."""

    name, interval_seconds = "records", 0.5

    def __init__(self, process: RecordProcess, limit_seconds: Callable[[], float]) -> None:
        self._process, self._limit = process, limit_seconds
        self._is_training = False

    def event(self, event: Event) -> None:
        """Notice the first step."""
        self._is_training = self._is_training or isinstance(event, (StepEvent, EpochEvent, EndEvent))

    def update(self, last: bool = False) -> None:
        """Start the process; forward its warnings."""
        if self._is_training:
            self._process.keep_running()

    def finish(self) -> None:
        """Wait for the process as long as the end of this command permits."""
        if self._is_training:
            with suppress(KeyboardInterrupt):  # the user does not want to wait
                self._process.finish(self._limit())


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what is not sent yet is lost with the process
                pipe.close()


def start_detached(module: str, argument: str, environment: Mapping[str, str], *, own_session: bool
                   ) -> subprocess.Popen[bytes]:
    """Start a module as a process that survives signals at the terminal and the end of the terminal.

    Signals at the terminal go to the process group in the foreground, so a group of its own suffices.
    multiprocessing is not used: it would import the main module of its parent, so a user's script would train again.
    """
    # The package may have been found by a path relative to the current folder, which the user's script can change.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    # It draws and sends while training goes on: it takes no memory of a GPU, and one thread of the processor.
    own_environment = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                       "OPENCV_FOR_THREADS_NUM": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, argument],  # not the current folder, where a user may have a yaml.py
        start_new_session=own_session, process_group=None if own_session else 0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, **own_environment})


def waiting_limit() -> float:
    """Seconds for which a command waits for the process at its end; infinite if the process ends with the command."""
    if ends_with_command():
        return math.inf
    is_at_prompt = sys.stdout.isatty()  # in a notebook the next cell may open the pictures at once: it is no prompt
    return PROMPT_SECONDS if is_at_prompt else JOB_SECONDS


def ends_with_command(proc: Path = Path("/proc")) -> bool:
    """Whether the end of this command may end all processes that it has started: no user waits for it.

    A user is an interactive Python, as in a notebook, or a shell at a prompt, which starts each typed command in a
    process group of its own. Without a user, the command belongs to a container or a job. Its end may be the end of all
    then, whatever launchers lie between (`timeout`, `setsid -w`, a script with `set -m`).
    """
    if hasattr(sys, "ps1"):
        return False
    group, pid = os.getpgid(0), os.getppid()
    try:
        while pid > 0:  # the parent of process 1, and of a command from outside of the container
            name, parent, its_group = _read_process(proc, pid)
            if name in _SHELLS and its_group != group and _is_at_prompt(proc, pid):
                return False
            group, pid = its_group, parent
    except (OSError, ValueError, IndexError):  # no /proc, or one of another namespace
        return pid <= 1
    return True


def _read_process(proc: Path, pid: int) -> tuple[str, int, int]:
    """(name, parent, process group) of a process."""
    text = (proc / str(pid) / "stat").read_text()
    name = text[text.index("(") + 1:text.rindex(")")]
    _, parent, group = text[text.rindex(")") + 1:].split()[:3]
    return name, int(parent), int(group)


def _is_at_prompt(proc: Path, pid: int) -> bool:
    """Whether a shell was started without a script and without -c, so that it reads what a user types."""
    _, *words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    while words and words[0][:1] in ("-", "+"):
        option = words.pop(0)
        is_long = option.startswith("--")
        if "c" in option and not is_long:
            return False
        if option in _OPTIONS_WITH_VALUE or (option[-1] in "oO" and not is_long):
            words = words[1:]
    return not words
