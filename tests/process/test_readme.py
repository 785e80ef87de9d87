"""Runs every block of the README as a new user would: from the installed wheel, in an empty folder, with an empty
environment. A block that needs more states it; then at least its flags must be ours.
"""

from __future__ import annotations

import fnmatch
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.test_readme import BLOCKS, DEMO, EXTRA, HEAD, MINUTES, ROOT

HEAD_ADDRESS = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class NewUser:
    """A Python with the package, an empty folder, and nothing else in the environment."""

    programs: Path
    home: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.home)}

    def run(self, code: str, language: str = "bash") -> str:
        """The output of a block, which must succeed."""
        command = ["bash", "-euc", code] if language == "bash" else ["python", "-c", code]
        done = subprocess.run([shutil.which(command[0], path=self.environment["PATH"]) or "", *command[1:]],
                              cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def await_jobs(self, address: str, environment: Mapping[str, str]) -> None:
        """Wait until a head accepts jobs: its agent starts some seconds later."""
        deadline = time.monotonic() + 300
        command = [self.programs / "ray", "job", "submit", "--address", address, "--", "true"]
        while (reply := subprocess.run(command, env=environment, capture_output=True, text=True)).returncode:
            assert time.monotonic() < deadline, reply.stderr
            time.sleep(1)

    @contextmanager
    def head(self, **variables: str) -> Iterator[str]:
        """`ray start --head` with its own ports and temporary folder; gives the address of its dashboard.

        The agent also gets a port of its own. A head whose agent finds the default one in use never accepts a job.
        """
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [server.getsockname()[1] for server in (one, other)]
        log = self.home / "head.log"
        environment = {**self.environment, **variables}
        with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short, log.open("w") as stream:
            process = subprocess.Popen(
                [self.programs / "ray", "start", "--head", "--block", "--num-cpus=4", "--port=0", f"--temp-dir={short}",
                 f"--dashboard-port={ports[0]}", f"--ray-client-server-port={ports[1]}",
                 "--dashboard-agent-listen-port=0"],
                cwd=self.folder, env={**environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}, stdout=stream,
                stderr=stream)
            try:
                while "Ray runtime started" not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                address = f"http://127.0.0.1:{ports[0]}"
                self.await_jobs(address, environment)
                yield address
            finally:
                process.terminate()
                process.wait(60)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves folders in its source."""
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
    """The programs of an environment with the wheel; its dependencies are those of the tests' environment."""
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
def new_user(programs: Path, tmp_path: Path) -> NewUser:
    for name in ("home", "empty"):
        (tmp_path / name).mkdir()
    return NewUser(programs, tmp_path / "home", tmp_path / "empty")


def test_contents_of_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ray_yolo").rglob("*.py")}
    spaces = {f"ray_yolo/tune_spaces/{path.name}" for path in (ROOT / "tune_spaces").glob("*.yaml")}
    assert spaces
    assert {name for name in files if ".dist-info/" not in name} == modules | spaces | {"ray_yolo/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_blocks_run_one_after_the_other(new_user: NewUser) -> None:
    blocks = [block for block in BLOCKS if block.needs in (None, EXTRA, HEAD)]
    assert len(blocks) >= 6
    for block in blocks:
        if block.needs == HEAD:
            with new_user.head() as address:
                assert HEAD_ADDRESS in block.code
                new_user.run(block.code.replace(HEAD_ADDRESS, address))
        else:
            new_user.run(block.code, block.language)
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    left = [path.name for path in new_user.folder.iterdir()]
    assert [name for name in left if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)] == []
    assert not (new_user.home / ".ray").exists()  # a token there would affect every cluster that starts later


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_job_block_sends_the_token_of_its_user(new_user: NewUser) -> None:
    """Where the file exists, `ray start --head` asks for it."""
    token = new_user.home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    (block,) = [block for block in BLOCKS if block.needs == HEAD]
    with new_user.head(RAY_AUTH_MODE="token") as address:
        code = block.code.replace(HEAD_ADDRESS, address)
        assert "best epoch" in new_user.run(code)
        refused = subprocess.run(["bash", "-c", code.partition("\n")[2]], cwd=new_user.folder, env=new_user.environment,
                                 capture_output=True, text=True)
        assert refused.returncode  # its first line sends the token


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_blocks_that_take_minutes_run(new_user: NewUser) -> None:
    blocks = [block for block in BLOCKS if block.needs == MINUTES]
    assert blocks
    for block in blocks:
        new_user.run(block.code, block.language)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_with_a_working_dir_stores_in_the_home_folder(new_user: NewUser) -> None:
    (block,) = [block for block in BLOCKS if block.needs == HEAD]
    (new_user.folder / "notes.txt").touch()
    with new_user.head() as address:
        output = new_user.run(block.code.replace(HEAD_ADDRESS, f"{address} --working-dir ."))
    stored = new_user.home / "ray-yolo"
    assert f"the run is in {stored / 'runs' / 'train' / 'exp'}\n" in output
    assert (stored / "runs" / "train" / "exp" / "weights" / "best.pt").exists()
    assert (stored / "mlflow.db").exists()
    assert [path.name for path in new_user.folder.iterdir()] == ["notes.txt"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_prediction_finds_figures_in_all_pictures(new_user: NewUser) -> None:
    """Trained as `make demo` trains, the detector finds most figures of the pictures, at the default confidence."""
    made = subprocess.run(["make", "-n", "-o", ".venv/.base", "demo"], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    new_user.run(made.stdout.replace(".venv/bin/python", "python"))
    (block,) = [block for block in BLOCKS if block.needs == DEMO]
    output = new_user.run(block.code)
    labels, found = ({path.stem: len(path.read_text().splitlines()) for path in folder.glob("*.txt")}
                     for folder in (new_user.home / ".cache/ray_yolo/shapes-v2/labels/val",
                                    new_user.folder / "runs/detect/exp/labels"))
    with_figures = {stem for stem, boxes in labels.items() if boxes}
    assert len(with_figures) > 50, output
    assert len(with_figures & found.keys()) >= 0.95 * len(with_figures), output
    assert sum(found.values()) >= 0.9 * sum(labels.values()), output
