"""The start of a command, before its imports: from here on, a signal ends the process with the right status."""

from __future__ import annotations

import sys
from typing import NoReturn

from ray_yolo.core.signals import end_at_once


def start(command: str = "") -> NoReturn:
    """Run a command with the arguments of this process, and end the process with its exit status.

    Args:
        command: by its name; '': the first argument is the name, as in the installed program `ray_yolo`.
    """
    end_at_once()
    from ray_yolo import cli  # takes half a second

    sys.exit(cli.run(cli.COMMANDS[command] if command else cli.console))
