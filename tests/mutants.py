"""Do the tests notice a fault? mutmut puts faults into the changed files, one at a time, and runs their unit tests.

`make mutants` does so for each file of the package that differs from the last commit, or from the commit SINCE;
`make mutants FILES="ray_yolo/engine/loop.py"` for these files. Printed are the faults that no test noticed. Not
each of them needs a test: some change nothing (`strict=True` of lists that are equally long), and of some the tests
are in tests/process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Texts of messages and of errors: a test of each word would be a copy of it.
UNCHANGED = (r"\braise\b", r"\.(debug|info|warning|error|exception)\(")

CONFIGURATION = """

[tool.mutmut]
source_paths = ["ray_yolo"]
only_mutate = {files}
do_not_mutate_patterns = {unchanged}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider"]
also_copy = {copied}
process_isolation = "forkserver"
"""


def changed_files(since: str) -> list[str]:
    """The package's files that differ from the commit `since`, and those that git does not know yet."""
    changed = git("diff", "--name-only", "--diff-filter=d", since, "--", "ray_yolo")
    new = git("ls-files", "--others", "--exclude-standard", "--", "ray_yolo")
    return [name for name in changed + new if name.endswith(".py")]


def git(*arguments: str) -> list[str]:
    """The lines that git prints; raises `CalledProcessError` for a commit that it does not know."""
    ended = subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True)
    return ended.stdout.splitlines()


def copy_clone(folder: Path) -> list[str]:
    """Copies git's files and those that it does not know yet. Returns the paths that mutmut has to copy itself: all but
    the modules of the package."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard")
    present = [name for name in names if os.path.lexists(ROOT / name)]
    for name in present:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)  # the search spaces are a link to a folder
    paths = set()
    for name in present:
        top = name.split("/")[0]
        if top != "ray_yolo":
            paths.add(top)
        elif not name.endswith(".py"):
            paths.add(name)
    return sorted(paths)


def nearest_tests(files: Sequence[str]) -> list[str]:
    """The unit tests of the rooms that the files belong to: `tests/unit/ROOM`, or `tests/unit/test_COMMAND.py`.

    Beside them, the table of messages, which has those of all rooms.
    """
    tests = set()
    for file in files:
        room = Path(file).parts[1]
        tests.add(f"tests/unit/test_{room}" if room.endswith(".py") else f"tests/unit/{room}")
    found = [test for test in sorted(tests) if (ROOT / test).exists()]
    return [*found, "tests/unit/test_messages.py"] if found else []


def mutmut(folder: Path, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    # The package is imported from mutmut's copy; compiled files of an earlier fault must not be used.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "mutmut", *arguments)
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=capture, text=True)


def survivors(folder: Path) -> list[str]:
    """The names of the faults that no test noticed."""
    printed = mutmut(folder, "results", capture=True).stdout.splitlines()
    return [line.split(":")[0].strip() for line in printed if line.endswith(": survived")]


def fault(folder: Path, name: str) -> str:
    """The changed lines of one fault, below its name."""
    difference = mutmut(folder, "show", name, capture=True).stdout.splitlines()
    changed = [line for line in difference if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join((name, *changed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or mutmut's status if the tests fail without a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="files of the package; default: those that changed")
    parser.add_argument("--since", default="HEAD~1", help="the commit to compare with [HEAD~1]")
    chosen = parser.parse_args(arguments)
    try:
        files = chosen.files or changed_files(chosen.since)
    except subprocess.CalledProcessError as error:
        parser.error(f"--since {chosen.since}: {error.stderr.strip()}; give a commit or a tag")
    for file in files:
        if not (ROOT / file).is_file() or Path(file).parts[0] != "ray_yolo":
            parser.error(f"{file}: is no file of the package; give a path such as ray_yolo/data/dataset.py")
    if not files:
        print(f"no file of ray_yolo/ differs from {chosen.since}")
        return 0
    tests = nearest_tests(files)
    if not tests:  # without a selection, pytest would run all tests
        parser.error(f"{', '.join(files)}: tests/unit has no tests of it; give a file of a room that has some")

    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copied = copy_clone(folder)
        lists = {"files": files, "unchanged": UNCHANGED, "tests": tests, "copied": copied}
        toml = {key: json.dumps(values) for key, values in lists.items()}  # TOML writes lists of strings as JSON does
        with (folder / "pyproject.toml").open("a") as file:
            file.write(CONFIGURATION.format(**toml))
        ended = mutmut(folder, "run", "--max-children", str(os.cpu_count() or 1))
        if ended.returncode:
            return ended.returncode
        unnoticed = survivors(folder)
        for one in unnoticed:
            print(fault(folder, one), end="\n\n")
        print(f"{len(unnoticed)} faults were not noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
