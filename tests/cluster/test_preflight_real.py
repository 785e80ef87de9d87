"""What a training is refused for on a cluster of two machines, how soon, and in which words.

    python -m pytest -m root -s tests/cluster/test_preflight_real.py    # the table of docs/cluster.md
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest

import ray_yolo
from tests.support import machines
from tests.support.machines import Machines, wait_for

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(1800),
              pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "-")]

CODE = Path(ray_yolo.__file__).parent
TORCH = next(Path(str(distribution("torch").locate_file(file)))
             for file in distribution("torch").files or () if file.name == "METADATA")
HEAD = "10.77.0.1:6379"
RAY = f"exec {sys.executable} -c 'from ray.scripts.scripts import main; main()' start --num-cpus=1 --block " \
      "--object-store-memory=100000000"
SCRIPTS = {"n1": f"{RAY} --head --node-ip-address=10.77.0.1 > n1.log 2>&1",
           "n2": f"until (echo > /dev/tcp/10.77.0.1/6379) 2> /dev/null; do sleep 1; done\n"
                 f"{RAY} --address={HEAD} --node-ip-address=10.77.0.2 > n2.log 2>&1"}
NODES = "import ray; ray.init('auto', log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()), 'alive')"


class Fault(NamedTuple):
    """What is wrong on n2, how that is brought about, and what is to be said of it."""

    name: str
    mount: str  # words of mount, the last of which is what is hidden; '': nothing
    status: int
    line: str
    flags: str = ""


FAULTS = (
    Fault("nothing", "", 0, "done: 1 epoch"),  # and then the data set is there
    Fault("one line of our code is another", f"--bind {{folder}}/code {CODE}", 4, "node n2 (10.77.0.2) has ray_yolo "),
    Fault("another torch", f"--bind {{folder}}/METADATA {TORCH}", 4, "n2 (10.77.0.2) has torch 1.0.0, the driver "),
    Fault("no data there", "-t tmpfs none {folder}/cache/shapes-v2", 2, "data: node n2 (10.77.0.2) lacks "),
    Fault("storage is not mounted", "-t tmpfs none {folder}/disk", 2, "path: node n2 (10.77.0.2) does not see "),
    Fault("storage is read-only", "--bind -o ro {folder}/disk {folder}/disk", 2, "n2 (10.77.0.2) cannot write to "),
    Fault("more workers than there are CPUs", "", 4, "use --num-workers 2, ", "--num-workers 3"),
    Fault("no GPU", "", 4, "--gpus-per-worker 0, or add nodes", "--num-workers 2 --gpus-per-worker 1"),
    Fault("little shared memory", "-t tmpfs -o size=64m none /dev/shm", 0, "node n2 (10.77.0.2): only 67 MB free"),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Machines, Path]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:  # /tmp is each node's own
        folder = Path(name)
        for part in ("home", "cache", "disk/storage"):
            (folder / part).mkdir(parents=True)
        shutil.copytree(CODE, folder / "code", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
        source = folder / "code" / "models" / "criterion.py"
        source.write_text(source.read_text() + "# another line\n")
        settings = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": f"{name}/home", "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_YOLO_CACHE": f"{name}/cache", **machines.PATIENCE}
        with Machines(folder, SCRIPTS, settings) as both:
            wait_for(lambda: "2 alive" in both.run("n1", sys.executable, "-c", NODES).stdout)
            yield both, folder


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_node_that_is_unfit_is_named_before_anything_begins(nodes: tuple[Machines, Path], fault: Fault) -> None:
    both, folder = nodes
    *how, hidden = words = fault.mount.format(folder=folder).split() or [""]
    if hidden:
        done = both.run("n2", "mount", *words)
        assert done.returncode == 0, (how, done.stdout)
    began, runs = time.monotonic(), len(list((folder / "disk/storage").rglob("run.json")))
    messages = both.run(
        "n1",
        sys.executable,
        "-m",
        "ray_yolo.train",
        "--data",
        "shapes",
        "--model",
        "yolov5n",
        "--imgsz",
        "64",
        "--epochs",
        "1",
        "--noplots",
        "--mlflow-uri",
        "off",
        "--storage-path",
        folder / "disk/storage",
        *(fault.flags or "--num-workers 2").split(),
    )
    seconds = time.monotonic() - began
    if hidden:
        assert both.run("n2", "umount", hidden).returncode == 0
    lines = [line for line in messages.stdout.splitlines() if fault.line in line]
    print(f"\n| {fault.name} | {seconds:.0f} s | {messages.returncode} | {lines[-1] if lines else ''} |")
    assert messages.returncode == fault.status, messages.stdout
    assert lines, messages.stdout
    assert "Traceback" not in messages.stdout
    assert len(list((folder / "disk/storage").rglob("run.json"))) == runs + (fault.status == 0)
