"""cluster/slurm.sh on a SLURM of two nodes, with real Ray and a real training: it is stopped, queued again, and
ends with the weights of an uninterrupted training.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import PATIENCE

ROOT = Path(__file__).parents[2]
RECIPE = ["--data", "shapes8", "--model", "yolov5n", "--imgsz", "64", "--epochs", "8", "--batch-size", "8",
          "--microbatch", "4", "--exact", "--mlflow-uri", "off", "--noplots"]
SCENARIO = """
job=$(sbatch --parsable --output=job.log "$0" "$@")
log=runs/train/slurm-$job/events.jsonl
saves() { cat "$log" 2>/dev/null | grep -c '"checkpoint"' || true; }
two_more() {
    local least=$(( $(saves) + 2 ))
    until (( $(saves) >= least )); do [[ $(squeue -h -j "$job") ]]; sleep 0.5; done  # a job that is gone ends this
}
two_more; scancel --batch --signal=USR1 "$job"  # as SLURM does before the time limit
until [[ $(squeue -h -j "$job" -o %T) == PENDING ]]; do sleep 0.5; done
scontrol update "JobId=$job" StartTime=now  # SLURM's own is two minutes later
while [[ $(squeue -h -j "$job" -o %T) =~ PENDING|CONFIGURING|RUNNING|COMPLETING ]]; do sleep 1; done
scontrol show job "$job" > ended.txt
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Storage that both nodes see; they have a /tmp of their own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:
        for part in ("home", "bin"):
            (Path(name) / part).mkdir()
        ray = Path(name) / "bin" / "ray"
        ray.write_text(f"#!{sys.executable}\nfrom ray.scripts.scripts import main\n\nmain()\n")
        ray.chmod(0o755)
        yield Path(name)


@pytest.mark.root
@pytest.mark.ray
@pytest.mark.timeout(1500)
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.skipif(not shutil.which("slurmctld"), reason="SLURM is not installed: apt-get install slurmctld slurmd")
def test_a_job_that_is_queued_again_goes_on_and_ends_with_the_same_weights(folder: Path) -> None:
    programs = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": programs, "HOME": str(folder / "home"), "RAY_YOLO_CACHE": str(folder / "cache"),
           "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "300", **PATIENCE}
    uninterrupted = [sys.executable, "-m", "ray_yolo.train", *RECIPE, "--num-workers", "0", "--name", "calm"]
    subprocess.run(uninterrupted, cwd=folder, env=env, check=True, capture_output=True)
    cluster = ROOT / "tests" / "support" / "slurm_cluster.sh"
    done = subprocess.run([cluster, folder / "slurm", "bash", "-euc", SCENARIO, ROOT / "cluster" / "slurm.sh", *RECIPE],
                          cwd=folder, env=env, capture_output=True, text=True)
    messages = (folder / "job.log").read_text()
    assert done.returncode == 0, done.stderr + messages
    ended = (folder / "ended.txt").read_text()
    assert "JobState=COMPLETED" in ended, messages
    assert re.search(r"Requeue=1 Restarts=1", ended)
    (run,) = (folder / "runs" / "train").glob("slurm-*")
    check = [sys.executable, "-m", "ray_yolo.verify", run, folder / "runs" / "train" / "calm"]
    assert subprocess.run(check, env=env, capture_output=True).returncode == 0
    assert "training on 2 workers" in messages
    assert list((folder / "home").glob(".ray_yolo-*")) == []
