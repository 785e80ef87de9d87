"""Stubs for commands: executables that log their arguments and then run a short body."""

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = """#!{python}
import json, os, signal, subprocess, sys, time
argv, log = sys.argv[1:], {log!r}
def note(**more):
    with open(log, "a") as file:
        file.write(json.dumps({{"command": {name!r}, "argv": argv, **more}}) + "\\n")
{body}
"""


class Stubs:
    """A folder to put first in PATH. `calls` has the logged calls of its commands, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls.jsonl"
        folder.mkdir(parents=True)

    def add(self, name: str, body: str = "note()") -> None:
        """Add a command that runs `body`: Python code that can use `argv` and `note(**fields)`."""
        path = self.folder / name
        path.write_text(SCRIPT.format(python=sys.executable, log=str(self.log), name=name, body=body))
        path.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def call(self, name: str) -> dict[str, Any]:
        """The only call of a command."""
        (call,) = (call for call in self.calls if call["command"] == name)
        return call
