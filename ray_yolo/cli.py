"""The commands: their flags, and the functions that they call.

A command imports its implementation after its flags are parsed: --help and bad flags need no torch, Ray or MLflow.
"""

from __future__ import annotations

import argparse
import errno
import glob
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

import ray_yolo
from ray_yolo.answers import answering, of_comparison, of_prediction, of_training, of_validation, of_verification
from ray_yolo.config.commands import ExportConfig, PredictConfig, ReplayConfig, ServeConfig, ValConfig
from ray_yolo.config.effects import command_without_effect, describe_unused, given_settings, refuse_unread_loss
from ray_yolo.config.flags import JSON_HELP, Command, Parsed, parse
from ray_yolo.config.model_facts import MODELS, check_model_name, missing_weights, read_model_file
from ray_yolo.config.placement import Placement, RunConfig
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import SourcedValue, config_fields, describe
from ray_yolo.core import deadline
from ray_yolo.core.documents import ChecksDocument, ClusterDocument, Document, ListDocument, StatusDocument
from ray_yolo.core.errors import CheckpointError, InputError, RayYoloError, ResourcesError
from ray_yolo.core.formatting import format_count
from ray_yolo.core.redact import printable, redact
from ray_yolo.core.signals import end_at_once, raise_from_now_on
from ray_yolo.core.system import SPINS
from ray_yolo.runs.event_log import EVENTS_FILE
from ray_yolo.runs.run_record import LEDGER_FILE, NO_RUN
from ray_yolo.runs.usage import cost_table, parse_prices, usage_of
from ray_yolo.storage.store import is_address
from ray_yolo.tune.compare_settings import CompareConfig
from ray_yolo.tune.search import OF_ONE_TRAINING, SweepConfig, TuneConfig

Config = TypeVar("Config", bound=BaseModel)
Result = TypeVar("Result")

EXIT_DIFFERENT, EXIT_SKIP = 1, 125
"""Of `verify --exit-code`, as `git bisect run` reads them: bad, and cannot be tested."""
EXIT_FAILED = 3
EXIT_UNREAD = 128 + signal.SIGPIPE
EXIT_HUNG_UP = 128 + signal.SIGHUP
_EXITS = {
    None: 0,
    0: 0,  # --help
    signal.SIGTERM: 128 + signal.SIGTERM,  # by our handler, or by Ray's, which replaces it on import
    EXIT_HUNG_UP: EXIT_HUNG_UP,
}
"""What a command raises SystemExit with -> its exit status. Any other SystemExit is left to Python."""
_STDOUT = 1
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable of the entry point of a Ray job: the job's settings. Ray is not imported here."""
QUIET_RAY = {"RAY_ENABLE_AUTO_CONNECT": "0"}
"""Environment to set before Ray is imported: a call after its end fails, where Ray would start a second one."""


# Name, an environment variable of its processes, and the one with their number
_LAUNCHERS = (("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
              ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_MLFLOW = "not supported: runs are tracked by MLflow, see --mlflow-uri"


def _fork_settings(source: str, given: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """`fork_settings`, whose module loads NumPy: help must not wait for that."""
    from ray_yolo.runs.fork import fork_settings

    return fork_settings(source, given)


TRAIN = Command(
    prog="python -m ray_yolo.train",
    description="Train a detector. The same recipe gives the same training on any number of workers.",
    model=RunConfig,
    paths=(
        *(path for path in config_fields(RunConfig) if "." not in path and path != "autoanchor"),
        "optimizer.name", "schedule.cos_lr", "loss.label_smoothing",
    ),
    switches={"--noautoanchor": ("autoanchor", "false")},
    unsupported={
        "--bucket": "use --storage-path s3://BUCKET (or gs://, az://)",
        "--evolve": "use python -m ray_yolo.tune; each of its trials is itself a training on many workers",
        "--resume_evolve": "run the same python -m ray_yolo.tune command again; it continues",
        "--evolve_population": "use --warm-start PATH of python -m ray_yolo.tune: an evolve.csv, hyp file, or folder",
        "--local_rank": "not needed: Ray starts the workers; run this command once with --num-workers N",
        "--entity": _MLFLOW,
        "--upload_dataset": _MLFLOW,
        "--bbox_interval": _MLFLOW,
        "--artifact_alias": _MLFLOW,
    },
    inherit=_fork_settings,
    has_json=True,
)

VAL = Command(
    prog="python -m ray_yolo.val",
    description="Validate trained weights. The numbers do not depend on the number of workers.",
    model=ValConfig,
    paths=(
        "weights", "data", "split", "imgsz", "precision", "single_cls", "classes", "allow_empty", "allow_names",
        "labels_with_confidence", "keep_difficult", "coco",
        "save_txt", "save_conf", "save_json", "worst",
        "evaluate.batch_size", "evaluate.confidence", "evaluate.iou", "evaluate.max_detections",
        "num_workers", "gpus_per_worker", "cpus_per_worker", "address", "workers",
        "project", "name", "exist_ok", "storage_path", "noplots", "mlflow_uri",
    ),
    switches={"--half": ("precision", "fp16")},
    unsupported={
        "--augment": "not supported: a larger --imgsz has most of its effect",
        "--save-hybrid": "not supported: labels are never added to detections",
        "--verbose": "not needed: the table of classes is always printed",
        "--dnn": "not supported: weights are of torch",
    },
    has_json=True,
)

PREDICT = Command(
    prog="python -m ray_yolo.predict",
    description="Detect in images and videos. The detections do not depend on the number of workers.",
    model=PredictConfig,
    paths=(
        "weights", "source", "imgsz", "confidence", "iou", "max_detections", "agnostic_nms", "classes", "precision",
        "batch_size", "vid_stride", "save_txt", "save_conf", "save_json", "save_csv", "save_crop", "nosave",
        "hide_labels", "hide_conf", "line_thickness", "num_workers", "gpus_per_worker", "cpus_per_worker", "address",
        "project", "name", "exist_ok", "storage_path",
    ),
    switches={"--half": ("precision", "fp16"), "--square": ("rect", "false")},
    unsupported={
        "--data": "not needed: the weights contain the names of their classes",
        "--view-img": "not supported: open the pictures in the folder that the command prints at its end",
        "--augment": "not supported: a larger --imgsz has most of its effect",
        "--visualize": "not supported: features are not drawn",
        "--update": "not supported: files of other programs are read as they are",
        "--dnn": "not needed: ONNX files are read by ONNX Runtime",
    },
    has_json=True,
)

EXPORT = Command(
    prog="python -m ray_yolo.export",
    description="Write trained weights as a file for other programs, checked against torch.",
    model=ExportConfig,
    paths=("weights", "project", "format", "imgsz", "batch_size", "dynamic", "nms", "opset", "confidence", "iou",
           "max_detections", "agnostic_nms"),
    unsupported={
        "--data": "not needed: the weights contain the names of their classes",
        "--half": "not supported: the program that runs the file chooses its precision",
        "--int8": "not supported: the program that runs the file chooses its precision",
        "--simplify": "not needed: constants are always folded",
    },
)

SERVE = Command(
    prog="python -m ray_yolo.serve",
    description="Serve detection over HTTP with Ray Serve: POST a picture to http://127.0.0.1:8000/predict.",
    model=ServeConfig,
    paths=tuple(config_fields(ServeConfig)),
)

REPLAY = Command(
    prog="python -m ray_yolo.replay",
    description="Train one step of a run again in this process, wherever and on however many workers it was trained.\n"
                "Shows the step's pictures as the network saw them, the loss of each, the gradient of each layer, the\n"
                "first tensor that is not finite, and whether the losses are those of the log. The run is not changed.",
    model=ReplayConfig,
    paths=("step", "around", "data", "gpus_per_worker", "workers", "project", "name", "exist_ok", "storage_path",
           "noplots"),
    arguments=("run",),
)

TUNE = Command(
    prog="python -m ray_yolo.tune",
    description="Search for a better recipe. Every trial is a distributed training, and many trials run in parallel; "
                "rerun the same command to continue.",
    model=TuneConfig,
    paths=(*config_fields(SweepConfig),
           *(path for path in TRAIN.paths if path not in ("num_workers", *OF_ONE_TRAINING))),
    switches=TRAIN.switches,
    unsupported={"--num-workers": "use --workers-per-trial; the number of trials at once follows from the cluster",
             "--evolve": "not needed: use --space evolve --trials N"},
)

COMPARE = Command(
    prog="python -m ray_yolo.compare",
    description="Is B really better than A? Trains both on pairs of fresh seeds, many at once, until one side is shown "
                "to be\nbetter or --pairs and --hours are spent; rerun the same command to continue. Every other flag "
                "is for both sides.\nA and B: base (these flags alone), a YAML file of settings, a named recipe, the "
                "folder of a run (its recipe),\na data set, initial weights, or PATH=VALUE. For example:\n"
                "  base lr0=0.1 --data data.yaml        old.yaml new.yaml --model yolov5n        "
                "runs/train/exp runs/train/exp2",
    model=CompareConfig,
    paths=("set_a", "set_b", "pairs", "hours", "workers_per_training",
           *(path for path in TRAIN.paths
             if path not in ("num_workers", "registered_name", *OF_ONE_TRAINING))),
    switches=TRAIN.switches,
    unsupported={"--num-workers": "use --workers-per-training; the number of trainings at once follows from the "
                                  "cluster"},
    arguments=("a", "b"),
    has_json=True,
)

EXAMPLES = (
    ("ray_yolo train --data shapes8 --model yolov5n --imgsz 64 --epochs 3",
     "train on a built-in data set, on this machine; the results are in runs/train/exp"),
    ("ray_yolo train --data data.yaml --weights yolov5s.pt --num-workers 2-8",
     "train on your data from released weights, on as many Ray workers as fit on the cluster"),
    ("ray_yolo val --weights runs/train/exp/weights/best.pt --coco",
     "validate the best weights, also with COCO's metrics"),
    ("ray_yolo predict --weights runs/train/exp/weights/best.pt --source pictures --conf 0.4 --save-txt",
     "detect in a folder of pictures; the results are in runs/detect/exp"),
    ("ray_yolo tune --data data.yaml --model yolov5n --epochs 10 --space ladder --trials 50",
     "search the settings with 50 trials"),
    ("ray_yolo compare base lr0=0.02 --data data.yaml --model yolov5n --epochs 10",
     "say whether this learning rate is better, from pairs of trainings on fresh seeds"),
)
"""Command lines that `ray_yolo --help` shows, each with its effect."""

parse_train, parse_tune = partial(parse, TRAIN), partial(parse, TUNE)
parse_val, parse_predict, parse_export = partial(parse, VAL), partial(parse, PREDICT), partial(parse, EXPORT)
parse_serve, parse_replay, parse_compare = partial(parse, SERVE), partial(parse, REPLAY), partial(parse, COMPARE)


def _refuse_missing(*, data: str = "", weights: str = "", model: str = "", source: str = "") -> None:
    """Refuse a path of a file that does not exist, before the imports of what reads it, which take seconds. What reads
    it would refuse it in the same words."""
    if data and not is_address(data) and not os.path.exists(os.path.expanduser(data)):
        from ray_yolo.data.dataset_yaml import read_description

        read_description(data)  # a built-in one has no path
    if weights and not is_address(weights) and not os.path.exists(weights):
        raise CheckpointError(missing_weights(Path(weights).absolute()))
    path = Path(model)
    if path.suffix in (".yaml", ".yml") and not path.exists() and path.stem not in MODELS:
        read_model_file(path)
    is_path = source and not (is_address(source) or source.isdecimal() or glob.has_magic(source))
    if is_path and not os.path.exists(source):
        raise InputError(f"source: {source}: no such file or folder")


def _refuse_missing_for_training(recipe: Recipe, placement: Placement) -> None:
    """`_refuse_missing` for a training that may continue a run: that one needs its initial weights no more."""
    from ray_yolo.runs.working_copy import FINISHED

    project = os.path.join(placement.storage_path, placement.project)
    runs = map(Path, glob.glob(f"{glob.escape(project)}/*/run.json"))  # none where the project cannot be read
    may_continue = is_address(placement.storage_path) or any(not (run.parent / FINISHED).exists() for run in runs)
    _refuse_missing(data=recipe.data, weights="" if may_continue else recipe.weights, model=recipe.model)


def train(argv: Sequence[str] | None = None) -> int:
    """Train one model."""
    parsed = parse_train(argv)
    config, origins, is_dry_run, given, is_json = parsed
    if not config.placement.resume:  # else the model is the run's
        check_model_name(config.recipe.model)
        refuse_unread_loss(given, config.recipe)
        _refuse_missing_for_training(config.recipe, config.placement)
    elif config.placement.resume != "auto" and not (is_address(config.placement.resume)
                                                    or os.path.exists(config.placement.resume)):
        raise InputError(NO_RUN.format(config.placement.resume))
    from ray_yolo.runtime import trainer

    raise_from_now_on()
    if not is_dry_run:
        with answering(is_json) as answer:
            result = trainer.fit(config, origins=origins)
            if is_json:
                answer(of_training(result))
        return 0
    planned = trainer.dry_run(config)
    lines = [*_plan_of_workers(planned.config), *planned.notes]
    print("\n".join([describe(config, origins, planned.config), *(f"# {line}" for line in lines)]))
    return 0


def _plan_of_workers(config: RunConfig) -> list[str]:
    """The settings of a step, and where it would be trained, as far as they are known."""
    if config.placement.num_workers == "auto":
        return ["the cluster decides the number of workers and the batch size"]
    from ray_yolo.sinks import report

    settings = report.settings_line(config.recipe)
    if config.placement.num_workers == 0:
        return [settings, "in this process, without Ray"]
    from ray_yolo.runtime import cluster

    return [settings, report.workers_line(config.placement, cluster.planned_gpus(config.placement))]


def tune(argv: Sequence[str] | None = None) -> int:
    """Search for a better recipe by many trainings."""
    config, origins, is_dry_run, given, _ = parse_tune(argv)
    check_model_name(config.recipe.model)
    refuse_unread_loss(given, config.recipe)
    _refuse_missing_for_training(config.recipe, config.placement)
    from ray_yolo.core.cache_folder import check_cache_folder
    from ray_yolo.tune import tuner

    raise_from_now_on()
    check_cache_folder()
    if not is_dry_run:
        tuner.search(config)
        return 0
    planned = tuner.dry_run(config)
    print("\n".join([describe(config, origins, planned.config), *(f"# {line}" for line in planned.notes)]))
    return 0


def compare(argv: Sequence[str] | None = None) -> int:
    """Say which of two recipes, data sets or weights is better, from pairs of trainings."""
    config, origins, is_dry_run, given, is_json = parse_compare(argv)
    from ray_yolo.tune.sides import read_sides  # here: it loads NumPy

    sides = read_sides(config, origins)
    for recipe in sides:
        check_model_name(recipe.model)
    refuse_unread_loss(given, *sides)
    for recipe in sides:
        _refuse_missing(data=recipe.data, weights=recipe.weights, model=recipe.model)
    from ray_yolo.core.cache_folder import check_cache_folder
    from ray_yolo.tune import comparer

    raise_from_now_on()
    check_cache_folder()
    if not is_dry_run:
        with answering(is_json) as answer:
            result = comparer.compare(config, sides)
            if is_json:
                answer(of_comparison(result))
        return 0
    lines = comparer.dry_run(config, sides)
    print("\n".join([describe(config, origins), *(f"# {line}" for line in lines)]))
    return 0


def val(argv: Sequence[str] | None = None) -> int:
    """Validate trained weights."""
    parsed = parse_val(argv)
    _refuse_missing(weights=parsed.config.weights, data=parsed.config.data)
    from ray_yolo.runtime.validator import check, validate

    return _act(parsed, validate, lambda config: check(config)[0], of_validation)


def predict(argv: Sequence[str] | None = None) -> int:
    """Detect in images and videos."""
    parsed = parse_predict(argv)
    _refuse_missing(source=parsed.config.source, weights=parsed.config.weights)
    from ray_yolo.runtime import predictor

    return _act(parsed, predictor.predict, lambda config: predictor.check(config)[0], of_prediction)


def export(argv: Sequence[str] | None = None) -> int:
    """Write trained weights for other programs."""
    parsed = parse_export(argv)
    _refuse_missing(weights=parsed.config.weights)
    from ray_yolo.inference.export import check, export

    return _act(parsed, lambda config: print(export(config)), lambda config: check(config)[0])


def serve(argv: Sequence[str] | None = None) -> int:
    """Serve detection over HTTP, at http://127.0.0.1:8000/predict."""
    parsed = parse_serve(argv)
    if not (is_address(parsed.config.weights) or os.path.isfile(parsed.config.weights)):
        raise InputError(f"weights: {parsed.config.weights}: no such weights file")
    try:
        from ray_yolo.runtime import serving
    except ImportError as error:
        raise InputError(f"serve: {error}; pip install 'ray_yolo[serve]'") from None
    return _act(parsed, serving.run, serving.check)


def checks(argv: Sequence[str] | None = None) -> int:
    """Show versions, devices, cluster and storage, or a data set, on one page.

    Returns 4 if a check fails, and 2 if a training would refuse the data set.
    """
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.checks", description=(
        "Versions, devices, cluster and storage on one page, for a bug report. With --data: what a training would read "
        "from a data set, without training."))
    parser.add_argument("--data", default="", metavar="YAML|DIR", help=(
        "data set to read: prints what each split holds, and files, images and labels that are not used or not as "
        "expected; writes images with their boxes, dataset.jpg, into a new folder of runs/checks"))
    parser.add_argument("--against", default="", metavar="YAML|DIR", help=(
        "older version of the data set of --data: prints what was added, removed, moved, replaced and relabelled, and "
        "writes every change as CSV"))
    parser.add_argument("--runs", nargs=2, default=(), metavar=("RUN_A", "RUN_B"), help=(
        "a run on --data and one on --against: adds the change of each class's average precision"))
    parser.add_argument("--address", default="", metavar="HOST:PORT", help="Ray cluster; '': RAY_ADDRESS, else none")
    parser.add_argument("--storage-path", default="", metavar="DIR|ADDRESS", help="storage; '': the current folder")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    options = parser.parse_args(argv)
    with answering(options.json) as answer:
        return _checks(parser, options, answer)


def _checks(parser: argparse.ArgumentParser, options: argparse.Namespace, answer: Callable[[Document], None]) -> int:
    if options.against and not options.data:
        parser.error("--against: needs --data, the new version")
    if options.runs and not options.against:
        parser.error("--runs: needs --data and --against, the versions that they were trained on")
    if options.against:
        from ray_yolo.instruments.dataset_changes import compare_datasets
        from ray_yolo.instruments.dataset_check import PROJECT

        raise_from_now_on()
        placement = Placement(storage_path=options.storage_path, project=PROJECT)
        runs = [_folder(run, whole=False) for run in options.runs]
        lines = compare_datasets(options.data, options.against, runs, placement)
        print("\n".join(lines))
        answer(ChecksDocument(problems=(), splits=None, names=None, lines=tuple(lines)))
        return 0
    if options.data:
        return _check_data(options.data, options.storage_path, answer)
    from ray_yolo.instruments.bug_report import describe as describe_all

    raise_from_now_on()
    lines, wrong = describe_all(Placement(address=options.address, storage_path=options.storage_path))
    print("\n".join(lines))
    answer(ChecksDocument(problems=tuple(map(redact, wrong)), splits=None, names=None, lines=tuple(lines)))
    return ResourcesError.exit_code if wrong else 0


def _check_data(data: str, storage_path: str, answer: Callable[[Document], None]) -> int:
    _refuse_missing(data=data)
    from ray_yolo.instruments.dataset_check import PROJECT, check_dataset

    raise_from_now_on()
    checked = check_dataset(data, Placement(storage_path=storage_path, project=PROJECT))
    print("\n".join(checked.lines))
    problems = [redact(printable(problem)) for problem in checked.problems]
    for problem in problems:
        print(f"a training refuses this: {problem}", file=sys.stderr)
    answer(ChecksDocument(problems=tuple(problems), splits=checked.splits, names=checked.names,
                          lines=tuple(checked.lines)))
    return InputError.exit_code if problems else 0


def sync(argv: Sequence[str] | None = None) -> int:
    """Complete the records of a run or sweep: pictures, tables, MLflow.

    Returns 3 if some cannot be completed.
    """
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.sync", description=(
        "Complete the records of a run or sweep from its log: tables, pictures, TensorBoard's files, the MLflow run, "
        "files in a bucket. What is complete is not made again."))
    parser.add_argument("run_dir", help="folder or address of a run or sweep, such as runs/train/exp")
    parser.add_argument("--mlflow-uri", default="", help="tracking server; '': MLFLOW_TRACKING_URI, else the run's own")
    options = parser.parse_args(argv)
    from ray_yolo.sinks.mlflow_client import is_copy, own_uri, tracking_uri
    from ray_yolo.sinks.records import synchronise
    from ray_yolo.tune.records import synchronise_study

    raise_from_now_on()
    run_dir = _folder(options.run_dir)
    requested = options.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if requested == "off":
        parser.error("--mlflow-uri off: no server to deliver to; give one")
    if is_copy(run_dir) and not options.mlflow_uri:
        print(f"{run_dir}: is a copy of a run's folder, and the MLflow run belongs to the other one: nothing is "
              "delivered (--mlflow-uri names a server to deliver to from here)", file=sys.stderr)
        uri = None
    else:
        uri = tracking_uri(requested or own_uri(run_dir), Path.cwd())
    if (run_dir / LEDGER_FILE).is_file():
        return synchronise_study(run_dir, uri)
    return synchronise(run_dir, uri)


def verify(argv: Sequence[str] | None = None) -> int:
    """Check a run or sweep, or compare it with another one.

    Returns 3 if a check fails, or with --exit-code what `git bisect run` expects.
    """
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.verify", description=(
        "Check every checkpoint and weights file of a run against its manifest, or compute all decisions of a sweep "
        "again. With a second run, compare their weights bit by bit at every step that both have saved; with a second "
        "sweep, compare their ledgers line by line."))
    parser.add_argument("run_dir", help="folder or address of a run or sweep, such as runs/train/exp, or a .pt file")
    parser.add_argument("other", nargs="?", help="folder or address of another run or sweep")
    parser.add_argument("--exit-code", action="store_true", help=(
        "for `git bisect run`: exit with 0 if both are equal, 1 if they differ, 125 (skip) if it cannot be decided"))
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.exit_code and not options.other:
        parser.error("--exit-code: needs a second run to compare with")
    try:
        with answering(options.json) as answer:
            code, unclear = _verify(options.run_dir, options.other, answer)
    except Exception as error:
        if not options.exit_code:
            raise
        print(redact(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return EXIT_SKIP
    if not options.exit_code:
        return 3 if code else 0
    if code == EXIT_DIFFERENT or not unclear:
        return code
    print(redact(f"cannot be decided: {unclear}"), file=sys.stderr)
    return EXIT_SKIP


def _verify(run: str, other: str | None, answer: Callable[[Document], None]) -> tuple[int, str]:
    """Print the checks of a run or sweep and its comparison with another one.

    Returns:
        0, EXIT_DIFFERENT if the comparison finds a difference, or EXIT_SKIP if only a check fails; and why equal
        results do not show that both are equal, '' if they do.
    """
    from ray_yolo.runs.verification import check_files, compare_runs, unequal_end
    from ray_yolo.tune.verification import check_study, compare_studies

    raise_from_now_on()
    run_dir, unclear = _folder(run), ""
    other_dir = _folder(other) if other else None
    if (run_dir / LEDGER_FILE).is_file():
        checks = check_study(run_dir)
        comparisons = compare_studies(run_dir, other_dir) if other_dir else []
    else:
        checks = check_files(run_dir)
        comparisons = compare_runs(run_dir, other_dir) if other_dir else []
        unclear = unequal_end(run_dir, other_dir) if other_dir else ""
    for finding in (*checks, *comparisons):
        print(f"{finding.what:<30} {finding.problem or 'ok'}")
    if comparisons and not any(finding.problem for finding in comparisons):
        print(_verdict(len(comparisons), (run_dir / LEDGER_FILE).is_file(), unclear))
    answer(of_verification(run, other, checks, comparisons, unclear))
    if any(finding.problem for finding in comparisons):
        return EXIT_DIFFERENT, unclear
    return EXIT_SKIP if any(finding.problem for finding in checks) else 0, unclear


def _verdict(count: int, is_study: bool, unclear: str) -> str:
    """The sentence about two runs or studies without a difference."""
    if is_study:
        return "equal in every line of their ledgers"
    return f"equal in all {format_count(count, 'step')} that both have saved" + (f"; {unclear}" if unclear else "")


def replay(argv: Sequence[str] | None = None) -> int:
    """Train one step of a run again, and show its pictures, losses and gradients, and where NaN appears."""
    parsed = parse_replay(argv)
    run = parsed.config.run
    if not is_address(run):
        _require_log(Path(run))
    from ray_yolo.instruments import replay as replay_module

    return _act(parsed, replay_module.replay, lambda config: replay_module.check(config).config)


def status(argv: Sequence[str] | None = None) -> int:
    """Show what a run or sweep is doing, or whether a cluster's nodes can train."""
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.status", description=(
        "What the training or sweep of a folder is doing. Without a folder: the nodes of a cluster, and whether each "
        "of them can train."))
    parser.add_argument("run_dir", nargs="?", help="folder or address of a run or sweep")
    parser.add_argument("--address", default="", help="Ray cluster; '': RAY_ADDRESS, else the one of this machine")
    parser.add_argument("--price", default="", metavar="TYPE=PRICE,...", help=(
        "prices of a GPU hour, such as spot=0.9,on-demand=3.1: adds what the run or sweep has cost, what interruptions "
        "have cost, and the cost on on-demand nodes alone; without GPUs, prices of a worker's hour"))
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    options = parser.parse_args(argv)
    if options.price and options.run_dir is None:
        parser.error("--price: needs a run or sweep")
    prices = parse_prices(options.price) if options.price else {}
    with answering(options.json) as answer:
        if options.run_dir is None:
            from ray_yolo.runtime.node_checks import describe_cluster

            raise_from_now_on()
            lines, can_train = describe_cluster(options.address)
            print("\n".join(lines))
            answer(ClusterDocument(can_train=can_train, lines=tuple(lines)))
            return 0 if can_train else ResourcesError.exit_code
        if not is_address(options.run_dir):
            _require_log(Path(options.run_dir))
        from ray_yolo.tune.listing import summarise
        from ray_yolo.tune.status import describe_study

        raise_from_now_on()
        folder = _folder(options.run_dir, whole=False)
        lines = describe_study(folder)
        if prices:
            lines += ["", *cost_table(usage_of(folder), prices)]
        print("\n".join(lines))
        if options.json:  # it reads the log once more
            summary = summarise(folder, options.run_dir)
            answer(StatusDocument(**summary.model_dump(), lines=tuple(lines)))
        return 0


def list_runs(argv: Sequence[str] | None = None) -> int:
    """List the runs and sweeps of a project, and results of validations and predictions, with state and best result."""
    parser = argparse.ArgumentParser(prog="python -m ray_yolo.list", description=(
        "The runs and sweeps of a project: state, epochs, mAP50-95 of the best epoch, start and last change."))
    parser.add_argument("project", nargs="?", default="runs/train",
                        help="folder or address of a project, such as s3://bucket/vision/runs/train, or a folder of "
                             "projects, such as runs [runs/train]")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    options = parser.parse_args(argv)
    from ray_yolo.tune.listing import format_table, list_project

    raise_from_now_on()
    with answering(options.json) as answer:
        runs = list_project(options.project)
        print("\n".join(map(printable, format_table(runs, time.time()))))
        answer(ListDocument(project=options.project, runs=tuple(runs)))
    return 0


list_runs.__name__ = "list"  # the name of the command; in this module it is that of a builtin
COMMANDS = {command.__name__: command for command in (
    train, val, predict, export, serve, tune, compare, sync, verify, replay, status, list_runs, checks)}


def console() -> int:
    """The installed program: `ray_yolo COMMAND ...` equals `python -m ray_yolo.COMMAND ...`."""
    name, *words = sys.argv[1:] or ["--help"]

    def start() -> int:
        if name in COMMANDS:
            return COMMANDS[name](words)
        if name == "--version":
            print(f"ray_yolo {ray_yolo.__version__}")
            return 0
        if name not in ("-h", "--help"):
            raise InputError(f"{name}: no such command; the commands are {', '.join(COMMANDS)}")
        print("ray_yolo COMMAND ...; each has --help")
        for known, command in COMMANDS.items():
            first_line = (command.__doc__ or "").splitlines()[0]
            print(f"    {known:<8} {first_line}")
        print("\nexamples:")
        for line, effect in EXAMPLES:
            print(f"    {line}\n        {effect}")
        return 0

    return run(start)


def run(main: Callable[[], int]) -> int:
    """Run a command. Returns its exit status.

    | end of the command | status |
    |---|---|
    | an error of this package: one message on stderr | the error's own |
    | any other exception, with its traceback | 3 |
    | SIGINT, SIGTERM, SIGHUP, after the `finally` blocks | 130, 143, 129 |
    | the same before `raise_from_now_on`, which a command calls after its imports: at once | 130, 143, 129 |
    | its output no longer has a reader (`... | head`) | 141 |
    """
    os.environ.update({**SPINS, **QUIET_RAY, **os.environ})
    if isinstance(sys.stdout, io.TextIOWrapper):  # else a name that its encoding lacks would end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    end_at_once()
    deadline.end_process_at_deadline()
    status = _status(main)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or EXIT_UNREAD
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # else Python reports the rest when it exits
    deadline.end_with(status)
    return status


def _refuse_launchers() -> None:
    """Refuse to be one of several processes that a launcher has started: each would train the same by itself.

    Raises:
        InputError: in a group of torchrun or of Open MPI.
    """
    for launcher, marker, size in _LAUNCHERS:
        number = os.environ.get(size, "")
        if marker in os.environ and number.isdecimal() and int(number) > 1:
            raise InputError(f"{launcher} has started {number} processes, and each would do the same; run the command "
                             f"once, without {launcher}, with --num-workers {number}")


def _status(main: Callable[[], int]) -> int:
    """Call a command, and print its error on stderr. Returns the exit status, as in the table of `run`."""
    try:
        _refuse_launchers()
        return main()
    except RayYoloError as error:
        lines = redact(f"{type(error).__name__}: {error}").split("\n")
        _print_error("\n".join(map(printable, lines)))
        if isinstance(error, InputError) and (note := _folder_of_job()):
            _print_error(note)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as stop:
        if isinstance(stop.code, int | None) and stop.code in _EXITS:
            return _EXITS[stop.code]
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(_STDOUT):
            return EXIT_UNREAD
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            file = f"{error.filename}: " if error.filename else ""
            _print_error(redact(f"{file}{error.strerror}; free or repair the storage and rerun the same command"))
            return EXIT_FAILED
        _print_error(redact(traceback.format_exc().removesuffix("\n")))
        return EXIT_FAILED


def _folder_of_job() -> str:
    """In a job of `ray job submit` without a working directory, where relative paths are looked up; else ''."""
    job = json.loads(os.environ.get(JOB_VARIABLE) or "{}")
    if not job or job.get("runtime_env", {}).get("working_dir"):
        return ""
    return (f"this job has no working directory: it runs in {os.getcwd()} on {os.uname().nodename}, where relative "
            "paths are looked up; `ray job submit --working-dir . ...` uploads your current folder")


def _print_error(text: str) -> None:
    with suppress(BrokenPipeError):  # `2>&1 | head`: the exit status is what remains to say
        print(text, file=sys.stderr)


def _has_no_reader(file_number: int) -> bool:
    """Whether the other end of a pipe is closed. A BrokenPipeError may also come from a socket."""
    poll = select.poll()
    poll.register(file_number, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _act(parsed: Parsed[Config], act: Callable[[Config], Result], check: Callable[[Config], Config],
         document: Callable[[Config, Result], Document] | None = None) -> int:
    """Call `act`, and answer with the document of its result. With --dry-run, call `check` instead, and print every
    resolved setting."""
    from ray_yolo.core.cache_folder import check_cache_folder

    raise_from_now_on()
    check_cache_folder()
    config, origins, dry_run, _, is_json = parsed
    for line in describe_unused(given_settings(config), command_without_effect(config)):
        print(line, file=sys.stderr)
    if dry_run:
        print(describe(config, origins, check(config)))
        return 0
    with answering(is_json) as answer:
        result = act(config)
        if document and is_json:
            answer(document(config, result))
    return 0


def _require_log(folder: Path) -> None:
    """Refuse a folder that is not one of a run or sweep, before the imports of its description, which take seconds."""
    if not any((folder / name).is_file() for name in (EVENTS_FILE, LEDGER_FILE)):
        raise InputError(f"{folder}: has no {EVENTS_FILE}; give the folder of a run, such as runs/train/exp")


def _folder(run: str, *, whole: bool = True) -> Path:
    """The folder of a run or sweep. From a store, it is a copy: all of it, or only log and record."""
    if not is_address(run):
        return Path(run)
    from ray_yolo.runs.location import local_folder

    return local_folder(run, whole=whole)
