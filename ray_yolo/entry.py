"""The start of a command, before its imports: from here on, a signal ends the process with the right status."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ray_yolo.core import deadline
from ray_yolo.core.garbage import collect_rarely
from ray_yolo.core.signals import end_at_once


def start(command: str = "") -> NoReturn:
    """Run a command with the arguments of this process, and end the process with its exit status.

    Args:
        command: by its name; '': the first argument is the name, as in the installed program `ray_yolo`.
    """
    end_at_once()
    collect_rarely()  # before the imports that take seconds
    open_standard_streams()
    from ray_yolo import cli  # takes half a second

    deadline.leave(cli.run(cli.COMMANDS[command] if command else cli.console))


def open_standard_streams() -> None:
    """Make standard streams that are closed (`>&-`) those of /dev/null. Otherwise the next files that are opened get
    their numbers, and what programs print."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)  # Python has none of a closed stream
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
