"""The errors that a user can cause or must know of, and the exit code each one ends the command with.

Every message says what is wrong, where (file:line or config path) and what to do. `exits.run` turns
them into one line on stderr without a traceback; anything else is a defect of ours and keeps its traceback.
"""


class RayYoloError(Exception):
    """Base of every error raised on purpose; `exit_code` is the command's exit status."""

    exit_code = 3


class InputError(RayYoloError, ValueError):
    """A flag, a configuration value or a file that cannot be used (exit 2, before any cluster work)."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value is unknown, ill-typed or out of range; names its origin and its path."""


class DatasetError(InputError):
    """A data set cannot be read as described; names the file and the line."""


class CheckpointError(InputError):
    """A weights file or checkpoint cannot be used: wrong format, wrong model, or damaged."""


class StorageError(InputError):
    """Where runs are stored refuses to be read or written."""


class TrainingError(RayYoloError):
    """Training itself failed (exit 3): the loss stays non-finite, checkpoints cannot be written, ..."""


class LostWorkersError(TrainingError):
    """Processes or nodes were lost, more often than is put up with: nothing that the recipe has done (exit 3)."""


class PeerLostError(LostWorkersError):
    """A collective operation failed because another worker is gone, or does not answer; this one is sound."""


class WrongWeightsError(RuntimeError):
    """This worker has other weights than the rest. Not one of ours that ends a command: another one takes its place."""


class WorkerLeftError(RuntimeError):
    """This worker was asked to leave, and has left between two steps. No failure: another one takes its place."""


class ResourcesError(RayYoloError):
    """The cluster can never provide what was asked for (exit 4)."""

    exit_code = 4
