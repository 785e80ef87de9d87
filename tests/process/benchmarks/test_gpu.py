"""What `make gpu-test` runs, tried on a CPU with tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ray_yolo.checkpoints import writer
from ray_yolo.config.recipe import Recipe
from ray_yolo.engine import gradients, loading
from ray_yolo.engine.evaluate import EvaluatedBatches
from ray_yolo.inference import export as export_module
from ray_yolo.ops.ema import Ema
from ray_yolo.ops.sharding import TreeNode
from tests.benchmarks import gpu
from tests.support import norm_kernels

ROOT = Path(__file__).parents[3]
ABSENT = ("ray", "mlflow", "pytest", "psutil", "scipy", "matplotlib", "onnx", "onnxruntime", "optuna", "fsspec")
RUN = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    return subprocess.run([sys.executable, "-c", RUN, script, *flags], capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_passes_without_ray_and_mlflow(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--quick", "--write", tmp_path / "table.md")
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table == done.stdout  # each row is there as soon as it is known
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row[1] for row in rows] == ["ok"] * (38 + (find_spec("triton") is not None))


def test_without_a_gpu_it_says_so() -> None:
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no GPU here" in done.stderr


def test_the_speed_row_runs_on_a_cpu() -> None:
    """The rows of speed are the first that a renamed field breaks: nothing else calls them outside a GPU machine."""
    found = gpu.measure_speed("yolov5n", "fp32", 64, batch=2, steps=1, device=torch.device("cpu"))
    assert " images/s (repeats within " in found


CPU = torch.device("cpu")
Patch = pytest.MonkeyPatch


def of_the_first_call(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with another result of its first call: the device's; the CPU's as a reference follows it."""
    calls = []

    def changed(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        result = function(*arguments, **named)
        return change(result) if len(calls) == 1 else result

    return changed


def weigh_classes_more(patch: Patch) -> None:
    """The device's class loss counts 1.2 times."""
    def changed(recipe: Recipe) -> Recipe:
        gains = recipe.loss.model_copy(update={"cls": 1.2 * recipe.loss.cls})
        return recipe.model_copy(update={"loss": gains})

    patch.setattr(gpu, "resolve", of_the_first_call(gpu.resolve, changed))


def drift(patch: Patch) -> None:
    """The average of the weights depends on how many steps this process has taken before."""
    update = Ema.update
    steps = []

    def drifting(self: Ema, *arguments: Any) -> None:
        update(self, *arguments)
        steps.append(None)
        with torch.no_grad():
            next(self.model.parameters()).add_(1e-4 * len(steps))

    patch.setattr(Ema, "update", drifting)


def double_sums(patch: Patch) -> None:
    """The sums that are exchanged are twice what they should be."""
    fold_nodes = gradients.fold_nodes

    def doubled(*arguments: Any) -> dict[TreeNode, list[Tensor]]:
        folded = fold_nodes(*arguments)
        if not dist.is_initialized():
            return folded
        return {node: [2 * part for part in value] for node, value in folded.items()}

    patch.setattr(gradients, "fold_nodes", doubled)


def ignore_aborts(patch: Patch) -> None:
    patch.setattr(gpu.collectives_module, "abort_process_group", lambda: None)


def halve_rates_in_ddp(patch: Patch) -> None:
    """Inside DDP, an optimiser's step is half as long."""
    set_rates = gpu.loop.set_rates

    def halved(optimizer: torch.optim.Optimizer, rates: Any) -> None:
        factor = 0.5 if dist.is_initialized() else 1.0
        set_rates(optimizer, rates._replace(lr=tuple(factor * rate for rate in rates.lr)))

    patch.setattr(gpu.loop, "set_rates", halved)


def lose_a_field(patch: Patch) -> None:
    """The loop asks for a field that the learner does not have any more."""
    launch = gpu.loop.launch_steps
    patch.setattr(gpu.loop, "launch_steps", lambda learner, *others: launch(learner.absent, *others))


def report_no_epochs(patch: Patch) -> None:
    patch.setattr(gpu, "run_session", lambda job, host, placement, emit: None)


def raise_scores(patch: Patch) -> None:
    """The device's scores are 1 % higher."""
    def raised(result: EvaluatedBatches) -> EvaluatedBatches:
        factors = torch.ones(result.rows.shape[1])
        factors[5] = 1.01
        return result._replace(rows=result.rows * factors)

    patch.setattr(gpu, "evaluate_batches", of_the_first_call(gpu.evaluate_batches, raised))


def copy_too_late(patch: Patch) -> None:
    """The snapshot of a save has weights of a later step."""
    def late(state: dict[str, Any]) -> dict[str, Any]:
        weights = {name: value + 1 for name, value in state["model"].items()}
        return {**state, "model": weights}

    patch.setattr(writer, "copied", late)


def round_hues(patch: Patch) -> None:
    """The device rounds hues, where the host truncates them."""
    def rounded(gains: tuple[float, float, float]) -> np.ndarray:
        table = scaled_hsv(gains)
        table[0] = np.rint(np.arange(256) * gains[0] % 180).astype(np.uint8)
        return table

    scaled_hsv = gpu.augment.scaled_hsv
    patch.setattr(gpu.augment, "scaled_hsv", rounded)


def copy_to_the_start(patch: Patch) -> None:
    """Each part of a batch is copied to the place of the first one."""
    def copied(images: Tensor, place: Tensor) -> None:
        whole = place if place._base is None else place._base
        whole[: len(images)].copy_(images)

    patch.setattr(loading, "copy_images", copied)


def leave_the_activation_out(patch: Patch) -> None:
    """Triton's kernels normalise only."""
    fused_norm = gpu.fused_norm
    patch.setattr(gpu, "fused_norm", lambda: lambda *arguments, silu: fused_norm()(*arguments, silu=False))


def forget_the_weights(patch: Patch) -> None:
    """The kernel's normalised values have no weight."""
    def plain(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        return normalise(x, torch.ones_like(weight), *others)

    normalise = norm_kernels.batch_norm_elemt
    plain.__name__ = normalise.__name__
    patch.setattr(norm_kernels, normalise.__name__, plain)


def read_by_fours(patch: Patch) -> None:
    """The norm depends on where the gradients lie."""
    norm = gpu.gradient_norm

    def elsewhere(gradients: list[Tensor]) -> Tensor:
        return norm(gradients) * (1 + 1e-6 * sum(gradient.data_ptr() % 16 > 0 for gradient in gradients))

    patch.setattr(gpu, "gradient_norm", elsewhere)


def render_one_pixel_aside(patch: Patch) -> None:
    make = gpu.rendered_on

    def aside(*args: Any, **named: Any) -> Any:
        right = make(*args, **named)
        return lambda views, *others: right(views + torch.eye(views.shape[1], dtype=torch.int64)[2], *others)

    patch.setattr(gpu, "rendered_on", aside)


def trace_something_else(patch: Patch) -> None:
    trace = export_module._trace

    def wrong(model: torch.nn.Module, example: Tensor) -> Any:
        return trace(torch.nn.Sequential(model, torch.nn.Hardtanh(0, 40)), example)

    patch.setattr(export_module, "_trace", wrong)


PLANTED = {
    "one step, yolov5n fp32": weigh_classes_more,
    "one step, yolov8n bf16": weigh_classes_more,
    "exact, yolov8n": drift,
    "kill and continue": drift,
    "launch-ahead loop": drift,
    "DDP and NCCL in a group of one": double_sums,
    "loss graphs, yolov8n": drift,
    "update graphs, yolov5n": drift,
    "two workers": drift,
    "speed, yolov5n bf16 64 px batch 2": lose_a_field,
    "trace, yolov5s bf16 64 px batch 2": lose_a_field,
    "end to end, yolov5s 64 px, images in files": report_no_epochs,
    "end to end, yolov5s 64 px, images in memory": report_no_epochs,
    "evaluation, yolov5n": raise_scores,
    "evaluation, yolov8n": raise_scores,
    "crowds, yolov8n 64 px": lose_a_field,
    "AutoBatch, yolov8n": lose_a_field,
    "save, yolov5s": copy_too_late,
    "gradient norm": read_by_fours,
    "colours, 64 px": round_hues,
    "rendered views, 64 px": render_one_pixel_aside,
    "norm kernels, sync-bn": forget_the_weights,
    "norm kernels, SiLU": leave_the_activation_out,
    "parts of batches, 64 px": copy_to_the_start,
    "export, yolov5n": trace_something_else,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_fails_its_row(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    if "SiLU" in name or "views" in name:
        pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
    [check] = [check for other, check in gpu.checks(tmp_path, CPU, quick=True) if other == name]
    PLANTED[name](monkeypatch)
    row = gpu.run(name, check)
    assert not row.passed, row.found


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "found"), [(ignore_aborts, "the abort is not noticed"),
                                              (halve_rates_in_ddp, "differs by up to")])
def test_a_fault_of_the_group_of_one_is_named(
        plant: Callable[[Patch], None], found: str, tmp_path: Path, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    row = gpu.run("DDP and NCCL in a group of one", lambda: gpu.compare_exchange(tmp_path, 64, 2, 1, CPU))
    assert not row.passed
    assert found in row.found


def test_rows_are_written_one_by_one(tmp_path: Path, monkeypatch: Patch) -> None:
    """A run that is cut short leaves the rows before. `--only` chooses; words without a check are refused."""
    written = tmp_path / "table.md"
    seen: list[str] = []

    def checks(*_: Any, **__: Any) -> list[tuple[str, Callable[[], str]]]:
        return [("first", lambda: "found"), ("left out", lambda: "never"),
                ("first again", lambda: seen.append(written.read_text()) or "found too")]

    monkeypatch.setattr(gpu, "checks", checks)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--only", "first", "--write", str(written)])
    assert gpu.main() == 0
    assert "| first | ok | found | 0 |" in seen[0]
    assert "first again" not in seen[0]
    assert written.read_text().splitlines()[-1] == "| first again | ok | found too | 0 |"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--only", "nothing"])
    assert gpu.main() == 2


def test_each_kind_of_row_has_a_planted_fault(tmp_path: Path) -> None:
    kinds = {name.split(",")[0] for name, _ in gpu.checks(tmp_path, CPU, quick=True)}
    assert kinds == {name.split(",")[0] for name in PLANTED}
