"""How a command ends: its exit status and its last words, whatever has happened in it."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable

from ray_yolo.errors import RayYoloError
from ray_yolo.ops.machine import SPINS
from ray_yolo.redact import printable, redact

EXIT_FAILED = 3
EXIT_UNREAD = 128 + signal.SIGPIPE
# --help exits with 0; a SIGTERM with its number, by our handler and by Ray's, which replaces it on import.
_EXITS = {None: 0, 0: 0, signal.SIGTERM: 128 + signal.SIGTERM}
_STDOUT = 1


def run(main: Callable[[], int]) -> int:
    """The exit status of a command, whatever happens in it.

    Errors raised on purpose end it with one message on stderr and their own status; anything else is a defect and
    shows its traceback (3). SIGINT ends it with 130, SIGTERM with 143, a reader of its output that has gone away
    (`... | head`) with 141; all three after the `finally` blocks on the way.
    """
    os.environ.update({**SPINS, **os.environ})
    signal.signal(signal.SIGTERM, _stop)
    status = _status(main)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or EXIT_UNREAD
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # or Python complains about the rest at its own end
    return status


def _status(main: Callable[[], int]) -> int:
    try:
        return main()
    except RayYoloError as error:
        text = redact(f"{type(error).__name__}: {error}")
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as stop:
        if stop.code not in _EXITS:
            raise
        return _EXITS[stop.code]
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(_STDOUT):
            return EXIT_UNREAD
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            place = f"{error.filename}: " if error.filename else ""
            print(redact(f"{place}{error.strerror}; free or repair the storage and run the same command again"),
                  file=sys.stderr)
            return EXIT_FAILED
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        return EXIT_FAILED


def _stop(signum: int, frame: object) -> None:
    raise SystemExit(signum)


def _has_no_reader(file_number: int) -> bool:
    """Whether a pipe's other end is closed; a BrokenPipeError alone may be that of any socket."""
    poll = select.poll()
    poll.register(file_number, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
