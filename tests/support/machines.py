"""Two machines in this one, each with a network, processes, /tmp and /dev/shm of its own: see nodes.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ALL = ("--mount", "--net", "--pid", "--uts", "--ipc")
PATIENCE = {"RAY_agent_register_timeout_ms": "240000"}  # of Ray's, where others work, too
NODES = Path(__file__).with_name("nodes.sh")


def missing() -> str:
    """Why there can be none here; '': nothing is in the way."""
    if os.geteuid():
        return "namespaces need root"
    if lacking := [program for program in ("ip", "unshare", "nsenter", "pgrep") if not shutil.which(program)]:
        return f"{', '.join(lacking)}: not installed (apt-get install iproute2 util-linux procps)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "x", "type", "veth"],
                           capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class Machines:
    """They live as long as this context.

    Args:
        folder: what both see, outside of /tmp.
        scripts: of bash, what each runs as its first process.
    """

    def __init__(self, folder: Path, scripts: Mapping[str, str], env: Mapping[str, str]) -> None:
        self._folder, self._scripts, self._env = folder, scripts, dict(env)
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Machines:
        for name, script in self._scripts.items():
            (self._folder / f"{name}.sh").write_text(script)
        self._outer = subprocess.Popen([NODES, self._folder, "sleep", "infinity"], env=self._env, cwd=self._folder)
        wait_for(lambda: (self._folder / "n2.process").exists() or self._outer.poll() is not None)
        assert self._outer.poll() is None
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.kill()  # and with it all others
        for process in (self._outer, *self._started):
            process.wait()

    def command(self, name: str, *words: str | Path) -> list[str]:
        """The command that runs another one on `n1`, `n2` or `control`."""
        control = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()[0]
        targets = [control]
        if name != "control":
            targets.append((self._folder / f"{name}.process").read_text().strip())
        return [*(word for target in targets for word in ("nsenter", "--target", target, *_ALL)), *map(str, words)]

    def run(self, name: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """What came of a command on a machine; its standard error is among its output."""
        return subprocess.run(self.command(name, *words), env={**self._env, **env}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, cwd=self._folder)

    def start(self, name: str, *words: str | Path, **given: Any) -> subprocess.Popen[str]:
        """A command on a machine that goes on."""
        self._started.append(subprocess.Popen(self.command(name, *words), env=self._env, text=True, cwd=self._folder,
                                              start_new_session=True, **given))
        return self._started[-1]

    def payload(self, name: str, state: str) -> None:
        """Cut a machine off (`down`) or connect it again (`up`)."""
        done = self.run("control", "ip", "link", "set", f"to-{name}", state)
        assert done.returncode == 0, done.stdout

    def processes(self, name: str) -> list[str]:
        """The command lines of what a machine's script has started; `run` and `start` do so in other sessions."""
        lines = self.run(name, "ps", "-e", "-o", "pid=,sid=,args=").stdout.splitlines()
        rows = [line.split(maxsplit=2) for line in lines]
        own = [command for pid, session, command in rows if session != "0" and pid != "1"]
        return [command for command in own if command != "sleep infinity"]


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> Any:
    """What the condition is, once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"nothing happened for {seconds:g} s"
        time.sleep(0.3)
    return found
