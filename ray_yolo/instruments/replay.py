"""One step of a recorded run, trained again in this process and shown from inside.

The draws of a training have keys, and its gradients are summed in a fixed tree. Any step can therefore be trained again
on one worker, from any earlier checkpoint, wherever the run was trained. The run itself is only read.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ray_yolo.checkpoints.local import copy_newest_whole
from ray_yolo.config.commands import ReplayConfig
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import DatasetEvent, EpochEvent, Event, SplitCounts, StartEvent, changed_pictures
from ray_yolo.core.files import atomic_write
from ray_yolo.core.formatting import format_count, format_number
from ray_yolo.core.redact import printable
from ray_yolo.core.system import cores, keep_freed_memory
from ray_yolo.data.image_cache import room_in_shared_memory
from ray_yolo.data.index import survey
from ray_yolo.engine.devices import device_name, local_device
from ray_yolo.engine.loading import loader_memory
from ray_yolo.engine.loop import StepResult
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.instruments.probe import LayerNorms, NotFinite, ObservedImage, ReplaySession
from ray_yolo.plots.boxes import Picture, plot_pictures
from ray_yolo.runs.event_log import EVENTS_FILE, last_of, plain, read_events
from ray_yolo.runs.folders import output_folder
from ray_yolo.runs.location import local_folder, location, publish
from ray_yolo.runs.run_record import RECORD_FILE, RunRecord, SweepRecord, read_record
from ray_yolo.runs.steps import Agreement, choose_step, compare_losses, last_step, logged_steps, start_of
from ray_yolo.runtime.preflight import provenance, read_dataset, spec_of
from ray_yolo.runtime.resources import LoaderRoom, NodeResources, share_out

RESULT_FILE = "replay.json"
SHOWN = 5  # The output has this many pictures and layers; the file has all.
FEW_STEPS = 10  # For so few steps, starting loader processes takes longer than it saves.
_VERSIONS = {"torch": "torch", "python": "Python", "ray_yolo": "ray_yolo", "git_commit": "git commit"}


@dataclass(frozen=True)
class ReplayResult:
    """The results of a replay."""

    folder: Path  #: the folder of the results on this machine
    step: int  #: the number of the step that was observed
    before: int  #: step of the checkpoint that it started from; 0: a fresh start from the recipe
    terms: tuple[str, ...]  #: names of the loss terms
    result: StepResult  #: the step's losses and gradient norm
    agreement: Agreement  #: whether the losses are those of the run's log
    reasons: tuple[str, ...]  #: why losses may differ from the log's
    not_finite: tuple[NotFinite, ...]  #: the first one of each phase, in order; the first is the cause of the others
    images: tuple[ObservedImage, ...]  #: the step's pictures
    layers: tuple[LayerNorms, ...]  #: they have the order of the model


class RecordedRun(NamedTuple):
    """What a replay needs, read and checked."""

    config: ReplayConfig  # its `step` is decided, even if the user asked for `around`
    folder: Path  # the run's folder; for a run in a bucket, a copy of it
    events: list[Event]
    record: RunRecord


def check(config: ReplayConfig) -> RecordedRun:
    """The configuration with its step, and the run. Starts nothing.

    Raises:
        InputError: if there is no such run or step.
        ResourcesError: if a GPU was requested, and there is none.
    """
    if config.placement.num_workers:
        raise InputError("num_workers: a replay runs in this process; omit it")
    local_device(config.placement.gpus_per_worker)
    folder = local_folder(config.run)
    record = read_record(folder)
    if isinstance(record, SweepRecord):
        raise InputError(f"{config.run}: is a sweep; give the folder of one of its trials, such as "
                         f"{config.run}/trials/trial0")
    if record is None:
        raise InputError(f"{config.run}: has no {RECORD_FILE}; give the folder of a run, such as runs/train/exp")
    events = read_events(folder / EVENTS_FILE)
    newest = last_step(events)
    if not newest:
        raise InputError(f"{config.run}: its log has no step yet")
    step = config.step
    if config.around:
        step = choose_step(logged_steps(events), config.around)
    assert step is not None, "the configuration is checked"
    if step > newest:
        raise InputError(f"--step {step}: the last step in the log of {config.run} is {newest}")
    return RecordedRun(config.model_copy(update={"step": step}), folder, events, record)


def replay(config: ReplayConfig, *, quiet: bool = False) -> ReplayResult:
    """Train one step of a run again, and write what happened in it to a new folder.

    Raises:
        InputError: if there is no such run or step, or the run cannot be trained with today's files.
        ResourcesError: if a GPU was requested, and there is none.
        TrainingError: if training fails before the step.
    """
    config, run_dir, events, record = check(config)
    wanted = config.step
    assert wanted is not None, "`check` decides it"

    def report(*lines: str) -> None:
        if not quiet:
            print("\n".join(map(printable, lines)), flush=True)

    moved = {"data": config.data} if config.data else {}
    _, train, val = read_dataset(record.recipe.model_copy(update=moved))
    spec = spec_of(record, run_dir, 1, train, val, config.data)
    # What changes no weights is left out: early stops, and validations whose results no draw of images needs.
    unused = {"patience": 0, "noval": spec.recipe.noval or not spec.recipe.image_weights}
    spec = replace(spec, recipe=spec.recipe.model_copy(update=unused))
    folder = output_folder(config.placement, (str(run_dir / RECORD_FILE), *train.paths))
    # The session works on a copy: it would change the run's folder when it resumes.
    with tempfile.TemporaryDirectory(prefix=".ray_yolo-replay-", dir=folder, ignore_cleanup_errors=True) as scratch:
        before, problems = copy_newest_whole(run_dir, wanted, Path(scratch))
        for problem in problems:
            report(f"WARNING: not used: {problem}")
        since = f"from its checkpoint at step {before}" if before else "from the start, as no earlier checkpoint exists"
        report(f"step {wanted} of {config.run}: trains {format_count(wanted - before, 'step')} again, {since}")
        start = start_of(events, wanted)
        context = _context(config, spec, start, wanted - before)
        spec = replace(spec, run_dir=Path(scratch))
        session = ReplaySession(spec, context, wanted, before, lambda event: None, _progress(report, before, wanted))
        try:
            session.replay()
        finally:
            session.close()
    losses = {number: result.losses.tolist() for number, result in session.results.items()}
    splits = {"train": survey(train), "val": survey(val)}
    probe = session.probe
    result = ReplayResult(
        folder=folder, step=wanted, before=before, terms=session.learner.criterion.names,
        result=session.results[wanted], agreement=compare_losses(logged_steps(events), losses),
        reasons=tuple(_differences(record, events, start, context, splits)),
        not_finite=tuple(probe.not_finite.values()), images=tuple(session.images), layers=tuple(probe.layers))
    pictures = [] if config.placement.noplots else _draw(result, spec)
    tree = plain(_tree(config.run, result, spec))
    atomic_write(folder / RESULT_FILE, json.dumps(tree, indent=1))
    publish(folder)
    report(*_summary(result, spec), *pictures, f"results in {location(folder)}")
    return result


def _context(config: ReplayConfig, spec: TrainSpec, start: StartEvent | None, steps: int) -> WorkerContext:
    """The worker's context, with as many arithmetic threads as the run's workers had: they affect the last bits."""
    keep_freed_memory()
    uncached = config.placement.model_copy(update={"cache": "none"})
    device = local_device(uncached.gpus_per_worker)
    nodes = [NodeResources(cores(), torch.cuda.device_count())]
    need = loader_memory(spec.recipe, len(spec.train), len(spec.val), gpu=device.type == "cuda")
    room = LoaderRoom(room_in_shared_memory(), need.per_loader, need.in_use)
    placement, resources = share_out(uncached, float(device.type == "cuda"), nodes, spec.recipe.threads, room=room)
    threads = start.threads if start and start.threads else resources.threads
    loaders = 0 if steps <= FEW_STEPS and config.placement.workers < 0 else placement.loader_processes
    # Not as CUDA graphs: hooks on layers observe the step.
    return WorkerContext(device=device, threads=threads, loader_processes=loaders, cuda_graphs="off")


def _progress(report: Callable[[str], None], before: int, wanted: int) -> Callable[[int], None]:
    """Reports each tenth of a long replay."""
    stride = max(math.ceil((wanted - before) / 10), FEW_STEPS)

    def trained(step: int) -> None:
        if (step - before) % stride == 0 and step < wanted:
            report(f"step {step} of {wanted}")

    return trained


def _differences(record: RunRecord, events: Sequence[Event], start: StartEvent | None, context: WorkerContext,
                 splits: Mapping[str, SplitCounts]) -> Iterable[str]:
    """What differs from the run's training and may change the last bits of a loss."""
    recorded = last_of(events, DatasetEvent)
    if recorded and "train" in changed_pictures(recorded.splits, splits):
        yield "pictures: their files have other sizes or times than at the run's last start, so they may have changed"
    today = provenance(record.recipe.model)
    for name in {**_VERSIONS, **{name: name for name in today.keys() - _VERSIONS.keys() - {"ray"}}}:
        then, now = record.provenance.get(name, ""), today.get(name, "")
        if then != now and then and now:
            yield f"{_VERSIONS.get(name, name)}: {then} then, {now} now"
    device = device_name(context.device)
    if start and start.device and start.device != device:
        yield f"device: {start.device} then, {device} now"
    used_gpu = any(isinstance(event, EpochEvent) and event.memory_gb > 0 for event in events)
    if not (start and start.device) and used_gpu != (context.device.type == "cuda"):
        yield f"device: {'a GPU' if used_gpu else 'a CPU'} then, {device} now"
    if start and start.threads and start.threads != torch.get_num_threads():
        yield f"threads: {start.threads} then, {torch.get_num_threads()} now"
    if start and start.num_workers > 1 and record.recipe.sync_bn:
        yield f"sync_bn: {start.num_workers} workers have split each microbatch, and sums of parts round differently"
    if context.device.type == "cuda" and not record.recipe.exact:
        yield "not exact: some kernels of a GPU add in an order that changes; only --exact excludes them"


def _draw(result: ReplayResult, spec: TrainSpec) -> list[str]:
    """Draw the step's pictures, a sheet for each microbatch. Returns a line on them."""
    sheets: dict[int, list[Picture]] = {}
    for number, image in enumerate(result.images):
        pixels = image.pixels.permute(1, 2, 0).contiguous().numpy()
        file = Path(spec.train.paths[image.samples[0]])
        loss = format_number(sum(image.losses))
        title = f"{number}: {file.name}  loss {loss}"
        picture = Picture(pixels, image.boxes.numpy(), image.classes.numpy(), title=title)
        sheets.setdefault(image.microbatch, []).append(picture)
    for microbatch, pictures in sheets.items():
        plot_pictures(pictures, spec.names, result.folder / f"microbatch{microbatch}.jpg")
    return [f"pictures as the network saw them: {location(result.folder)}/microbatch*.jpg"]


def _tree(run: str, result: ReplayResult, spec: TrainSpec) -> dict[str, Any]:
    """The content of replay.json. A number that is not finite becomes null."""
    step = result.result
    images = []
    for number, image in enumerate(result.images):
        boxes = []
        for kind, box in zip(image.classes.tolist(), image.boxes.tolist(), strict=True):
            boxes.append({"class": spec.names[kind], "box": box})
        images.append({
            "number": number, "microbatch": image.microbatch,
            "files": [spec.train.paths[sample] for sample in image.samples],
            "loss": _named(result.terms, image.losses),
            "boxes": boxes,
        })
    return {
        "run": run, "step": result.step, "before": result.before,
        "loss": _named(result.terms, step.losses.tolist()), "gradient_norm": step.gradient_norm,
        "skipped": step.skipped,
        "log": {**result.agreement._asdict(), "differences": list(result.reasons)},
        "not_finite": [found._asdict() for found in result.not_finite],
        "images": images,
        "layers": [layer._asdict() for layer in result.layers],
    }


def _named(terms: Sequence[str], losses: Sequence[float]) -> Mapping[str, float]:
    return dict(zip(terms, losses, strict=True))


def _summary(result: ReplayResult, spec: TrainSpec) -> list[str]:
    """The lines at the end of a replay: agreement with the log, the step, the first numbers that are not finite, and
    the images and layers that count most in it."""
    # Whether the losses are the log's, and what may have changed them if they are not.
    lines = [result.agreement.line]
    if result.agreement.first is not None:
        reasons = result.reasons or ["no known reason: versions, device and threads are the same; the images may have "
                                     "changed"]
        lines += [f"    {reason}" for reason in reasons]

    step = result.result
    losses = zip(result.terms, step.losses.tolist(), strict=True)
    named = ", ".join(f"{name} {loss:.4g}" for name, loss in losses)
    end = "; skipped, no weight has changed" if step.skipped else ""
    lines.append(f"step {result.step}: loss {named}; gradient norm {step.gradient_norm:.4g}{end}")
    lines += _not_finite_lines(result.not_finite)

    # A table of the images with the highest losses, and one of the layers with the largest gradients.
    titles = "".join(f"{name:>10}" for name in result.terms)
    lines += ["", f"{'highest parts of the loss':<44}{'boxes':>6}{titles}"]
    numbered = sorted(enumerate(result.images), key=lambda pair: _largest_first(sum(pair[1].losses)))
    for number, image in numbered[:SHOWN]:
        file = Path(spec.train.paths[image.samples[0]])
        name = f"{number}: {file.name}"[:43]
        parts = "".join(f"{loss:>10.3g}" for loss in image.losses)
        lines.append(f"{name:<44}{len(image.boxes):>6}{parts}")
    lines += ["", f"{'largest gradients':<44}{'gradient':>10}{'weights':>10}"]
    for layer in sorted(result.layers, key=lambda layer: _largest_first(layer.gradient))[:SHOWN]:
        lines.append(f"{layer.layer[:43]:<44}{layer.gradient:>10.3g}{layer.weights:>10.3g}")
    return [*lines, "", f"all images and layers: {location(result.folder)}/{RESULT_FILE}"]


def _largest_first(value: float) -> float:
    """A sort key: what is not finite first, then the largest."""
    return -value if math.isfinite(value) else -math.inf


def _not_finite_lines(found: Sequence[NotFinite]) -> list[str]:
    """Where the first tensors that are not finite appeared, the cause first."""
    where = {"weights": "before the step", "forward": "in the forward pass", "loss": "in the loss",
             "backward": "in the backward pass", "sum": "in the sum over microbatches"}
    lines = []
    for number, (phase, module, tensor, microbatch) in enumerate(found):
        part = "" if microbatch is None else f" of microbatch {microbatch}"
        label = "first not finite" if number == 0 else "then"
        lines.append(f"{label}: {where[phase]}{part}: {module}, {tensor}")
    return lines
