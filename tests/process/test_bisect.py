"""`git bisect run` finds the commit that changed a bit, with the script of docs/exactness.md as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text()
TRAINER = """
import sys
from pathlib import Path

from tests.unit.runs.test_verification import make

words = sys.argv[1:]
kind = Path("trainer.txt").read_text().strip()
if kind == "broken":
    raise SystemExit(3)
folder = Path(words[words.index("--project") + 1]) / words[words.index("--name") + 1]
make(folder, {2: 0.5, 4: float(kind)})
"""
PYTHON = """#!/bin/sh
if [ "$2" = ray_yolo.train ]; then shift 2; exec "$REAL_PYTHON" "$TRAINER" "$@"; fi
exec "$REAL_PYTHON" "$@"
"""


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_bisect_finds_the_commit_that_changed_the_bits(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [script] = [block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "--exit-code" in block]
    (tmp_path / "bisect.sh").write_text(script)
    (tmp_path / "trainer.py").write_text(TRAINER)
    stub = tmp_path / "bin" / "python"  # trains in no time; verify is the real one
    stub.parent.mkdir()
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    for name, value in {"PATH": f"{stub.parent}:{os.environ['PATH']}", "REAL_PYTHON": sys.executable,
                        "TRAINER": str(tmp_path / "trainer.py"), "PYTHONPATH": str(Path(__file__).parents[2]),
                        "TMPDIR": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_AUTHOR_NAME": "a",
                        "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}.items():
        monkeypatch.setenv(name, value)
    clone = tmp_path / "clone"
    clone.mkdir()
    git(clone, "init", "-q")
    commits = []
    for number, kind in enumerate(["0.25", "0.25", "broken", "0.25", "0.125", "0.125"]):
        (clone / "trainer.txt").write_text(f"{kind}\n")
        (clone / "number.txt").write_text(f"{number}\n")
        git(clone, "add", ".")
        git(clone, "commit", "-qm", kind)
        commits.append(git(clone, "rev-parse", "HEAD"))
    git(clone, "checkout", "-q", commits[0])
    reference = tmp_path / "runs"
    subprocess.run([stub, "-m", "ray_yolo.train", "--project", reference, "--name", "good"], cwd=clone, check=True)
    monkeypatch.setenv("REFERENCE", str(reference / "good"))
    git(clone, "bisect", "start", commits[-1], commits[0])
    output = git(clone, "bisect", "run", "bash", "../bisect.sh")
    assert f"{commits[4]} is the first bad commit" in output
    assert commits[2] in re.findall(r"git bisect skip (\w+)", git(clone, "bisect", "log"))
