"""The errors that a user can cause or must be informed about, each with the exit code of the command.

Every message states what is wrong, where (file:line or config path) and what to do. The command prints it as one line
on stderr without a traceback. Any other exception is a bug in this package and keeps its traceback.
"""

from __future__ import annotations

import traceback


class RayYoloError(Exception):
    """Base of every error raised on purpose; `exit_code` is the command's exit status."""

    exit_code = 3


class InputError(RayYoloError, ValueError):
    """A flag, a configuration value or a file cannot be used (exit 2, before any cluster work)."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value is unknown, of the wrong type or out of range; names its origin and its path."""


class DatasetError(InputError):
    """A dataset cannot be read as described; names the file and the line."""


class CheckpointError(InputError):
    """A weights file or checkpoint cannot be used: wrong format, wrong model, or damaged."""


class StorageError(InputError):
    """The storage of the runs cannot be read or written."""


class TrackingError(RayYoloError):
    """An MLflow server does not answer or refuses (exit 3). The run folder is complete; run the command again."""


class TrainingError(RayYoloError):
    """Training failed (exit 3): the loss stays non-finite, checkpoints cannot be written, and so on."""


class MovedRunError(TrainingError):
    """The run folder was moved, removed or replaced while its training ran (exit 3)."""


class DivergedError(TrainingError):
    """The loss or the gradient stays not finite: the recipe is the cause (exit 3)."""


class WorkerError(TrainingError):
    """A worker's code has failed, not the files, the storage or the processes around it: in a sweep, the recipe is the
    cause, such as a step that needs more memory than its GPU has (exit 3)."""


class LostWorkersError(TrainingError):
    """More workers or nodes were lost than allowed: they departed unasked. The recipe is not the cause (exit 3)."""


class PeerDepartedError(LostWorkersError):
    """A collective operation failed because another worker has departed or does not answer; this worker is healthy."""


class LoaderError(LostWorkersError):
    """A loader process has ended, or cannot pass on its batches (exit 3); on a cluster the worker is replaced."""


class WrongWeightsError(RuntimeError):
    """This worker's weights differ from those of the others. It does not end the command: the worker is replaced."""


class WorkerLeftError(RuntimeError):
    """This worker has left between two steps as requested. Not a failure: the worker is replaced."""


class ResourcesError(RayYoloError):
    """The cluster can never provide the requested resources (exit 4)."""

    exit_code = 4


def release_frames(error: BaseException) -> None:
    """Release the local variables of all frames of an error, and of the errors from which it was raised.

    A kept error keeps its traceback, hence the frames, hence all objects of what has failed. The traceback stays
    printable.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)  # frames that still run are left alone
        pending += [each.__cause__, each.__context__]
