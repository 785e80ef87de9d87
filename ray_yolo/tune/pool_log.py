"""The file `workers.log` of a sweep: what happened to the workers of its pool, one line with the time for each event.

It holds what the console prints: lost and replaced workers, and places that were given to other programs of the cluster
and came back. The ledger has none of it, because a search does not depend on it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from ray_yolo.core.redact import printable

POOL_LOG_FILE = "workers.log"


def log_pool(folder: Path, text: str) -> None:
    """Append an event with the local time. A file that cannot be written loses the line only."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {printable(text)}\n"
    with suppress(OSError), (folder / POOL_LOG_FILE).open("a", encoding="utf-8") as file:  # it has been printed
        file.write(line)


def last_pool_lines(folder: Path, count: int) -> list[str]:
    """The newest lines; none without a file."""
    try:
        lines = (folder / POOL_LOG_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return lines[-count:]
