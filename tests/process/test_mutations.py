"""Mutation tests: each row of the table breaks one thing in a copy of the package, and the nearest tests must fail.

If the text of a row is no longer in its file, replace it by the code that now does the same. If no test fails for a
row, add a test. All of them: `python -m pytest -m slow tests/process/test_mutations.py`; some: `-k loop`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.test_mutations import MUTATIONS, ROOT, Mutation

SECONDS = 900  # for the tests of one row
NOT_HERE = "not ray and not slow and not gpu and not realdata and not root and not azure"


def label(mutation: Mutation) -> str:
    """room-file-before, to choose some with -k."""
    return f"{mutation.file.removesuffix('.py')}-{re.sub(r'[^a-z0-9]+', ' ', mutation.before.lower()).strip()[:40]}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests."""
    folder = tmp_path_factory.mktemp("mutants")
    for name in ("ray_yolo", "tests", "tune_spaces"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The tests in the copy. Nothing compiled is kept: a change within one second would not be noticed."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", NOT_HERE, *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS,
                          check=False)


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_in_an_unbroken_copy_all_these_tests_pass(copy: Path) -> None:
    files = dict.fromkeys(path for mutation in MUTATIONS for path in mutation.files())
    ended = run(copy, list(files))
    assert ended.returncode == 0, ended.stdout[-3000:]
    where = "import ray_yolo; print(ray_yolo.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    shown = subprocess.run([sys.executable, "-c", where], cwd=copy, env=environment, capture_output=True, text=True,
                           check=True)
    assert Path(shown.stdout.strip()).is_relative_to(copy)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=label)
def test_the_nearest_tests_notice(copy: Path, mutation: Mutation) -> None:
    path = copy / "ray_yolo" / mutation.file
    sound = path.read_text()
    path.write_text(sound.replace(mutation.before, mutation.after))
    try:
        ended = run(copy, mutation.files())
    finally:
        path.write_text(sound)
    assert ended.returncode == 1, f"no test failed:\n{ended.stdout[-2000:]}{ended.stderr[-500:]}"
    assert re.search(r"^(FAILED|ERROR) tests/", ended.stdout, re.MULTILINE)
