"""What `--dry-run` says is what the start does: it refuses the same, in the same words, and shows what is decided."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from ray_yolo import cli
from ray_yolo.cli import run
from tests.support.desk import Ended
from tests.support.jobs import TINY, make_dataset
from tests.support.weights import make_weights

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": cli.train, "tune": cli.tune, "val": cli.val, "predict": cli.predict, "export": cli.export}
TRAIN = "--data data/data.yaml --model tiny.yaml --imgsz 64 --epochs 1 --mlflow-uri off --noplots"
TUNE = f"{TRAIN} --space space.yaml --trials 2"
REFUSED = [
    (f"train {TRAIN} --data nowhere.yaml", 2, "nowhere.yaml: no such file"),
    (f"train {TRAIN} --model yolov9", 2, "'yolov9' is unknown"),
    (f"train {TRAIN} --model nowhere.yaml", 2, "nowhere.yaml: cannot be read"),
    (f"train {TRAIN} --model coarse.yaml", 2, "the head of coarse.yaml has cells of 64 px"),
    (f"train {TRAIN} --weights nowhere.pt", 2, "nowhere.pt: no such weights file"),
    (f"train {TRAIN} --callbacks nowhere.py", 2, "nowhere.py"),
    (f"train {TRAIN} --set loss.dfl=2", 2, "--set loss.dfl: loss.dfl has no effect: the loss of tiny.yaml does not"),
    (f"tune {TUNE} --space idle.yaml", 2, "idle.yaml:2: copy_paste has no effect: no training label has an outline"),
    (f"train {TRAIN} --num-workers 8 --batch-size 4 --set optimizer.nominal_batch=4", 2, "num_workers: 8 workers"),
    (f"train {TRAIN} --num-workers 0 --gpus-per-worker 1", 4, "gpus_per_worker: 1 was requested"),
    ("train --resume nowhere", 2, "nowhere is neither a run folder"),
    (f"tune {TUNE} --data nowhere.yaml", 2, "nowhere.yaml: no such file"),
    (f"tune {TUNE} --space nowhere.yaml", 2, "space: nowhere.yaml: no such file"),
    (f"tune {TUNE} --warm-start nowhere.csv", 2, "nowhere.csv: cannot be read"),
    (f"tune {TUNE} --weights nowhere.pt", 2, "nowhere.pt: no such weights file"),
    ("val --weights nowhere.pt", 2, "nowhere.pt: no such weights file"),
    ("val --weights w/run/weights/best.pt --data nowhere.yaml", 2, "nowhere.yaml: no such file"),
    ("val --weights w/run/weights/best.pt --data data/data.yaml --gpus-per-worker 1", 4, "gpus_per_worker: 1"),
    ("predict --weights nowhere.pt --source w/val", 2, "nowhere.pt: no such weights file"),
    ("predict --weights w/run/weights/best.pt --source nowhere", 2, "nowhere: no such file or folder"),
    ("predict --weights w/run/weights/best.pt --source w/val --classes 7", 2, "classes: 7 is none"),
    ("predict --weights w/run/weights/best.pt --source w/val --gpus-per-worker 1", 4, "gpus_per_worker: 1"),
    ("export --weights nowhere.pt --format torchscript", 2, "nowhere.pt: no such weights file"),
]

Say = Callable[[str], Ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    make_dataset(folder / "data")
    make_weights(folder / "w")
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    stem = [[-1, 1, "Conv", [8, 3, 2]]] * 6
    (folder / "coarse.yaml").write_text(json.dumps({
        "nc": 2, "anchors": [[10, 13, 16, 30]], "backbone": stem, "head": [[[5], 1, "Detect", ["nc", "anchors"]]]}))
    (folder / "space.yaml").write_text("lr0: [0.001, 0.1]\n")
    (folder / "idle.yaml").write_text("lr0: [0.001, 0.1]\ncopy_paste: [0.0, 0.5]\n")
    return folder


@pytest.fixture
def say(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAY_YOLO_CACHE", str(folder / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray_yolo.runtime.preflight.is_bf16_faster", lambda: False)
    before = signal.getsignal(signal.SIGTERM)

    def enter(line: str) -> Ended:
        command, *words = line.split()
        capsys.readouterr()
        status = run(lambda: COMMANDS[command](words))
        return Ended(status, *capsys.readouterr(), None)

    yield enter
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("line", "status", "message"), REFUSED)
def test_what_a_start_refuses_its_dry_run_refuses_in_the_same_words(
        say: Say, folder: Path, line: str, status: int, message: str) -> None:
    start, dry = say(line), say(f"{line} --dry-run")
    assert (start.status, start.out, len(start.err.splitlines())) == (status, "", 1), start.err
    assert message in start.err
    assert dry == start
    assert not (folder / "runs").exists()


def test_a_dry_run_leaves_open_what_only_a_running_cluster_knows(say: Say) -> None:
    dry = say(f"train {TRAIN} --num-workers 2 --address 10.0.0.1:6379 --batch-size -1 --dry-run")
    assert dry.status == 0, dry.err
    assert "# batch as large as the GPUs' memory holds, precision auto (bf16 where it is fast, else fp32)" in dry.out
    given = say(f"train {TRAIN} --num-workers 2 --address 10.0.0.1:6379 --batch-size -1 --gpus-per-worker 0 --dry-run")
    assert "# batch 32, microbatch 16, accumulation 2 (64 images per step), precision fp32" in given.out


def test_a_dry_run_shows_the_workers_that_auto_chooses_here_and_that_a_cluster_decides(
        say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # an earlier test may have left it so
    here = say(f"train {TRAIN} --gpus-per-worker 0 --dry-run")
    assert "# in this process, without Ray\n# settings that follow" in here.out, here.err
    assert f"\n{'num_workers: 0':<40}  # default; decided at the start\n" in here.out
    there = say(f"train {TRAIN} --address 10.0.0.1:6379 --dry-run")
    assert "# the cluster decides the number of workers and the batch size\n" in there.out, there.err
    assert f"\n{'num_workers: auto':<40}  # default\n" in there.out
    assert f"\n{'batch_size: null':<40}  # default\n" in there.out


def test_the_dry_run_of_a_sweep_shows_a_trials_recipe(say: Say, folder: Path) -> None:
    dry = say(f"tune {TUNE} --workers-per-trial 2 --gpus-per-worker 0 --dry-run")
    assert dry.status == 0, dry.err
    assert yaml.safe_load(dry.out)["batch_size"] == 32
    assert "# batch 32, microbatch 16, accumulation 2" in dry.out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("line", [
    "val --weights w/run/weights/best.pt --data data/data.yaml",
    "predict --weights w/run/weights/best.pt --source w/val",
    "export --weights w/run/weights/best.pt --format torchscript"])
def test_the_dry_run_of_weights_shows_the_size_that_they_were_trained_at(say: Say, folder: Path, line: str) -> None:
    dry = say(f"{line} --dry-run")
    assert dry.status == 0, dry.err
    assert "\nimgsz: 64                                 # default; decided at the start\n" in dry.out
    assert not (folder / "runs").exists()
    assert not list(folder.rglob("*.torchscript"))


def test_a_dry_run_reports_given_settings_without_effect(say: Say, folder: Path) -> None:
    (folder / "high.yaml").write_text("copy_paste: 0.1\nloss.dfl: 2.0\n")
    dry = say(f"train {TRAIN} --hyp high.yaml --classes 0 1 --priority 2 --num-workers 0 --gpus-per-worker 0 --dry-run")
    assert dry.status == 0, dry.err
    lines = [line for line in dry.out.splitlines() if line.startswith("# no effect: ")]
    assert sorted(lines) == [
        "# no effect: augment.copy_paste (no training label has an outline)",
        "# no effect: classes (the training has the same images and labels without it)",
        "# no effect: loss.dfl (the loss of tiny.yaml does not read it)",
        "# no effect: priority (the training is in this process, without Ray)"]
