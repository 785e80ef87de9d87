"""Whether a training on this machine's GPU is right, and how fast it is: `make gpu-test`, in fifteen minutes.

    PYTHONPATH=. python tests/benchmarks/gpu.py [--device cuda] [--quick] [--only WORD ...] [--write FILE]

Needs torch, numpy, OpenCV, pydantic and PyYAML alone (export and evaluation torchvision, too). `--quick` takes tiny
sizes, with which `--device cpu` tests this file where there is no GPU. `--only` runs the checks whose names contain one
of the words. Prints a table in Markdown; exit status 1 if a check fails. Each row is printed and written as soon as
it is known, so a run that is cut short leaves the rows before.

Some defaults follow from it. If "DDP and NCCL in a group of one" passes, `GRAPHS_OF_SEVERAL_WORKERS` in
`config/placement.py` may become true; if "loss graphs" pass, `auto` may mean `loss`, and `update` if
"update graphs" pass, too; if "colours" passes, `colour_kernel` there may; if "norm kernels" pass, `norm_kernels` in
`config/recipe.py` may; if "rendered views" pass, `augment.render` in `config/sections.py` may be `device` where a GPU
has room.

| check | law |
|---|---|
| one step | losses and update are the CPU's in the same precision, up to rounding |
| exact | a training of the model, twice and without CUDA graphs: the same bits with `exact` |
| kill and continue | killed by SIGKILL in the middle, then continued: the bits of an uninterrupted run |
| launch-ahead loop | the bits of the loop that waits for the device after each step |
| DDP and NCCL | in a group of one: the hook gives the plain gradient, and graphs the same bits; aborts are seen |
| loss graphs | a training whose loss is recorded, too: the same weights as without graphs; images/s |
| update graphs | as above, and the clip and the averages are recorded as well |
| two workers | where there are two devices: the bits of a training on one |
| gradient norm | the norm that a step is clipped by has the same bits wherever the gradients lie in memory |
| colours | images with other colours are the host's, byte by byte, by torch's kernels and by Triton's; milliseconds |
| rendered views | pixels of mosaics are those of plain arithmetic, bit for bit, also beyond 2 GiB; milliseconds |
| parts of batches | images that are copied to the device in parts are those of the whole batch; GB/s |
| norm kernels | BatchNorm by kernels made for it is that of torch's usual operations, up to rounding; milliseconds |
| export | a file for other programs gives torch's numbers |
| evaluation | losses and mAP are the CPU's up to rounding; milliseconds an image |
| speed | images/s of whole steps, their batches in pinned memory, with CUDA graphs and without; MB and TB/s |
| trace | the kernels of three steps that take the most time, and GB/s of copies from pinned memory |
| end to end | images/s of a training on pictures in files, in memory or on the device, and how long it waits for them |
| crowds | speed and peak memory with 100 labels an image |
| AutoBatch | a step of the number of images that it finds fits into memory |
| save | how long a checkpoint stops the training |
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: `exact` needs it

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.nn.utils import get_total_norm

from ray_yolo.checkpoints.writer import Saver
from ray_yolo.config.commands import ExportConfig
from ray_yolo.config.placement import CudaGraphs, Placement
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.sections import AugmentConfig, EvaluateConfig
from ray_yolo.core.events import Event, ShardEvent, StepEvent
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data import augment
from ray_yolo.data.mosaic import room, snap
from ray_yolo.engine import collectives as collectives_module
from ray_yolo.engine import loop
from ray_yolo.engine.autobatch import auto_batch
from ray_yolo.engine.collectives import (
    LOOPBACK,
    Collectives,
    ddp_options,
    form_process_group,
    leave_process_group,
    wrap_in_ddp,
)
from ray_yolo.engine.devices import mark, seconds_between, wait_for
from ray_yolo.engine.evaluate import EvaluatedBatches, evaluate_batches
from ray_yolo.engine.gradients import GradientTree, views_like
from ray_yolo.engine.held_images import HeldImages
from ray_yolo.engine.loading import microbatches, part_images
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.engine.state import capture
from ray_yolo.engine.team import colour_tables_on, colours_on, rendered_on
from ray_yolo.engine.update import gradient_norm
from ray_yolo.models.batch_norm import MOMENTUM, BatchNorm, Normalise, Statistics, plain_norm, spread_norm
from ray_yolo.models.detector import gflops
from ray_yolo.models.families import build_model
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.recolour import recolour
from ray_yolo.ops.views import Source, view_of
from tests.benchmarks.launch_counter import Counter
from tests.support import rendered
from tests.support.interpreted import interpreted
from tests.support.jobs import Training, build_training, make_spec
from tests.support.norm_kernels import kernels_on_cpu

MODELS = ("yolov5n", "yolov8n")  # of both families
EXACT = ("yolov5n", "yolov8n", "yolo11n", "yolo26n")
EXPORTED = ("yolov5n",)
# Largest relative difference of a loss, and smallest cosine of a step's update, from the CPU's in the same precision
TOLERANCES = {"fp32": (1e-3, 0.999), "fp16": (2e-2, 0.97), "bf16": (1e-1, 0.85)}
SPEEDS = (  # model, precision, images a step; the most telling first
    ("yolov5n", "bf16", 16), ("yolov8n", "bf16", 16), ("yolov5s", "bf16", 64), ("yolov8n", "bf16", 64),
    ("yolo11s", "bf16", 64), ("yolo26n", "bf16", 64), ("yolov5s", "bf16", 128), ("yolov5s", "fp32", 64),
    ("yolov5s", "fp16", 64))
REPEATS = 3
VICTIM_STEP = 3
ENLARGED = 3
PIXELS = 300  # of a view, which plain arithmetic tries
CANDIDATES = 2000  # of an image, for suppression
Wrap = Callable[[torch.nn.Module], torch.nn.Module]  # of a network on its device
HALVINGS = 12  # of fp16's first scale: a first step may overflow


def fused_norm() -> Normalise:
    """The kernels of Triton."""
    normalise: Normalise = import_module("ray_yolo.ops.norm_kernel").fused_norm
    return normalise


NORM_KERNELS: dict[str, Callable[[], tuple[Normalise, Normalise]]] = {
    "SiLU": lambda: (plain_norm, fused_norm()),
    "sync-bn": lambda: (spread_norm(Collectives()), spread_norm(Collectives(), by_kernels=True)),
}
"""Of each way to compute BatchNorm by kernels, the usual operations and the kernels."""


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
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of checks")
    parser.add_argument("--write", type=Path, help="also write the table here")
    parser.add_argument("--victim", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU here; --device cpu --quick tries the checks alone", file=sys.stderr)
        return 2
    if given.victim:
        train(exact_job(given.victim), device, die_at=VICTIM_STEP)
    if given.group:
        train_in_group(given.group, given.device, given.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        chosen = [(name, check) for name, check in checks(Path(folder), device, quick=given.quick)
                  if any(word in name for word in given.only)]
        if not chosen:
            print(f"gpu.py: no check has one of {', '.join(given.only)} in its name", file=sys.stderr)
            return 2
        passed = True
        with given.write.open("w") if given.write else nullcontext() as file:
            def tell(text: str) -> None:
                print(text, flush=True)
                if file:
                    print(text, file=file, flush=True)

            tell(heading(device))
            for name, check in chosen:
                row = run(name, check)
                tell(line(row))
                passed &= row.passed
    return int(not passed)


def checks(folder: Path, device: torch.device, *, quick: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Their names, and what does them: it returns what was found, or raises."""
    size, steps = (64, 2) if quick else (640, 20)
    for model in MODELS:
        for precision in TOLERANCES:
            yield f"one step, {model} {precision}", partial(compare_step, model, precision, max(64, size // 2), device)
    for model in EXACT:
        yield f"exact, {model}", partial(compare_exact, folder / "exact" / model, model, device)
    yield "kill and continue", partial(continue_killed, folder / "killed", device)
    yield "launch-ahead loop", partial(compare_loops, folder / "loops", device)
    yield "DDP and NCCL in a group of one", partial(compare_exchange, folder / "ddp", size, 2 if quick else 16, steps,
                                                    device)
    further: tuple[CudaGraphs, ...] = ("loss", "update")
    for graphs in further:
        for model in (*MODELS, "yolo26n"):
            yield f"{graphs} graphs, {model}", partial(compare_graphs, folder / graphs / model, model, size,
                                                       2 if quick else 16, steps, device, graphs)
    if device.type == "cpu" or torch.cuda.device_count() > 1:  # NCCL connects no two processes on one device
        yield "two workers", partial(compare_workers, folder / "workers", device)
    yield "gradient norm", partial(compare_gradient_norms, device)
    yield f"colours, {size} px", partial(compare_colours, size, 4 if quick else 64, device)
    if device.type != "cpu" or find_spec("triton"):  # torch for CPUs comes without Triton
        yield f"rendered views, {size} px", partial(compare_rendered, size, 2 if quick else 64, device)
    yield f"parts of batches, {size} px", partial(compare_parts, size, 8 if quick else 64, device)
    shape = (4, 24, 6, 10) if quick else (64, 64, 160, 160)
    for way in NORM_KERNELS:
        if way == "SiLU" and device.type == "cpu" and not find_spec("triton"):  # torch for CPUs comes without Triton
            continue
        yield f"norm kernels, {way}", partial(compare_norms, way, shape, device)
    for model, precision, batch in SPEEDS[:2] if quick else SPEEDS:
        images = 2 if quick else batch
        yield f"speed, {model} {precision} {size} px batch {images}", partial(
            measure_speed, model, precision, size, images, steps, device)
    for batch in (2,) if quick else (64, 128):
        yield f"trace, yolov5s bf16 {size} px batch {batch}", partial(
            trace_steps, "yolov5s", "bf16", size, batch, device)
    for kept in ("files", "memory", "device"):
        yield f"end to end, yolov5s {size} px, images in {kept}", partial(
            measure_training, folder / kept, kept, size, 16 if quick else 8192, device)
    for model in MODELS:
        yield f"evaluation, {model}", partial(compare_evaluation, model, size, 4 if quick else 128, device)
    for model in MODELS:
        yield f"crowds, {model} {size} px", partial(
            measure_speed, model, "bf16", size, 2 if quick else 64, steps, device, labels=100)
    yield "AutoBatch, yolov8n", partial(try_auto_batch, "yolov8n", size, device)
    yield "save, yolov5s", partial(measure_save, folder / "saved", "yolov5s", device)
    for model in EXPORTED:
        yield f"export, {model}", partial(export_weights, folder / "export" / model, model, device)


def run(name: str, check: Callable[[], str]) -> TrialRow:
    began = time.perf_counter()
    try:
        found, passed = check(), True
    except Exception as error:
        traceback.print_exc()
        found, passed = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}", False
    return TrialRow(name, found, time.perf_counter() - began, passed)


def line(row: TrialRow) -> str:
    return f"| {row.check} | {'ok' if row.passed else 'FAILED'} | {row.found} | {row.seconds:.0f} |"


def heading(device: torch.device) -> str:
    """What stands above the rows: device, versions, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True,
                           text=True)
    commit = asked.stdout.strip() or "unknown"
    return (f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit {commit}\n\n"
            "| check | | found | s |\n|---|---|---|---|")


def compare_step(model: str, precision: str, imgsz: int, device: torch.device) -> str:
    """One step on the device against the CPU's."""
    ours, theirs = (take_step(model, precision, where, imgsz) for where in (device, torch.device("cpu")))
    largest = float(((ours[0] - theirs[0]).abs() / theirs[0].abs().clamp(min=1e-6)).max())
    cosine = float(cosine_similarity(ours[1].double(), theirs[1].double(), dim=0))
    limit, least = TOLERANCES[precision]
    found = f"losses to {largest:.1e} (limit {limit:g}), cosine of the update {cosine:.6f} (least {least:g})"
    assert largest <= limit, found
    assert cosine >= least, found
    return found


def take_step(model: str, precision: str, device: torch.device, imgsz: int) -> tuple[Tensor, Tensor]:
    """Losses and update of one step of two microbatches, on the host. Steps that overflow in fp16 are taken again."""
    parts = make_parts(model, precision, imgsz, batch=8, steps=1, device=device, microbatch=4, tf32=False)
    before = weights(parts)
    for _ in range(HALVINGS):
        steps = loop.launch_steps(*parts, iter(parts.team.loaders.train), loop.Orders)
        result = loop.finish_step(*parts, next(steps))
        assert not result.skipped
        if math.isfinite(result.gradient_norm):
            return result.losses, weights(parts) - before
    raise AssertionError(f"the gradient overflows also after {HALVINGS} halvings of its scale")


def weights(parts: Training) -> Tensor:
    return torch.cat([p.detach().cpu().flatten().float() for p in parts.learner.model.parameters()])


def make_parts(model: str, precision: str, imgsz: int, *, batch: int, steps: int, device: torch.device,
               microbatch: int | None = None, labels: int = 8, graphs: CudaGraphs = "on", tf32: bool = True,
               wrap: Wrap = lambda net: net) -> Training:
    """What trains noise with some boxes an image, an epoch of some steps; every batch is the same pinned memory.

    tf32: cuDNN's convolutions of fp32 may round their inputs to TF32.
    """
    size, count = microbatch or batch, batch * steps
    recipe = resolve(Recipe.model_validate({
        "data": "shapes8", "model": model, "imgsz": imgsz, "batch_size": batch, "microbatch": size, "epochs": 1000,
        "precision": precision, "threads": torch.get_num_threads(), "optimizer": {"nominal_batch": batch},
        "schedule": {"warmup_epochs": 0}, "no_tf32": not tf32}), 1, gpu=device.type == "cuda")
    index = AnnotationIndex(tuple(map(str, range(count))), np.full((count, 2), imgsz, np.int32),
                            np.zeros(count + 1, np.int64), np.zeros(0, np.int64), np.zeros((0, 4), np.float32),
                            tuple(map(str, range(80))))
    job = TrainSpec(recipe, "", index.names, None, None, index, index, Path())
    parts = build_training(job, WorkerContext(device=device, prepare_model=wrap, threads=recipe.threads,
                                              cuda_graphs=graphs))
    draw = torch.Generator().manual_seed(0)
    places = torch.rand(size * labels, 2, generator=draw) * imgsz * 0.6
    sides = (0.05 + 0.3 * torch.rand(size * labels, 2, generator=draw)) * imgsz
    numbers = torch.arange(size * labels)[:, None] // labels
    classes = torch.randint(80, (size * labels, 1), generator=draw)
    drawn = {"images": torch.randint(256, (size, 3, imgsz, imgsz), dtype=torch.uint8, generator=draw),
             "targets": torch.cat((numbers, classes, places, places + sides), 1)}
    batch_of_noise = {name: value.pin_memory() if device.type == "cuda" else value for name, value in drawn.items()}
    parts.team.loaders = parts.team.loaders._replace(train=[batch_of_noise] * (count // size))
    return parts


def labelled(paths: Sequence[str], height: int, width: int) -> AnnotationIndex:
    """Images of one size with eight boxes each, of 80 classes."""
    draw = np.random.default_rng(0)
    corners = draw.uniform(0, height / 2, (8 * len(paths), 2)).astype(np.float32)
    return AnnotationIndex(
        paths=tuple(paths),
        sizes=np.full((len(paths), 2), (height, width), np.int32),
        offsets=8 * np.arange(len(paths) + 1, dtype=np.int64),
        classes=draw.integers(0, 80, 8 * len(paths)),
        boxes=np.concatenate([corners, corners + height / 8], 1),
        names=tuple(str(number) for number in range(80)),
    )


def exact_job(folder: Path, model: str = "") -> TrainSpec:
    """A small training of ten steps on drawn pictures, with augmentation and validation; '': of a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    job = make_spec(folder, exact=True, noval=False, epochs=2, batch_size=8, microbatch=4,
                    optimizer={"nominal_batch": 8})
    return replace(job, architecture=None, recipe=job.recipe.model_copy(update={"model": model})) if model else job


def train(job: TrainSpec, device: torch.device, *, die_at: int = -1, graphs: CudaGraphs = "on",
          wrap: Wrap = lambda net: net) -> dict[str, Any]:
    """Train to the end, or kill this process right after a step. Returns the last state."""
    def emit(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    host = WorkerContext(device=device, prepare_model=wrap, cuda_graphs=graphs)
    run_session(job, host, Placement(save_steps=1), emit)
    return last_state(job.run_dir)


def last_state(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run_dir / "weights" / "last.pt", weights_only=True)
    return state


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Every tensor has the same bits. Returns how many there are."""
    pairs = [(name, a, other["optimizer"][number][name]) for number, entry in one["optimizer"].items()
             for name, a in entry.items()]
    pairs += [(name, a, other[part][name]) for part in ("model", "ema") for name, a in one[part].items()]
    for name, a, b in pairs:
        assert torch.equal(a, b), f"{name} differs by up to {float((a.float() - b.float()).abs().max()):.1e}"
    return f"{len(pairs)} tensors of weights, average and optimiser have equal bits"


def compare_exact(folder: Path, model: str, device: torch.device) -> str:
    """The same training twice, and without CUDA graphs."""
    first, again = (train(exact_job(folder / name, model), device) for name in ("first", "again"))
    plain = train(exact_job(folder / "plain", model), device, graphs="off")
    assert_equal(first, again)
    return assert_equal(first, plain)


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


def compare_exchange(folder: Path, imgsz: int, batch: int, steps: int, device: torch.device) -> str:
    """The gradient and the row that DDP's hook exchanges in a group of one, against those without DDP; then a training
    with CUDA graphs inside DDP against one with neither, and the images a second of both."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    draw = torch.Generator().manual_seed(0)
    batches = [torch.rand(2, 3, 32, 32, generator=draw).to(device) for _ in range(3)]
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 8, 3)).to(device)

    def summed(replica: torch.nn.Module) -> list[Tensor]:
        tree = GradientTree(replica, Collectives(), 5)
        for _ in range(3):  # DDP rebuilds its buckets after the first step
            replica.zero_grad()
            tree.start([len(batches)])
            for number, images in enumerate(batches):
                with tree.microbatch(last=number == len(batches) - 1):
                    tree.attach_row(torch.full((5,), 1.0 + number, device=device))
                    replica(images).square().mean().backward()
            row = tree.finish()
        found = [row, *(weight.grad.clone() for weight in network.parameters() if weight.grad is not None)]
        tree.close()
        return found

    def wrap(net: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(net, **ddp_options())

    model = EXACT[0]
    plain_state = train(exact_job(folder / "plain", model), device, graphs="off")
    plain_speed = images_per_second(make_parts(model, "bf16", imgsz, batch=batch, steps=steps, device=device))
    plain = summed(network)  # after `train`, which sets the number of threads
    network.zero_grad(set_to_none=True)
    gpus = device.type == "cuda"
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=0, world_size=1,
                            device_id=device if gpus else None)
    try:
        exchanged = summed(wrap(network))
        assert all(torch.equal(a, b) for a, b in zip(plain, exchanged, strict=True)), "the exchanged sums differ"
        same = assert_equal(plain_state, train(exact_job(folder / "ddp", model), device, wrap=wrap))
        speed = images_per_second(make_parts(model, "bf16", imgsz, batch=batch, steps=steps, device=device, wrap=wrap))
        world = dist.group.WORLD
        assert world is not None
        # `form_process_group` forms no group of one
        vars(collectives_module)["_group"] = collectives_module._Group(
            nccl=(world,) if gpus else (), cut=torch.zeros((), pin_memory=gpus))
        calm = bool(Collectives(0, 2).was_cut(device))
        collectives_module.abort_process_group()
        assert (calm, bool(Collectives(0, 2).was_cut(device))) == (False, True), "the abort is not noticed"
    finally:
        vars(collectives_module)["_group"] = collectives_module._Group()
        dist.destroy_process_group()
    return (f"{len(plain)} sums are equal; with CUDA graphs inside DDP, {same}, {speed:,.0f} images/s (with graphs "
            f"alone {plain_speed:,.0f}); the abort is noticed")


def compare_graphs(folder: Path, model: str, imgsz: int, batch: int, steps: int, device: torch.device,
                   graphs: CudaGraphs) -> str:
    """A training of which more than the network is recorded against one without graphs, and its speed."""
    same = assert_equal(train(exact_job(folder / "written", model), device, graphs="off"),
                        train(exact_job(folder / "graphs", model), device, graphs=graphs))
    of_network = images_per_second(make_parts(model, "bf16", imgsz, batch=batch, steps=steps, device=device))
    speed = images_per_second(make_parts(model, "bf16", imgsz, batch=batch, steps=steps, device=device, graphs=graphs))
    return f"{same}; {speed:,.0f} images/s, {of_network:,.0f} with graphs of the network alone"


def compare_workers(folder: Path, device: torch.device) -> str:
    """Two processes with a device each, in a group as the product forms it, against this process alone."""
    alone = train(exact_job(folder / "alone"), device)
    group = folder / "group"
    group.mkdir()
    processes = []
    for number in range(2):
        command: list[str | Path] = [sys.executable, __file__, "--device", device.type, "--group", group,
                                     "--worker", str(number)]
        processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                                          stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), " ".join(errors)[-500:]
    return assert_equal(alone, last_state(job_folder(group, 0) / "run"))


def train_in_group(group: Path, device_type: str, worker: int) -> None:
    """Train as one of two workers. The first one's checkpoints are those of the training."""
    import torch.distributed as dist

    device = torch.device(device_type, worker) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    address = group / "port"
    if worker == 0:
        written = group / "port.new"
        written.write_text(str(store.port))
        written.rename(address)  # complete, for the other one
    while not address.exists():
        time.sleep(0.1)
    port = int(address.read_text())
    group_of_two = Rendezvous(form_process_group(store, (LOOPBACK, port), worker, 2, 60.0, device))
    host = WorkerContext(device=device, prepare_model=partial(wrap_in_ddp, device=device))
    try:
        run_session(exact_job(job_folder(group, worker)), host, Placement(save_steps=1), lambda event: None,
                    group_of_two)
    finally:
        leave_process_group()


def job_folder(group: Path, worker: int) -> Path:
    return group / str(worker)


def compare_gradient_norms(device: torch.device) -> str:
    """The norm of gradients in memory of their own against that of the same ones as views, each at another address."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(255,), *((16 * n, 8, 3, 3) for n in range(1, 9)), (3,), (255, 256, 1, 1)]
    own = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
    norm, plain = gradient_norm(own), get_total_norm(own, foreach=True)
    assert norm == plain, "it is not torch's"
    apart = 0
    for start in range(1, 4):
        views = views_like(torch.cat([own[0].new_zeros(start), *(each.flatten() for each in own)])[start:], own)
        assert gradient_norm(views) == norm, f"other bits, from place {start}"
        apart += int(get_total_norm(views, foreach=True) != plain)
    return f"equal bits; torch's alone has others at {apart} of 3 places"


def compare_colours(imgsz: int, images: int, device: torch.device) -> str:
    """The colours of random images on the device against OpenCV's on the host, and the time."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (images, imgsz, imgsz, 3), np.uint8)
    gains = [tuple(factors) for factors in draw.uniform(0.5, 1.5, (images, 3)).tolist()]
    inputs = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).to(device)
    scaled = torch.from_numpy(np.stack([augment.scaled_hsv(each) for each in gains])).to(device)
    for image, each in zip(pixels, gains, strict=True):
        augment.recolour(image, each)
    expected = unit_range(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    results = []
    for in_one_kernel, name in ((False, "torch"), (True, "Triton's kernel")):
        if in_one_kernel and device.type != "cuda":  # Triton's interpreter is a test of its own
            continue
        if in_one_kernel:
            import_module("ray_yolo.ops.colour_kernel")  # without Triton, `colours_on` would give torch's kernels again
        colours = colours_on(device, in_one_kernel=in_one_kernel)
        found = colours(inputs, scaled, torch.channels_last).cpu()  # the first call also loads or compiles kernels
        wrong = int((found != expected).sum())
        assert not wrong, f"{name}: {wrong} of {pixels.size} values differ"
        began = mark(device)
        for _ in range(REPEATS):
            colours(inputs, scaled, torch.channels_last)
        ended = mark(device)
        wait_for(ended)
        results.append(f"{name} {1e3 * seconds_between(began, ended) / REPEATS / images:.4f} ms an image")
    return f"{images} images are equal; {', '.join(results)}"


def compare_rendered(imgsz: int, images: int, device: torch.device) -> str:
    """Views of random images that the device renders, some of their pixels by plain arithmetic, and the time."""
    draw = np.random.default_rng(0)
    shape = (imgsz * 3 // 4, imgsz)
    before = 2**31 if device.type == "cuda" else 0  # bytes that no view shows
    pixels = torch.zeros(before + 8 * 3 * math.prod(shape), dtype=torch.uint8, device=device)
    shown = draw.integers(0, 256, len(pixels) - before, np.uint8)
    pixels[before:] = torch.from_numpy(shown)
    views = np.stack([drawn_view(draw, imgsz, shape, before) for _ in range(images)])
    gains = [tuple(factors) for factors in draw.uniform(0.5, 1.5, (images, 3)).tolist()]
    scaled = torch.from_numpy(np.stack([augment.scaled_hsv(each) for each in gains]))
    given = torch.from_numpy(views).to(device)
    with ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(interpreted("ray_yolo.ops.render_kernel", "ray_yolo.ops.colour_kernel"))
        plain, coloured = (rendered_on(device, HeldImages(pixels, np.ones(8, bool)), has_colours=has_colours)
                           for has_colours in (False, True))
        size, layout = (imgsz, imgsz), torch.channels_last
        found = plain(given, None, size, layout).mul(255).round().byte().cpu()
        expected = unit_range(recolour(found, scaled, colour_tables_on(torch.device("cpu"))))
        on_device = scaled.to(device)
        wrong = int((coloured(given, on_device, size, layout).cpu() != expected).sum())
        assert not wrong, f"{wrong} of {expected.numel()} values differ after their colours have changed"
        began = mark(device)
        for _ in range(REPEATS):
            coloured(given, on_device, size, layout)
        ended = mark(device)
        wait_for(ended)
    for number, view in enumerate(views.tolist()):
        for row, column in draw.integers(0, imgsz, (PIXELS, 2)).tolist():
            level = found[number, :, row, column].tolist()
            right = rendered.pixel(lambda place: int(shown[place - before]), view, row, column)
            assert level == right, f"pixel {row}, {column} of view {number} is {level}, not {right}"
    return (f"{PIXELS} pixels of each of {images} views are equal; "
            f"{1e3 * seconds_between(began, ended) / REPEATS / images:.4f} ms an image")


def drawn_view(draw: np.random.Generator, imgsz: int, shape: tuple[int, int], before: int) -> np.ndarray:
    """A random view of four of eight images, of which the first one begins at a byte."""
    canvas = (2 * imgsz, 2 * imgsz)
    seam = (int(draw.integers(imgsz // 2, 3 * imgsz // 2)), int(draw.integers(imgsz // 2, 3 * imgsz // 2)))
    matrix, _ = augment.draw_affine(draw, AugmentConfig(degrees=20, shear=5), canvas, (imgsz, imgsz))
    sources = []
    for side in ((True, True), (False, True), (True, False), (False, False)):
        start = before + 3 * math.prod(shape) * int(draw.integers(8))
        sources.append(Source(start, shape, side, room(side, seam, canvas)))
    return view_of((imgsz, imgsz), sources, seam, snap(matrix, seam))


def compare_parts(imgsz: int, images: int, device: torch.device) -> str:
    """Batches whose parts are copied while the device computes, and whose memory is used again at once."""
    gpu = device.type == "cuda"
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, imgsz, imgsz), dtype=torch.uint8, generator=draw)
    pixels = pixels.to(memory_format=torch.channels_last)
    rows = torch.arange(images, dtype=torch.float32)[:, None].expand(-1, 6)
    size = part_images(Recipe(), images, 15)

    def parts() -> Iterator[dict[str, Tensor]]:
        for _ in range(REPEATS):
            for first in range(0, images, size):
                part = {"images": pixels[first : first + size], "targets": rows[first : first + size].contiguous(),
                        "place": torch.tensor([first, images])}
                yield {name: value.pin_memory() if gpu else value for name, value in part.items()}

    busy = torch.rand(4096 if gpu else 64, 4096 if gpu else 64, device=device)
    sums = []
    began = mark(device)
    for batch in microbatches(parts(), device):
        busy @ busy  # the copies run beside it
        found, targets = loop.to_network_input(batch, device)
        sums.append((found.mul(255).round().to(torch.uint8), targets))
    ended = mark(device)
    wait_for(ended)
    for found, targets in sums:
        wrong = int((found.cpu() != pixels).sum())
        assert not wrong, f"{wrong} of {pixels.numel()} pixels differ"
        assert torch.equal(targets.cpu(), rows), "the targets differ"
    rate = 1e-9 * REPEATS * pixels.nbytes / seconds_between(began, ended)
    return f"{REPEATS} batches of {images} images in parts of {size} are equal; {rate:.1f} GB/s with what computes"


def compare_norms(way: str, shape: tuple[int, ...], device: torch.device) -> str:
    """A layer by kernels against the usual operations, in each precision, and the time of its two passes."""
    found = []
    with ExitStack() as stack:
        if device.type == "cpu":  # formulas in the place of torch's kernels, and Triton's interpreter
            stack.enter_context(kernels_on_cpu() if way == "sync-bn" else interpreted("ray_yolo.ops.norm_kernel"))
        usual_way, kernels_way = NORM_KERNELS[way]()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            usual, kernels = (run_norm(normalise, shape, dtype, device) for normalise in (usual_way, kernels_way))
            apart = {name: float((kernels.values[name] - value).abs().max() / value.abs().max())
                     for name, value in usual.values.items()}
            limit = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
            far = {name: f"{value:.1e}" for name, value in apart.items() if not value <= limit}
            assert not far, f"{dtype}: {far} apart, more than {limit:.1e}"
            found.append(f"{str(dtype).removeprefix('torch.')} to {max(apart.values()):.1e}, "
                         f"{kernels.milliseconds:.3f} ms for {usual.milliseconds:.3f}")
    return f"{' x '.join(map(str, shape))}: {'; '.join(found)}"


class NormRun(NamedTuple):
    """What a layer's two passes give, and their time."""

    values: dict[str, Tensor]
    milliseconds: float


def run_norm(normalise: Normalise, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> NormRun:
    draw = torch.Generator().manual_seed(0)
    layer = BatchNorm(shape[1]).to(device).train()
    with torch.no_grad():
        layer.weight.copy_(torch.rand(shape[1], generator=draw) + 0.5)
        layer.bias.copy_(torch.rand(shape[1], generator=draw) - 0.5)
    statistics = Statistics(layer, normalise)
    x, gradient = (torch.randn(shape, generator=draw).to(device, dtype).to(memory_format=torch.channels_last)
                   for _ in range(2))
    x = (3 * x + 1).requires_grad_()

    def passes() -> tuple[Tensor, ...]:
        output = layer(x, silu=True)
        return (output.detach(), *torch.autograd.grad(output, (x, layer.weight, layer.bias), gradient))

    results = (*passes(), statistics.recorded(0))
    began = mark(device)
    for _ in range(REPEATS):
        passes()
    ended = mark(device)
    wait_for(ended)
    names = ("output", "gradient", "weight's", "bias's", "statistics")
    values = {name: value.float().cpu() for name, value in zip(names, results, strict=True)}
    return NormRun(values, 1e3 * seconds_between(began, ended) / REPEATS)


def export_weights(folder: Path, model: str, device: torch.device) -> str:
    """Weights that were trained on the device, as TorchScript, which `export` compares with torch."""
    from ray_yolo.inference.export import export  # imports torchvision

    job = exact_job(folder, model)
    job = replace(job, recipe=job.recipe.model_copy(update={"epochs": 1}))
    train(job, device)
    done = export(ExportConfig(weights=str(job.run_dir / "weights" / "last.pt"), format="torchscript"))
    return f"TorchScript, largest difference from torch {done.largest_difference:.1e}"


def measure_speed(model: str, precision: str, imgsz: int, batch: int, steps: int, device: torch.device, *,
                  labels: int = 8) -> str:
    """Images a second of whole steps, and the share of the time in which the device had nothing to do."""
    results, speeds = [], []
    for graphs in ("on", "off"):
        if device.type == "cuda":
            gc.collect()  # a model with CUDA graphs is in a cycle
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        parts = make_parts(model, precision, imgsz, batch=batch, steps=steps, device=device, labels=labels,
                           graphs=graphs)
        loaders = parts.team.loaders
        if loaders.colours is not None:
            scaled = torch.from_numpy(np.stack([augment.scaled_hsv((1.01, 1.2, 0.8))] * batch)).pin_memory()
            parts.team.loaders = loaders._replace(train=[{**drawn, "colours": scaled} for drawn in loaders.train])
        take_steps(parts)  # kernels are chosen, memory is allocated, passes are recorded
        assert not parts.team.complaints, parts.team.complaints
        turns = sorted(take_steps(parts) for _ in range(REPEATS))
        seconds = turns[REPEATS // 2]
        if graphs == "off":  # a graph's operations are not seen
            with Counter() as counter:
                take_steps(parts, 1)
        spread = (turns[-1] - turns[0]) / seconds
        tflops = 3e-3 * gflops(build_model(model, 80), imgsz) * batch * steps / seconds
        found = (f"{batch * steps / seconds:,.0f} images/s (repeats within {spread:.0%}), "
                 f"{1e3 * seconds / steps:.1f} ms a step, {tflops:.1f} TFLOP/s "
                 f"({tflops / product_tflops(precision, device):.0%} of a matrix product's)")
        if device.type == "cuda":
            found += f", {torch.cuda.max_memory_reserved(device) / 2**30:.1f} GiB"
            found += f", the device waits {idle_share(parts, min(steps, 5)):.0%} of the time"
        results.append(found)
        speeds.append(batch * steps / seconds)
        del parts
    read_and_written = [f"{1e-12 * speed * counter.bytes / batch:.2f}" for speed in speeds]
    return (f"{results[0]}; without graphs {results[1]}; {1e-6 * counter.bytes / batch:,.0f} MB an image, "
            f"{read_and_written[0]} TB/s, without graphs {read_and_written[1]}")


def images_per_second(parts: Training) -> float:
    """Of an epoch's steps with CUDA graphs, after one that chooses kernels and records passes."""
    take_steps(parts)
    if parts.team.context.device.type == "cuda":
        assert parts.team.graphs is not None
        assert not parts.team.complaints, parts.team.complaints
    return len(parts.learner.spec.train) / take_steps(parts)


def trace_steps(model: str, precision: str, imgsz: int, batch: int, device: torch.device) -> str:
    """The kernels of three steps with CUDA graphs that take the most time, the waits, and the rate of copies."""
    from torch.profiler import ProfilerActivity, profile

    parts = make_parts(model, precision, imgsz, batch=batch, steps=6, device=device)
    take_steps(parts)
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        seconds = take_steps(parts, 3)
    found = profiler.key_averages()
    times = sorted(((event.self_device_time_total if gpu else event.self_cpu_time_total, event.key, event.count)
                    for event in found), reverse=True)
    assert times, "the profiler saw nothing"
    shares = "; ".join(f"{1e-4 * micros / seconds:.0f}% {name[:60].replace('|', '/')} x {count}"
                       for micros, name, count in times[:10])
    images = next(iter(parts.team.loaders.train))["images"]
    began = mark(device)
    for _ in range(REPEATS):
        images.to(device, non_blocking=True, copy=True)
    ended = mark(device)
    wait_for(ended)
    rate = 1e-9 * REPEATS * images.nbytes / seconds_between(began, ended)
    waiting = f", the device waits {idle_share(parts, 3):.0%} of the time" if gpu else ""
    return f"{1e3 * seconds / 3:.1f} ms a step{waiting}, copies {rate:.1f} GB/s; {shares}"


@cache
def product_tflops(precision: str, device: torch.device) -> float:
    """TFLOP/s of a large matrix product in a precision, fp32 as TF32: what this device can do."""
    side = 8192 if device.type == "cuda" else 512
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    factor = torch.rand(side, side, device=device).to(dtype)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        fastest = math.inf
        for _ in range(10):
            began = time.perf_counter()
            factor @ factor
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            fastest = min(fastest, time.perf_counter() - began)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return 2e-12 * side ** 3 / fastest


def measure_training(folder: Path, kept: str, imgsz: int, images: int, device: torch.device) -> str:
    """Images a second of a training's second epoch, and the share of the time in which it waited for its loaders.

    kept: where images are: files, memory (decoded), or device (decoded, and it renders).
    """
    (folder / "run").mkdir(parents=True)
    draw = np.random.default_rng(0)
    paths = []
    for number in range(images):
        small = draw.integers(0, 256, (imgsz // 8, imgsz // 8, 3), dtype=np.uint8)
        paths.append(str(folder / f"{number}.jpg"))
        cv2.imwrite(paths[-1], cv2.resize(small, (imgsz, imgsz * 3 // 4)))
    index = labelled(paths, imgsz * 3 // 4, imgsz)
    gpu = device.type == "cuda"
    batch = min(64, images)
    recipe = resolve(Recipe.model_validate({
        "data": "shapes8", "model": "yolov5s" if gpu else "yolov5n", "imgsz": imgsz, "batch_size": batch,
        "microbatch": batch, "epochs": 3, "noval": True, "precision": "bf16" if gpu else "fp32",
        "threads": torch.get_num_threads(), "augment": {"render": "device" if kept == "device" else "host"}}), 1,
        gpu=gpu)
    job = TrainSpec(recipe, "", index.names, None, None, index, index, folder / "run")
    loaders = max(0, len(os.sched_getaffinity(0)) - 1) if gpu else 0
    host = WorkerContext(device=device, threads=recipe.threads,
                         loader_processes=loaders, cache="ram" if kept == "memory" else "none")
    shards: list[ShardEvent] = []

    def emit(event: Event) -> None:
        if isinstance(event, ShardEvent):
            shards.append(event)

    run_session(job, host, Placement(nosave=True), emit)
    last = shards[-1]
    return (f"{loaders} loader processes: {images / last.seconds:,.0f} images/s, "
            f"of which waiting {last.wait_seconds / last.seconds:.0%}; first epoch {images / shards[0].seconds:,.0f}")


def compare_evaluation(model: str, imgsz: int, images: int, device: torch.device) -> str:
    """Losses, and the scores of the best detections, against the CPU's in fp32; and the time.

    A new model's scores are nearly equal. So BatchNorm gets the statistics of the images, and the last layers are
    enlarged. The confidence lets `CANDIDATES` predictions of an image through.
    """
    batch = min(32, images)
    index = labelled([str(number) for number in range(images)], imgsz, imgsz)

    host = torch.device("cpu")
    reference = make_parts(model, "fp32", imgsz, batch=batch, steps=1, device=host)
    network, statistics = reference.learner.model, reference.team.statistics
    with torch.no_grad():
        inputs, _ = loop.to_network_input(next(iter(reference.team.loaders.train)), host)
        network.train()(inputs)
        many = 10_000  # steps, after which nothing is left of the first statistics
        statistics.apply(statistics.recorded(0) / MOMENTUM, many)
        for layer in network.modules():
            if isinstance(layer, torch.nn.Conv2d) and layer.bias is not None:
                layer.weight.mul_(ENLARGED)
        _, all_scores = reference.learner.family.decode(network.head, network.eval()(inputs))
    confidence = float(all_scores.flatten().topk(CANDIDATES * batch).values[-1])
    config = EvaluateConfig(confidence=confidence)

    def evaluated(where: torch.device, precision: str, count: int) -> tuple[EvaluatedBatches, float]:
        parts = make_parts(model, "fp32", imgsz, batch=batch, steps=1, device=where, tf32=False)
        learner = parts.learner
        learner.model.load_state_dict(network.state_dict())
        [drawn] = parts.team.loaders.train
        batches = [{**drawn, "indices": torch.arange(first, first + batch), "ratios": torch.ones(batch, 2),
                    "pads": torch.zeros(batch, 2)} for first in range(0, count, batch)]

        def run_once() -> EvaluatedBatches:
            return evaluate_batches(learner.model, learner.family, learner.criterion, batches, index, config, precision,
                                    where)

        result = run_once()
        synchronize(parts)
        began = time.perf_counter()
        run_once()
        return result, time.perf_counter() - began

    ours, _ = evaluated(device, "fp32", batch)
    theirs, _ = evaluated(host, "fp32", batch)
    apart = float(((ours.sums - theirs.sums).abs() / theirs.sums.abs().clamp(min=1)).max())
    best = [result.rows[:, 5].sort(descending=True)[0][:batch] for result in (ours, theirs)]
    assert len(best[1]) == batch, f"only {len(best[1])} detections"
    scores = float((best[0] / best[1] - 1).abs().max()) if len(best[0]) == batch else math.inf
    _, seconds = evaluated(device, "bf16" if device.type == "cuda" else "fp32", images)
    found = (f"losses to {apart:.1e} (limit 1e-3), best scores of {len(ours.rows)} detections to {scores:.1e} "
             f"(limit 1e-3), {1e3 * seconds / images:.2f} ms an image")
    assert apart < 1e-3, found
    assert scores < 1e-3, found
    return found


def try_auto_batch(model: str, imgsz: int, device: torch.device) -> str:
    """A few steps of the number of images that AutoBatch finds."""
    recipe = resolve(Recipe.model_validate({"data": "shapes8", "model": model, "imgsz": imgsz, "precision": "bf16"}), 1,
                     gpu=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    images = auto_batch(recipe, model, 80, 8, device)
    steps = 6  # the fourth is recorded
    parts = make_parts(model, "bf16", imgsz, batch=images if device.type == "cuda" else 2, steps=steps, device=device)
    take_steps(parts)
    if device.type != "cuda":
        return f"{images} images"
    _, total = torch.cuda.mem_get_info(device)
    return f"{images} images, {torch.cuda.max_memory_reserved(device) / total:.0%} of the memory"


def measure_save(folder: Path, model: str, device: torch.device) -> str:
    """How long a save stops the training, and how long its thread takes."""
    parts = make_parts(model, "fp32", 64, batch=2, steps=1, device=device)
    take_steps(parts)
    folder.mkdir(parents=True)  # a saver makes no run folder: one that is gone was moved
    saver = Saver(folder, "", 2, lambda event: None)
    stops = []
    for step in range(1, 4):
        state = capture(parts.learner, {})
        synchronize(parts)
        saver.save(state, step, 0, ["last"])
        stops.append(saver.waited)
        saver.wait(needed=True)
        written = torch.load(folder / "weights" / "last.pt", weights_only=True)
        for name, value in state["model"].items():
            assert torch.equal(written["model"][name], value.cpu()), name
    lowest, highest = 1e3 * min(stops), 1e3 * max(stops)
    return f"training stops for {lowest:.0f} to {highest:.0f} ms, the thread takes {saver.wrote:.2f} s"


def take_steps(parts: Training, most: int | None = None) -> float:
    """Seconds of an epoch's steps, or of its first ones, to the end of the last one on the device."""
    synchronize(parts)
    began = time.perf_counter()
    steps = loop.launch_steps(*parts, iter(parts.team.loaders.train), loop.Orders)
    for number, launched in enumerate(steps, 1):
        loop.finish_step(*parts, launched)
        if number == most:
            break
    synchronize(parts)
    return time.perf_counter() - began


def synchronize(parts: Training) -> None:
    if parts.team.context.device.type == "cuda":
        torch.cuda.synchronize(parts.team.context.device)


def idle_share(parts: Training, steps: int) -> float:
    """Of the time from the first to the last kernel of an epoch's steps, in which none runs; by torch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take_steps(parts, steps)
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events()
                   if event.device_type == DeviceType.CUDA
                   and "#" not in event.name  # a note, not a kernel
                   and not event.name.startswith("Mem"))  # copies and fills run beside kernels
    if not spans:  # the driver does not allow profiling
        return math.nan
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - spans[0][0])


if __name__ == "__main__":
    sys.exit(main())
