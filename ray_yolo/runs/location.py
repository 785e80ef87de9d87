"""Where a run is stored: the functions whose result differs between runs in a bucket and runs in a folder.

Five modules deal with the place of a run. Each imports only modules below it in this table:

| module | question |
|---|---|
| `run_dir` | which run does a command continue or create, and who holds it? |
| `location` | is it shown, published and read by its folder or by its address? |
| `remote_run` | what is stored at its address, and how is the working copy kept equal to it? |
| `folders` | which folder do the settings name, which new name is free, and is a folder locked? |
| `working_copy` | which folder of this machine belongs to an address, and which address to a folder? |

The code for buckets is imported only for a run in one: it needs torch, whose import takes seconds.
"""

from __future__ import annotations

from pathlib import Path

from ray_yolo.core.errors import InputError
from ray_yolo.runs.folders import is_held
from ray_yolo.runs.run_record import RECORD_FILE
from ray_yolo.runs.working_copy import address_of, is_leased
from ray_yolo.storage.store import is_address, open_store


def location(folder: Path) -> str:
    """The location of a run as shown to users: its address in a bucket, else its folder."""
    return address_of(folder) or str(folder)


def is_active(folder: Path) -> bool:
    """Whether a process trains the run: one on this machine, or one anywhere for a run in a bucket."""
    return is_held(folder) or is_leased(folder)


def publish(folder: Path) -> None:
    """Upload the results in a folder if they belong in a bucket.

    Raises:
        RayYoloError: if storage refuses.
    """
    address = address_of(folder)
    if address:
        from ray_yolo.runs.remote_run import put_results

        put_results(folder, address)


def local_folder(run: str, *, whole: bool = True) -> Path:
    """The folder of a run; for an address a downloaded copy, for reading only.

    Args:
        whole: with all files; otherwise the log and the record only.

    Raises:
        InputError: if there is no run at the address, or storage refuses.
    """
    if not is_address(run):
        return Path(run)
    from ray_yolo.runs.remote_run import download_copy

    return download_copy(run, whole=whole)


def run_names(project: str) -> list[str]:
    """The names of the runs and sweeps of a project."""
    if is_address(project):
        store = open_store(project)
        try:
            folders = [entry.name.rstrip("/") for entry in store.list() if entry.name.endswith("/")]
        except OSError as error:
            raise InputError(f"{project}: {error}") from None
        return sorted(folders)
    return sorted(folder.name for folder in Path(project).glob("*") if _may_be_run(folder))


def _may_be_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or cannot be entered."""
    try:
        return (folder / RECORD_FILE).stat() is not None
    except PermissionError:
        return True
    except OSError:
        return False
