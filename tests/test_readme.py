"""Every command block of the README is run here as a newcomer would run it: from the installed wheel, in an empty
folder, with nothing in the environment. A block that needs more than that says what; then at least its flags must be
ours.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from ray_yolo.cli import parse_export, parse_predict, parse_train, parse_tune, parse_val

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:<!-- needs: (?P<needs>[^>]*) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)
EXTRA, HEAD, MINUTES = "pip install '.[export]'", "ray start --head", "minutes"  # which tests can have
HEAD_ADDRESS = "http://127.0.0.1:8265"
PARSERS = {"train": parse_train, "val": parse_val, "predict": parse_predict, "export": parse_export, "tune": parse_tune}


class Block(NamedTuple):
    needs: str | None
    language: str
    code: str


TEXT = (ROOT / "README.md").read_text()
BLOCKS = [Block(*match.group("needs", "language", "code")) for match in BLOCK.finditer(TEXT)]


@dataclass(frozen=True)
class Newcomer:
    """Somebody who has a Python with the package, an empty folder, and nothing in the environment."""

    programs: Path
    home: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.home)}

    def run(self, code: str, language: str = "bash") -> str:
        """What a block writes; it must succeed."""
        command = ["bash", "-euc", code] if language == "bash" else ["python", "-c", code]
        done = subprocess.run([shutil.which(command[0], path=self.environment["PATH"]) or "", *command[1:]],
                              cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def await_jobs(self, address: str) -> None:
        """Wait until a head takes jobs: its agent comes up some seconds after it."""
        deadline = time.monotonic() + 300
        command = [self.programs / "ray", "job", "submit", "--address", address, "--", "true"]
        while (tried := subprocess.run(command, env=self.environment, capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline, tried.stderr
            time.sleep(1)

    @contextmanager
    def head(self) -> Iterator[str]:
        """`ray start --head`, with ports and a temporary folder of its own; the address of its dashboard.

        The agent's port too: the agent of any other Ray on the machine listens at the default one, and a head whose
        agent finds it taken never accepts a job.
        """
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [each.getsockname()[1] for each in (one, other)]
        log = self.home / "head.log"
        with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short, log.open("w") as stream:
            process = subprocess.Popen(
                [self.programs / "ray", "start", "--head", "--block", "--num-cpus=4", "--port=0", f"--temp-dir={short}",
                 f"--dashboard-port={ports[0]}", f"--ray-client-server-port={ports[1]}",
                 "--dashboard-agent-listen-port=0"],
                cwd=self.folder, env={**self.environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}, stdout=stream,
                stderr=stream)
            try:
                while "Ray runtime started" not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                address = f"http://127.0.0.1:{ports[0]}"
                self.await_jobs(address)
                yield address
            finally:
                process.terminate()
                process.wait(60)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since builders leave folders behind in what they build."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("ray_yolo", "tune_spaces"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(copy / "dist"), str(copy))
    (built,) = (copy / "dist").iterdir()
    return built


def pip(*arguments: str, python: str | Path = sys.executable) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--python", python, arguments[0], "--quiet", "--no-deps", "--no-index",
                    "--disable-pip-version-check", *arguments[1:]], check=True)


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel; what the wheel depends on is borrowed from the tests' own."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    python = folder / "bin" / "python"
    pip("install", str(wheel), python=python)
    ray = folder / "bin" / "ray"
    ray.write_text(f"#!{python}\nfrom ray.scripts.scripts import main\n\nmain()\n")
    ray.chmod(0o755)
    return folder / "bin"


@pytest.fixture
def newcomer(programs: Path, tmp_path: Path) -> Newcomer:
    for name in ("home", "empty"):
        (tmp_path / name).mkdir()
    return Newcomer(programs, tmp_path / "home", tmp_path / "empty")


def test_no_command_block_escapes() -> None:
    assert TEXT.count("```bash") + TEXT.count("```python") == len(BLOCKS)


def test_what_a_block_needs_is_said_to_the_reader_too() -> None:
    for needs in (EXTRA, HEAD):
        before = TEXT.partition(f"<!-- needs: {needs} -->")[0].splitlines()[-2]
        assert f"`{needs}`" in before


def test_the_wheel_has_the_package_with_its_search_spaces_and_its_licence_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ray_yolo").rglob("*.py")}
    spaces = {f"ray_yolo/tune_spaces/{path.name}" for path in (ROOT / "tune_spaces").glob("*.yaml")}
    assert spaces
    assert {name for name in held if ".dist-info/" not in name} == modules | spaces | {"ray_yolo/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_blocks_run_one_after_the_other(newcomer: Newcomer) -> None:
    blocks = [block for block in BLOCKS if block.needs in (None, EXTRA, HEAD)]
    assert len(blocks) >= 6
    for block in blocks:
        if block.needs == HEAD:
            with newcomer.head() as address:
                assert HEAD_ADDRESS in block.code
                newcomer.run(block.code.replace(HEAD_ADDRESS, address))
        else:
            newcomer.run(block.code, block.language)
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    left = [path.name for path in newcomer.folder.iterdir()]
    assert [name for name in left if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)] == []
    assert not (newcomer.home / ".ray").exists()  # a token there would change every cluster that is started later


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_blocks_that_need_minutes_run_too(newcomer: Newcomer) -> None:
    blocks = [block for block in BLOCKS if block.needs == MINUTES]
    assert blocks
    for block in blocks:
        newcomer.run(block.code, block.language)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_that_brings_its_folder_stores_at_home(newcomer: Newcomer) -> None:
    (block,) = [block for block in BLOCKS if block.needs == HEAD]
    (newcomer.folder / "notes.txt").touch()
    with newcomer.head() as address:
        told = newcomer.run(block.code.replace(HEAD_ADDRESS, f"{address} --working-dir ."))
    stored = newcomer.home / "ray-yolo"
    assert f"stored in {stored / 'runs' / 'train' / 'exp'}\n" in told
    assert (stored / "runs" / "train" / "exp" / "weights" / "best.pt").exists()
    assert (stored / "mlflow.db").exists()
    assert [path.name for path in newcomer.folder.iterdir()] == ["notes.txt"]


def test_commands_of_the_other_blocks_are_accepted() -> None:
    code = "".join(block.code for block in BLOCKS if block.needs).replace("\\\n", " ")
    commands = re.findall(r"python -m ray_yolo\.(\w+) (.*)", code)
    assert {name for name, _ in commands} >= {"train", "tune", "export"}
    for name, flags in commands:
        PARSERS[name](shlex.split(flags, comments=True))
