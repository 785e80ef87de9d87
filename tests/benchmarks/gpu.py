"""Whether a training on this machine's GPU is right, and how fast it is: `make gpu-test`, under eight minutes.

    PYTHONPATH=. python tests/benchmarks/gpu.py [--device cuda] [--quick] [--write FILE]

Needs torch, numpy, OpenCV, pydantic and PyYAML alone (the export torchvision, too). `--quick` takes tiny sizes, with
which `--device cpu` tests this file where there is no GPU. Prints a table in Markdown; exit status 1 if a check fails.

| check | law |
|---|---|
| one step | losses and update are the CPU's in fp32, up to rounding |
| two runs | equal to the bit with `exact` |
| kill and continue | killed by SIGKILL in the middle, then continued: the bits of an uninterrupted run |
| launch-ahead loop | the bits of the loop that waits for the device after each step |
| export | a file for other programs gives torch's numbers |
| speed | images/s of whole steps, their batches in pinned memory; share of the time in which no kernel runs |
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: `exact` needs it

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ray_yolo.config.commands import ExportConfig
from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.events import Event, StepEvent
from ray_yolo.core.structures import AnnotationIndex, Progress
from ray_yolo.engine import loop
from ray_yolo.engine.build import TrainComponents, TrainSpec, WorkerContext, build
from ray_yolo.engine.session import run_session
from tests.support.jobs import make_spec

MODELS = ("yolov5n", "yolov8n")  # of both families
EXPORTED = ("yolov5n",)
# Largest relative difference of a loss, and smallest cosine of a step's update, from the CPU's in fp32
TOLERANCES = {"fp32": (1e-3, 0.999), "fp16": (2e-2, 0.97), "bf16": (1e-1, 0.75)}  # bf16 has 8 bits
VICTIM_STEP = 3


class TrialRow(NamedTuple):
    """What came of a check."""

    check: str
    found: str
    seconds: float
    passed: bool


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--write", type=Path, help="also write the table here")
    parser.add_argument("--victim", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU here; --device cpu --quick tries the checks alone", file=sys.stderr)
        return 2
    if given.victim:
        train(exact_job(given.victim), device, die_at=VICTIM_STEP)
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(name, check) for name, check in checks(Path(folder), device, quick=given.quick)]
    table = "\n".join(lines(rows, device))
    print(table)
    if given.write:
        given.write.write_text(table + "\n")
    return int(not all(row.passed for row in rows))


def checks(folder: Path, device: torch.device, *, quick: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Their names, and what does them: it returns what was found, or raises."""
    imgsz = 64 if quick else 320
    for model in MODELS:
        for precision in TOLERANCES:
            yield f"one step, {model} {precision}", partial(compare_step, model, precision, imgsz, device)
    yield "two runs", partial(compare_runs, folder / "twice", device)
    yield "kill and continue", partial(continue_killed, folder / "killed", device)
    yield "launch-ahead loop", partial(compare_loops, folder / "loops", device)
    for model in EXPORTED:
        yield f"export, {model}", partial(export_weights, folder / "export" / model, model, device)
    for model in ("yolov5n", "yolov8n") if quick else ("yolov5s", "yolov8n"):
        for precision in ("fp32",) if quick else ("fp32", "bf16", "fp16"):
            size, batch, steps = (64, 2, 2) if quick else (640, 64, 20)
            yield f"speed, {model} {precision} {size} px batch {batch}", partial(
                measure_speed, model, precision, size, batch, steps, device)


def run(name: str, check: Callable[[], str]) -> TrialRow:
    print(name, file=sys.stderr)
    began = time.perf_counter()
    try:
        found, passed = check(), True
    except Exception as error:
        traceback.print_exc()
        found, passed = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", False
    return TrialRow(name, found, time.perf_counter() - began, passed)


def lines(rows: list[TrialRow], device: torch.device) -> Iterator[str]:
    """The table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    yield f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {sum(row.seconds for row in rows):.0f} s"
    yield from ("", "| check | | found | s |", "|---|---|---|---|")
    for row in rows:
        yield f"| {row.check} | {'ok' if row.passed else 'FAILED'} | {row.found} | {row.seconds:.0f} |"


def compare_step(model: str, precision: str, imgsz: int, device: torch.device) -> str:
    """One step on the device against the CPU's."""
    ours, theirs = (take_step(model, *how, imgsz) for how in ((precision, device), ("fp32", torch.device("cpu"))))
    largest = float(((ours[0] - theirs[0]).abs() / theirs[0].abs().clamp(min=1e-6)).max())
    cosine = float(cosine_similarity(ours[1].double(), theirs[1].double(), dim=0))
    limit, least = TOLERANCES[precision]
    found = f"losses to {largest:.1e} (limit {limit:g}), cosine of the update {cosine:.6f} (least {least:g})"
    assert largest <= limit, found
    assert cosine >= least, found
    return found


def take_step(model: str, precision: str, device: torch.device, imgsz: int) -> tuple[Tensor, Tensor]:
    """Losses and update of one step of two microbatches, on the host."""
    with full_precision():
        parts = make_parts(model, precision, imgsz, batch=8, steps=1, device=device, microbatch=4)
        before = weights(parts)
        result = loop.finish_step(parts, next(loop.launch_steps(parts, Progress(), loop.ControlFlags)))
    assert not result.skipped
    return result.losses, weights(parts) - before


@contextmanager
def full_precision() -> Iterator[None]:
    """Context in which fp32 is fp32: cuDNN's convolutions would round their inputs to TF32."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def weights(parts: TrainComponents) -> Tensor:
    return torch.cat([p.detach().cpu().flatten().float() for p in parts.model.parameters()])


def make_parts(model: str, precision: str, imgsz: int, *, batch: int, steps: int, device: torch.device,
               microbatch: int | None = None) -> TrainComponents:
    """What trains noise with eight boxes an image, an epoch of some steps; every batch is the same pinned memory."""
    size, count = microbatch or batch, batch * steps
    recipe = resolve(Recipe.model_validate({
        "data": "shapes8", "model": model, "imgsz": imgsz, "batch_size": batch, "microbatch": size, "epochs": 1000,
        "precision": precision, "threads": torch.get_num_threads(), "optimizer": {"nominal_batch": batch},
        "schedule": {"warmup_epochs": 0}}), 1, gpu=device.type == "cuda")
    index = AnnotationIndex(tuple(map(str, range(count))), np.full((count, 2), imgsz, np.int32),
                            np.zeros(count + 1, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32),
                            tuple(map(str, range(80))))
    job = TrainSpec(recipe, "", index.names, None, None, index, index, Path())
    parts = build(job, WorkerContext(device=device, prepare_model=lambda net: net.to(device), threads=recipe.threads))
    draw = torch.Generator().manual_seed(0)
    places = torch.rand(size * 8, 2, generator=draw) * imgsz * 0.6
    sides = (0.05 + 0.3 * torch.rand(size * 8, 2, generator=draw)) * imgsz
    numbers, classes = torch.arange(size * 8)[:, None] // 8, torch.randint(80, (size * 8, 1), generator=draw)
    drawn = {"images": torch.randint(256, (size, 3, imgsz, imgsz), dtype=torch.uint8, generator=draw),
             "targets": torch.cat((numbers, classes, places, places + sides), 1)}
    parts.loader = [{name: value.pin_memory() if device.type == "cuda" else value
                     for name, value in drawn.items()}] * (count // size)
    return parts



def exact_job(folder: Path) -> TrainSpec:
    """A tiny training of eight steps on drawn pictures, with augmentation and validation."""
    folder.mkdir(parents=True, exist_ok=True)
    return make_spec(folder, exact=True, noval=False, epochs=2, batch_size=8, microbatch=4,
                    optimizer={"nominal_batch": 8})


def train(job: TrainSpec, device: torch.device, *, die_at: int = -1) -> dict[str, Any]:
    """Train to the end, or kill this process right after a step. Returns the last state."""
    def emit(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    host = WorkerContext(device=device, prepare_model=lambda net: net.to(device))
    run_session(job, host, Placement(save_steps=1), emit)
    state: dict[str, Any] = torch.load(job.run_dir / "weights" / "last.pt", weights_only=True)
    return state


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Every tensor has the same bits. Returns how many there are."""
    pairs = [(name, a, other["optimizer"][number][name]) for number, entry in one["optimizer"].items()
             for name, a in entry.items()]
    pairs += [(name, a, other[part][name]) for part in ("model", "ema") for name, a in one[part].items()]
    for name, a, b in pairs:
        assert torch.equal(a, b), f"{name} differs by up to {float((a.float() - b.float()).abs().max()):.1e}"
    return f"{len(pairs)} tensors of weights, average and optimiser have equal bits"


def compare_runs(folder: Path, device: torch.device) -> str:
    """The same training twice."""
    return assert_equal(*(train(exact_job(folder / name), device) for name in "ab"))


def continue_killed(folder: Path, device: torch.device) -> str:
    """A training whose process gets SIGKILL, and is run again, against one that is left alone."""
    uninterrupted = train(exact_job(folder / "calm"), device)
    victim = subprocess.run([sys.executable, __file__, "--device", device.type, "--victim", folder / "cut"],
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE)
    assert victim.returncode == -signal.SIGKILL, victim.stderr.decode()[-500:]
    return f"after step {VICTIM_STEP}: {assert_equal(uninterrupted, train(exact_job(folder / 'cut'), device))}"


def compare_loops(folder: Path, device: torch.device) -> str:
    """The loop that queues the next step behind the present one against the one that does not."""
    states, chosen = [], loop.runs_ahead
    try:
        for ahead in (True, False):
            vars(loop)["runs_ahead"] = lambda device, ahead=ahead: ahead
            states.append(train(exact_job(folder / str(ahead)), device))
    finally:
        vars(loop)["runs_ahead"] = chosen
    return assert_equal(*states)


def export_weights(folder: Path, model: str, device: torch.device) -> str:
    """Weights that were trained on the device, as TorchScript, which `export` compares with torch."""
    from ray_yolo.inference.export import export  # imports torchvision

    job = exact_job(folder)
    job = replace(job, architecture=None, recipe=job.recipe.model_copy(update={"model": model, "epochs": 1}))
    train(job, device)
    done = export(ExportConfig(weights=str(job.run_dir / "weights" / "last.pt"), format="torchscript"))
    return f"TorchScript, largest difference from torch {done.largest_difference:.1e}"


def measure_speed(model: str, precision: str, imgsz: int, batch: int, steps: int, device: torch.device) -> str:
    """Images a second of whole steps, and the share of the time in which the device had nothing to do."""
    parts = make_parts(model, precision, imgsz, batch=batch, steps=steps, device=device)
    take_steps(parts)  # kernels are chosen, memory is allocated
    seconds = take_steps(parts)
    idle = idle_share(parts) if device.type == "cuda" else None
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB" if device.type == "cuda" else ""
    waits = "" if idle is None else f", the device waits {idle:.1%} of the time"
    return f"{batch * steps / seconds:,.0f} images/s{waits}{memory}"


def take_steps(parts: TrainComponents) -> float:
    """Seconds of an epoch's steps, to the end of the last one on the device."""
    synchronize(parts)
    began = time.perf_counter()
    for launched in loop.launch_steps(parts, Progress(), loop.ControlFlags):
        loop.finish_step(parts, launched)
    synchronize(parts)
    return time.perf_counter() - began


def synchronize(parts: TrainComponents) -> None:
    if parts.context.device.type == "cuda":
        torch.cuda.synchronize(parts.context.device)


def idle_share(parts: TrainComponents) -> float:
    """Of the time from the first to the last kernel of an epoch's steps, in which none runs; by torch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take_steps(parts)
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events()
                   if event.device_type == DeviceType.CUDA and "#" not in event.name)  # "#": a note, not a kernel
    if not spans:  # the driver does not allow profiling
        return math.nan
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


if __name__ == "__main__":
    sys.exit(main())
