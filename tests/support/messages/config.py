"""Command lines, settings in files and calls, YAML files, and what is refused about them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import yaml

from ray_yolo import cli
from ray_yolo.cli import COMPARE, EXPORT, PREDICT, REPLAY, SERVE, TRAIN, TUNE, VAL
from ray_yolo.config import yaml as yaml_files
from ray_yolo.config.class_names import match_classes
from ray_yolo.config.flags import parse
from ray_yolo.config.keywords import read_keywords
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.config.settings import SourcedValue, read_config_file, resolve_config, sourced_by_keyword
from ray_yolo.config.yaml import MAX_BYTES, MAX_DEPTH, load_yaml
from ray_yolo.core.errors import ConfigError, DatasetError
from tests.support.messages import Refusal

COMMANDS = {"train": TRAIN, "val": VAL, "predict": PREDICT, "export": EXPORT, "serve": SERVE, "tune": TUNE,
            "compare": COMPARE, "replay": REPLAY}

MLFLOW = "not supported: runs are tracked by MLflow, see --mlflow-uri"
HELP = "see python -m ray_yolo.train --help"
FLAGS = {
    "--epoch 5": "unknown flag --epoch; did you mean --epochs?",
    "--epoch=5": "unknown flag --epoch; did you mean --epochs?",
    "--batch_size 5": "unknown flag --batch_size; did you mean --batch-size?",
    "--zzzzzz": "unknown flag --zzzzzz",
    "--lr0 0.1": "--lr0 is not a flag; write --set optimizer.lr0=VALUE",
    "--autoanchor": "--autoanchor is not a flag; write --set autoanchor=VALUE",
    "epochs=100": "unexpected 'epochs=100'; write --set epochs=100",
    "data=$HOME/d.yaml": "unexpected 'data=$HOME/d.yaml'; write --set 'data=$HOME/d.yaml'",
    "yolov5s": f"unexpected 'yolov5s'; values follow their flags, {HELP}",
    "--epochs": f"--epochs: expected one argument; {HELP}",
    "--freeze": f"--freeze: expected at least one argument; {HELP}",
    "--epochs=--": f"--epochs: a value cannot be '--'; {HELP}",
    "--img=--": f"--img: a value cannot be '--'; {HELP}",
    "--rect=1": f"--rect: ignored explicit argument '1'; {HELP}",
    "--set epochs": "--set epochs: write --set PATH=VALUE, e.g. --set optimizer.lr0=0.02",
    "--set epoch=3": "--set epoch: unknown setting 'epoch'; did you mean epochs?",
    "--set =3": "--set : unknown setting ''",
    "--set optimizer.lr0=2": "--set optimizer.lr0: got '2'; expected a number >= 1e-06 and <= 1.0",
    "--set lr0=2": "--set lr0: optimizer.lr0: got '2'; expected a number >= 1e-06 and <= 1.0",
    "--epochs ten": "--epochs: got 'ten'; expected a whole number >= 1",
    "--epochs 0": "--epochs: got '0'; expected a whole number >= 1",
    "--workers 1e6": "--workers: got '1e6'; expected a whole number >= -1 and <= 256",
    "--img 100": "--img: imgsz: got '100': must be a multiple of 32, at least 64; nearest: 96 or 128",
    "--img-size 640 320": "--img-size 640 320: training and validation use the same size; give one number",
    "--optimizer sgd": "--optimizer: optimizer.name: got 'sgd'; expected one of SGD, Adam, AdamW",
    "--optimizer auto": "--optimizer: optimizer.name: got 'auto': leave it out: without it, a short training from "
                        "weights takes AdamW, and any other SGD (docs/running.md, Fine-tuning)",
    "--cache no": "--cache: got 'no'; expected one of auto, none, ram, disk",
    "--batch 10 --microbatch 4": "--batch, --microbatch: microbatch 4 does not divide batch_size 10; "
                                 "legal: 1, 2, 5, 10",
    "--rect --quad": "--rect, --quad: quad and rect exclude each other; drop one of them",
    "--batch 4 --batch-size 8": "--batch-size: is the same setting as --batch, with another value; give one of them",
    "--img 64 --imgsz 128": "--imgsz: is the same setting as --img, with another value; give one of them",
    "--gpus-per-worker 1 --device cpu": "--device cpu: is the same setting as --gpus-per-worker, with another value; "
                                        "give one of them",
    "--set lr0=0.1 --set optimizer.lr0=0.2":
        "--set optimizer.lr0: is the same setting as --set lr0, with another value; give one of them",
    "--config a.yaml --config b.yaml":
        "--config b.yaml: --config a.yaml is given already, and one is read; leave one of them out",
    "--hyp a.yaml --hyp b.yaml": "--hyp b.yaml: --hyp a.yaml is given already, and one is read; leave one of them out",
    "--recipe fine-tune --recipe scratch-low":
        "--recipe scratch-low: --recipe fine-tune is given already, and one is read; leave one of them out",
    "--num-workers 5000": "--num-workers: got '5000': must be 0 (no Ray), a number up to 4096, a range such as 2-8, "
                          "or auto",
    "--name ../x": "--name: got '../x': a name is up to 63 letters, digits, '.', '_' or '-', starting with a "
                   "letter or digit; folders go into --project",
    "--config nowhere.yaml": "nowhere.yaml: cannot be read: No such file or directory",
    "--device 1": "--device 1: Ray assigns the devices; set their number with --num-workers and --gpus-per-worker",
    "--device 0,1": "--device 0,1: Ray assigns the devices; use --num-workers 2",
    "--bucket b": "--bucket: use --storage-path s3://BUCKET (or gs://, az://)",
    "--evolve": "--evolve: use python -m ray_yolo.tune; each of its trials is itself a training on many workers",
    "--evolve 300": "--evolve: use python -m ray_yolo.tune; each of its trials is itself a training on many workers",
    "--resume_evolve x": "--resume_evolve: run the same python -m ray_yolo.tune command again; it continues",
    "--evolve_population x": "--evolve_population: use --warm-start PATH of python -m ray_yolo.tune: an evolve.csv, "
                             "hyp file, or folder",
    "--local_rank=0": "--local_rank: not needed: Ray starts the workers; run this command once with --num-workers N",
    "--entity me": f"--entity: {MLFLOW}",
    "--upload_dataset": f"--upload_dataset: {MLFLOW}",
    "--bbox_interval -1": f"--bbox_interval: {MLFLOW}",
    "--artifact_alias latest": f"--artifact_alias: {MLFLOW}",
    "--set optimiser.lr0=1": "--set optimiser.lr0: unknown setting 'optimiser.lr0'; did you mean optimizer.lr0?",
    "--set confidence=1": "--set confidence: unknown setting 'confidence'; did you mean evaluate.confidence?",
    "--set loss.lr0=1": "--set loss.lr0: unknown setting 'loss.lr0'; did you mean optimizer.lr0?",
    "--set epochs.x=1": "--set epochs.x: unknown setting 'epochs.x'; did you mean epochs?",
    "--set zzzzzz=1": "--set zzzzzz: unknown setting 'zzzzzz'",
    "--set evaluate=1":
        "--set evaluate: 'evaluate' is a section; give one of its fields: evaluate.confidence, evaluate.iou, "
        "evaluate.max_detections, evaluate.batch_size",
    "--set objective.map50=0 --set objective.map50_95=0": "the weights of the objective must not all be 0",
    "--set name=a/b --registered-name a/b":
        "--set name: got 'a/b': a name is up to 63 letters, digits, '.', '_' or '-', starting with a letter or "
        "digit; folders go into --project\n--registered-name: got 'a/b': a name is up to 63 letters, digits, '.', "
        "'_' or '-', starting with a letter or digit; folders go into --project",
    "--seed -1": "--seed: got '-1'; expected a whole number >= 0 and < 4294967296",
    "--recipe scratch-hihg":
        "--recipe scratch-hihg: is unknown; did you mean scratch-high? Known: scratch-low, scratch-med, "
        "scratch-high, fine-tune, Objects365",
    "--hyp h.yaml": "h.yaml: cannot be read: No such file or directory",
    "--epochs 8 --changes=soon":
        "--changes: got 'soon': write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'",
    "--epochs 8 --changes=3":
        "--changes: got '3'; expected Settings of optimizer, schedule, loss and augment that change during training, "
        "each 'EPOCHS: NAME=VALUE ...': the values hold after that many epochs. The best weights and patience "
        "restart there",
    "--epochs 8 '--changes=-1: lr0=0.1'":
        "--changes: got '-1: lr0=0.1': write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'",
    "--epochs 8 '--changes=3: lr0'":
        "--changes: got '3: lr0': write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'",
    "--epochs 8 '--changes=0: lr0=0.1'":
        "--changes: got '0: lr0=0.1'; expected Settings of optimizer, schedule, loss and augment that change during "
        "training, each 'EPOCHS: NAME=VALUE ...': the values hold after that many epochs. The best weights and "
        "patience restart there",
    "--epochs 8 '--changes=3: lr0=5'": "--changes: got '3: lr0=5': lr0=5: Input should be less than or equal to 1",
    "--epochs 8 '--changes=3: lr0=high'":
        "--changes: got '3: lr0=high': lr0=high: Input should be a valid number, unable to parse string as a number",
    "--epochs 8 '--changes=3: lr0=0.1 optimizer.lr0=0.2'":
        "--changes: got '3: lr0=0.1 optimizer.lr0=0.2': optimizer.lr0 is given twice; give it once",
    "--epochs 8 '--changes=3: lr0=0.1' '--changes=3: mosaic=0 lr0=0.2'":
        "--changes: changes after epoch 3 give optimizer.lr0 two values; give it once",
    "--epochs 8 '--changes=3: epochs=5'": "--changes: got '3: epochs=5': epochs cannot change during training",
    "--epochs 8 '--changes=3: optimizer.name=Adam'":
        "--changes: got '3: optimizer.name=Adam': optimizer.name cannot change during training",
    "--epochs 8 '--changes=3: imgsz=320'": "--changes: got '3: imgsz=320': imgsz cannot change during training",
    "--epochs 8 '--changes=3: close_mosaics=5'":
        "--changes: got '3: close_mosaics=5': close_mosaics cannot change during training; did you mean "
        "augment.close_mosaic?",
    "--epochs 8 '--changes=9: lr0=0.1'":
        "--epochs, --changes: changes after epoch 9 of 8 epochs have no effect; drop them, or raise epochs",
    "--epochs 8 '--changes=99999999999999999999: lr0=0.1'":
        "--changes: got '999999999999...9999: lr0=0.1': write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'",
}
"""Command lines of `train`."""

SETTINGS = {
    "lr0: abc": "1: optimizer.lr0: got 'abc'; expected a number >= 1e-06 and <= 1.0",
    "lr0: .nan": "1: optimizer.lr0: got '.nan'; expected a number >= 1e-06 and <= 1.0",
    "lr0: nan": "1: optimizer.lr0: got 'nan'; expected a number >= 1e-06 and <= 1.0",
    "lr0: 1e999": "1: optimizer.lr0: got '1e999'; expected a number >= 1e-06 and <= 1.0",
    "lr0: [0.1, 0.2]": "1: optimizer.lr0: got ['0.1', '0.2']; expected a number >= 1e-06 and <= 1.0",
    "lr0:": "1: optimizer.lr0: got nothing; expected a number >= 1e-06 and <= 1.0",
    "\nepochs: 0": "2: epochs: got '0'; expected a whole number >= 1",
    "epochs: 1.5": "1: epochs: got '1.5'; expected a whole number >= 1",
    "epochs: yes": "1: epochs: got 'yes'; expected a whole number >= 1",
    f"epochs: {'9' * 5000}": "1: epochs: got '999999999999...9999999999999'; expected a whole number >= 1",
    "imgsz: 100": "1: imgsz: got '100': must be a multiple of 32, at least 64; nearest: 96 or 128",
    "rect: maybe": "1: rect: got 'maybe'; expected true or false",
    "cache: no": "1: cache: got 'no'; expected one of auto, none, ram, disk",
    "gpus_per_worker: some": "1: gpus_per_worker: got 'some'; expected a number >= 0 or auto",
    "gpus_per_worker: -1": "1: gpus_per_worker: got '-1'; expected a number >= 0 or auto",
    "num_workers: 8-2": "1: num_workers: got '8-2': must be 0 (no Ray), a number up to 4096, a range such as 2-8, "
                        "or auto",
    "num_workers: many": "1: num_workers: got 'many'; expected Ray workers: a number, a range 'low-high' (elastic), "
                         "0 to train in this process without Ray, or auto: one per GPU of the requested cluster, or "
                         "per node without GPUs; without a cluster one per local GPU, 0 for at most one",
    "name:": "1: name: got nothing; expected text",
    "name: a/b": "1: name: got 'a/b': a name is up to 63 letters, digits, '.', '_' or '-', starting with a letter "
                 "or digit; folders go into --project",
    "batch_size: 10\nexact: no\nmicrobatch: 4":
        "1, f.yaml:3: microbatch 4 does not divide batch_size 10; legal: 1, 2, 5, 10",
    "{batch_size: 10, microbatch: 4}": "1: microbatch 4 does not divide batch_size 10; legal: 1, 2, 5, 10",
    "batch_size: -2": "1: batch_size: got '-2'; expected a whole number >= -1 and <= 131072",
    "batch_size: 0": "1: batch_size: got '0': must be 1 or more, or -1 for as many as fit into the workers' memory",
    "brilliance: 0.05": "1: unknown setting 'brilliance'",
    "optimizer:\n  lr: 0.1": "2: unknown setting 'optimizer.lr'; did you mean optimizer.lr0?",
    "optimizer: SGD": "1: 'optimizer' is a section; give one of its fields: optimizer.name, optimizer.lr0, "
                      "optimizer.momentum, optimizer.weight_decay, optimizer.nominal_batch, optimizer.backbone_lr, "
                      "optimizer.clip_norm",
    "lr0: 1\noptimizer: {lr0: 2}": "2: optimizer.lr0 is given twice, first at f.yaml:1",
}
"""A file of settings, f.yaml."""

CODE = "a: !!python/object/apply:os.system ['touch hacked']"
YAML: dict[str, tuple[str | bytes, str]] = {
    "code": (CODE, "1: tag 'tag:yaml.org...ply:os.system': tags "
             "are not supported; remove it (quote text values)"),
    "standard tag": ("a: 1\nb: !!binary aGk=", "2: tag 'tag:yaml.org,2002:binary': tags are not supported; remove it "
                     "(quote text values)"),
    "own tag": ("!thing\na: 1", "1: tag '!thing': tags are not supported; remove it (quote text values)"),
    "tagged key": ("!!str a: 1", "1: tag 'tag:yaml.org,2002:str': tags are not supported; remove it "
                   "(quote text values)"),
    "bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "2: alias *a: write the value out instead"),
    "merge": ("a: &a {x: 1}\nb:\n  <<: *a", "3: alias *a: write the value out instead"),
    "alias as key": ("a: &a x\n*a : 1", "2: alias *a: write the value out instead"),
    "alias of itself": ("a: &a [*a]", "1: alias *a: write the value out instead"),
    "deep list": ("a: " + "[" * 100_000, f"1: nested deeper than {MAX_DEPTH} levels"),
    "deep mapping": ("{a: " * 100_000, f"1: nested deeper than {MAX_DEPTH} levels"),
    "duplicate": ("lr0: 1\nlrf: 2\nlr0: 3", "3: key 'lr0' is given twice, first in line 1"),
    "duplicate below": ("a:\n  b: 1\n  b: 2", "3: key 'b' is given twice, first in line 2"),
    "duplicate number": ("a: {1: x, 01: y}", "1: key 1 is given twice, first in line 1"),
    "list key": ("? [a]\n: 1", "1: a key must be text or a whole number; quote it if it is text"),
    "boolean key": ("true: 1", "1: a key must be text or a whole number; quote it if it is text"),
    "null key": ("a: 1\n~: 1", "2: a key must be text or a whole number; quote it if it is text"),
    "float key": ("1.5: 1", "1: a key must be text or a whole number; quote it if it is text"),
    "list": ("- a\n- b", "1: the file must consist of `key: value` lines"),
    "word": ("\nhello", "2: the file must consist of `key: value` lines"),
    "two documents": ("a: 1\n---\nb: 2", "2: a second document starts here; a file has one"),
    "latin-1": (b"a: 1\nname: caf\xe9", "2: not UTF-8; save the file as UTF-8, or give a YAML file"),
    "utf-16": ("epochs: 3".encode("utf-16"), "1: not UTF-8; save the file as UTF-8, or give a YAML file"),
    "nul": (b"a: 1\nb: \x00", "2: not YAML: control character '\\x00'; is this a text file?"),
    "escape": (b"a: \x1b[31m", "1: not YAML: control character '\\x1b'; is this a text file?"),
}
"""A YAML file, f.yaml, by a name."""

HINTS = [
    ("train", "--gpus", "--num-workers"), ("train", "--amp", "--precision"), ("train", "--pretrained", "--weights"),
    ("train", "--lr", "--set optimizer.lr0=VALUE"), ("train", "--learning_rate", "--set optimizer.lr0=VALUE"),
    ("train", "--num-gpus", "--num-workers"), ("train", "--output-dir", "--project"),
    ("train", "--deterministic", "--exact"), ("train", "--wd", "--set optimizer.weight_decay=VALUE"),
    ("train", "--bathc-size", "--batch-size"), ("train", "--img_sz", "--imgsz"),
    ("val", "--model", "--weights"), ("predict", "--model", "--weights"), ("export", "--model", "--weights"),
    ("serve", "--model", "--weights"), ("predict", "--input", "--source"), ("predict", "--threshold", "--confidence"),
    ("serve", "--prot", "--port"), ("tune", "--n-trials", "--trials"), ("val", "--half-precision", ""),
    ("train", "--port", ""), ("train", "--foo", ""), ("train", "--x", ""), ("export", "--gpus", ""),
    ("train", "--tta", ""), ("val", "--amp", "--precision"),
]
"""Unknown flags, and what is meant, in another program's word or by a typing error; '' where nothing is near."""

LINES = {
    "val": "weights is required: Weights to validate, such as runs/train/exp/weights/best.pt.",
    "export --weights w.pt --device 0": "--device 0: this command runs on the CPU; omit it",
    "replay --step 3": "the following arguments are required: RUN; see python -m ray_yolo.replay --help",
    "replay runs/exp other --step 3":
        "unexpected 'other'; values follow their flags, see python -m ray_yolo.replay --help",
    "tune --max-concurrent=0": "--max-concurrent: got '0'; expected a whole number >= 1 or auto",
    "tune --max-concurrent=-1": "--max-concurrent: got '-1'; expected a whole number >= 1 or auto",
    "tune --max-concurrent=none": "--max-concurrent: got 'none'; expected a whole number >= 1 or auto",
    "tune --min-slots 3 --max-concurrent 2":
        "--min-slots, --max-concurrent: min_slots 3 is more than max_concurrent 2; lower it, or leave max_concurrent "
        "out",
    "tune --keep-weights --drop-paused-weights":
        "--keep-weights, --drop-paused-weights: keep_weights keeps those that drop_paused_weights removes; leave one "
        "of them out",
    "compare base": "the following arguments are required: B; see python -m ray_yolo.compare --help",
}
"""Command lines of other commands, as they are parsed."""

SAME = "{0}=: is the same setting as {0}=, with another value; give one of them"
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"batch": 8, "batch_size": 16},
     "batch_size=: is the same setting as batch=, with another value; give one of them"),
    ({"lr0": 0.1, "optimizer": {"lr0": 0.2}}, SAME.format("optimizer.lr0")),
    ({"optimizer": {"lr0": 0.2}, "lr0": 0.1}, SAME.format("optimizer.lr0")),
    ({"quad": True, "augment": {"hsv_h": 0.1}, "hsv_h": 0.2}, SAME.format("augment.hsv_h")),
    ({"epoch": 3}, "epoch=: unknown setting 'epoch'; did you mean epochs?"),
    ({"epochs": 0, "lr0": "x"}, "epochs=: got 0; expected a whole number >= 1\n"
                                "optimizer.lr0=: got 'x'; expected a number >= 1e-06 and <= 1.0"),
]
"""Keywords of `YOLO.train`."""

NOT_OF_THE_RECIPE = (
    "{} is not a setting of the recipe, which is all that --hyp takes; give it as {}, or in a --config file")
RECIPE_FILES = {
    "callbacks: evil.py": "callbacks runs code, which a file must not do; give it as --callbacks",
    "address: 10.0.0.1:6379": NOT_OF_THE_RECIPE.format("address", "--address"),
    "mlflow_uri: http://elsewhere": NOT_OF_THE_RECIPE.format("mlflow_uri", "--mlflow-uri"),
    "storage_path: /elsewhere": NOT_OF_THE_RECIPE.format("storage_path", "--storage-path"),
    "placement: {storage_path: /elsewhere}": NOT_OF_THE_RECIPE.format("storage_path", "--storage-path"),
}
"""The second line of a hyp file, h.yaml."""

UNREAD_LOSS = {
    "--model yolov8n --label-smoothing 0.2":
        "--label-smoothing: loss.label_smoothing has no effect: the loss of yolov8n does not read it, only loss.box, "
        "loss.cls, loss.dfl; leave it out",
    "--model yolo11n --set obj=0.7":
        "--set obj: loss.obj has no effect: the loss of yolo11n does not read it, only loss.box, loss.cls, loss.dfl; "
        "leave it out",
    "--model yolov5n --set loss.dfl=2":
        "--set loss.dfl: loss.dfl has no effect: the loss of yolov5n does not read it, only loss.anchor_t, loss.box, "
        "loss.cls, loss.cls_pw, loss.fl_gamma, loss.label_smoothing, loss.obj, loss.obj_pw; leave it out",
    "--model yolov8n --changes 3:anchor_t=3":
        "--changes: loss.anchor_t has no effect: the loss of yolov8n does not read it, only loss.box, loss.cls, "
        "loss.dfl; leave it out",
}
"""Settings of the loss, given alone, that no loss reads: of `train` and `tune`."""

COMPARED = {
    "base loss.obj=2 --model yolov8n":
        "B: loss.obj has no effect: the loss of yolov8n does not read it, only loss.box, loss.cls, loss.dfl; leave "
        "it out",
    "model=yolov8n model=yolov8s --label-smoothing 0.1":
        "--label-smoothing: loss.label_smoothing has no effect: the loss of yolov8n and yolov8s does not read it, "
        "only loss.box, loss.cls, loss.dfl; leave it out",
}
"""The same of `compare`, where neither side reads them."""


SYNTAX = {
    "a: [1, 2\nb: 3": "2: not YAML: …", "a: 'x": "1: not YAML: …", "a: b: c": "1: not YAML: …",
    "a: 1\n b: 2": "2: not YAML: …", "%YAML 3.0\n---\na: 1": "1: not YAML: …", "a: @x": "1: not YAML: …",
    'a: "\\UFFFFFFFF"': "… not YAML: …", 'a: "\\U00110000"': "… not YAML: …",
    "loss:\n\tbox: 1\n": "2: not YAML: …; indent with spaces, not tabs",
}
"""YAML files whose error a parser words."""

UNREADABLE = {"absent.yaml": "No such file or directory", "": "Is a directory", "a\0b": "embedded null byte"}


def _write(content: str | bytes, name: str = "f.yaml") -> None:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def _resolve_file(content: str, flags: Mapping[str, str] = MappingProxyType({})) -> None:
    _write(content)
    resolve_config(RunConfig, read_config_file("f.yaml") | {
        name: SourcedValue(value, f"--{name}") for name, value in flags.items()})


def _resolve_keywords(settings: dict[str, Any]) -> None:
    resolve_config(RunConfig, sourced_by_keyword(read_keywords(TRAIN, settings)))


def _load(content: str | bytes, parser: type) -> None:
    _write(content)
    with mock.patch.object(yaml_files, "_PARSER", parser):
        load_yaml("f.yaml")


def _load_too_many() -> None:
    with mock.patch.object(yaml_files, "MAX_VALUES", 5):
        _load("a: [1, 2, 3, 4,\n5]", yaml.SafeLoader)


def _train_with(flag: str, content: str) -> None:
    _write(content, "h.yaml")
    parse(TRAIN, [flag, "h.yaml"])


def _lines() -> Iterator[Refusal]:
    for line, message in FLAGS.items():
        yield Refusal(f"train {line}", message, partial(parse, TRAIN, shlex.split(line)))
    for command, flag, meant in HINTS:
        yield Refusal(f"{command} {flag}", f"unknown flag {flag}" + (f"; did you mean {meant}?" if meant else ""),
                      partial(parse, COMMANDS[command], [flag, "1"]))
    for line, message in LINES.items():
        name, *words = line.split()
        yield Refusal(line, message, partial(parse, COMMANDS[name], words))
    for line, message in UNREAD_LOSS.items():
        for command in (cli.train, cli.tune):
            yield Refusal(f"{command.__name__} {line}", message, partial(command, line.split()), ConfigError)
    for line, message in COMPARED.items():
        yield Refusal(f"compare {line}", message, partial(cli.compare, line.split()), ConfigError)


def _settings() -> Iterator[Refusal]:
    for content, message in SETTINGS.items():
        yield Refusal(f"settings: {content[:40]!r}", f"f.yaml:{message}", partial(_resolve_file, content), ConfigError)
    yield Refusal("all problems at once", """\
f.yaml:1: unknown setting 'epoch'; did you mean epochs?
f.yaml:2: imgsz: got '100': must be a multiple of 32, at least 64; nearest: 96 or 128
--seed: got 'x'; expected a whole number >= 0 and < 4294967296
f.yaml:3: optimizer.lr0: got '7'; expected a number >= 1e-06 and <= 1.0""",
                  partial(_resolve_file, "epoch: 3\nimgsz: 100\nlr0: 7\n", {"seed": "x"}), ConfigError)
    for content, message in RECIPE_FILES.items():
        yield Refusal(f"hyp file: {content}", f"h.yaml:2: {message}",
                      partial(_train_with, "--hyp", f"lr0: 0.02\n{content}\n"))
    yield Refusal("code in a file of settings",
                  "h.yaml:2: callbacks runs code, which a file must not do; give it as --callbacks",
                  partial(_train_with, "--config", "epochs: 3\ncallbacks: evil.py\n"))
    for settings, message in KEYWORDS:
        yield Refusal(f"keywords {settings}", message, partial(_resolve_keywords, settings))
    yield Refusal("--json of a dry run", "--json: a dry run has no result; leave out one of them",
                  lambda: cli.parse_val(["--weights", "best.pt", "--json", "--dry-run"]))
    yield Refusal("more workers than microbatches", (
        "num_workers: 17 workers, but a step of batch size 64 and microbatch 4 has only 16 parts; use 1 to 16 workers, "
        "a smaller --microbatch, a larger --batch-size, or --sync-bn"),
        lambda: resolve(Recipe(batch_size=64), 17, gpu=False), ConfigError)
    yield Refusal("numbers of classes that differ", """\
d.yaml: has 3 classes, but w.pt has 2:
         d.yaml    w.pt
      0  circle    circle
      1  square    square
      2  triangle  -
the weights do not name triangle; correct `names` of the data set, or give other weights""", lambda: match_classes(
        ("circle", "square", "triangle"), ("circle", "square"), data_file="d.yaml", weights_file="w.pt",
        allow_names=True), DatasetError)


def _yaml_files() -> Iterator[Refusal]:
    for kind, parser in {"libyaml": yaml_files._PARSER, "Python": yaml.SafeLoader}.items():
        for name, (content, message) in YAML.items():
            yield Refusal(f"YAML by {kind}: {name}", f"f.yaml:{message}", partial(_load, content, parser))
        for text, message in SYNTAX.items():
            yield Refusal(f"YAML by {kind}: {text!r}", f"f.yaml:{message}", partial(_load, text, parser))
    yield Refusal("YAML that is too large", "f.yaml: larger than 4 MiB, the limit for YAML files",
                  partial(_load, b"a: 1\n#".ljust(MAX_BYTES + 1, b"x"), yaml.SafeLoader))
    yield Refusal("YAML with too many values", "f.yaml:2: more than 5 values", _load_too_many)
    for name, message in UNREADABLE.items():
        path = str(Path(name))
        yield Refusal(f"YAML at {name!r}", f"{path}: cannot be read: {message}", partial(load_yaml, path))


REFUSALS = [*_lines(), *_settings(), *_yaml_files()]
