"""`YOLO`: the commands as Python calls.

    model = YOLO("yolov5n", nc=3)
    result = model.train(data="data.yaml", epochs=50, num_workers=2)
    model.val().metrics["mAP50"]
    for result in model("pictures/", stream=True):
        print(result.path, result.boxes.xyxy)
    model.export(format="onnx").path

`help(YOLO.train)` lists the settings of a call with their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from pydantic import BaseModel

from ray_yolo.checkpoints.weights_file import is_weights, local_file, weights_file
from ray_yolo.cli import COMPARE, EXPORT, PREDICT, TRAIN, TUNE, VAL
from ray_yolo.config.commands import PredictConfig
from ray_yolo.config.effects import refuse_unread_loss
from ray_yolo.config.flags import Command
from ray_yolo.config.keywords import read_keywords, with_keywords
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.settings import resolve_config, sourced_by_keyword
from ray_yolo.core.errors import InputError, ResourcesError
from ray_yolo.core.formatting import format_count
from ray_yolo.data.sources import InputSource, read_source
from ray_yolo.engine.devices import local_device
from ray_yolo.inference.exported import Exported
from ray_yolo.inference.output import Output, detect_frames, prediction_of, write_tables
from ray_yolo.inference.predictor import (
    Opened,
    Predictor,
    Trained,
    build_predictor,
    check_classes,
    input_size,
    open_weights,
    warn_of_classes,
    warn_of_iou,
)
from ray_yolo.inference.results import Results
from ray_yolo.models.detector import Detector, count_parameters, gflops
from ray_yolo.models.families import build_model, read_model
from ray_yolo.tune.search import TuneConfig

if TYPE_CHECKING:
    from ray_yolo.inference.export import ExportResult
    from ray_yolo.runtime.trainer import TrainResult
    from ray_yolo.runtime.validator import ValResult
    from ray_yolo.tune.comparer import ComparisonResult
    from ray_yolo.tune.tuner import SearchResult

Config = TypeVar("Config", bound=BaseModel)

NOT_IN_PREDICT = ("weights", "source", "nosave", "num_workers", "gpus_per_worker", "address")
"""Settings of the command that the call has in another way, or not: it runs this model in this process."""


@dataclass(frozen=True)
class ModelInfo:
    """The size of a model."""

    num_classes: int
    num_parameters: int
    gflops: float  #: for one image of 640 pixels, 2 x multiply-adds of the fused model
    strides: tuple[int, ...]


class YOLO:
    """A model by name (yolov5n), by its rows (model.yaml) or with trained weights (best.pt, yolov5s.pt, .safetensors).
    The folder or address of a run means its best weights. An exported .onnx or OpenVINO file can only predict.

    The methods take the settings of `python -m ray_yolo.train`, `val`, `predict`, `export` and `tune` as keywords:
    `imgsz=320`, `lr0=0.02`, `num_workers=2`, or a section such as `augment={"mosaic": 0.5}`. The last name of a setting
    in a section is enough if it is unique (`cos_lr=True`). Ultralytics' `conf`, `max_det` and `batch` are accepted too.
    Their docstrings and signatures list all settings.

    Attributes:
        model: the torch module; after `train` with the averaged weights of the best epoch.
        names: class names by number.

    Args:
        nc: number of classes of a model without weights.

    Raises:
        InputError: for an unknown model or unusable weights; from every method, for invalid settings; from `val`,
            `predict` and `export`, if the model has no weights yet.
    """

    def __init__(self, model: str | Path = "yolov5s", *, nc: int = 80) -> None:
        if nc < 1:
            raise InputError(f"nc: {nc}: a model has at least one class")
        self._name, self._weights = str(model), ""
        self._trained: Opened | None = None
        self._predictors: dict[torch.device, Predictor] = {}
        if is_weights(self._name):
            self._load(weights_file(self._name))
        else:
            self._name, rows = read_model(self._name)
            self.model: Detector = build_model(rows or self._name, nc)
            self.names = {number: f"class{number}" for number in range(nc)}

    def __repr__(self) -> str:
        if isinstance(self._trained, Exported):
            return f"YOLO({self._weights}: {format_count(len(self.names), 'class')}, exported)"
        weights = f"weights {self._weights}" if self._weights else "no weights yet"
        parameters = count_parameters(self.model)
        return f"YOLO({self._name}: {format_count(len(self.names), 'class')}, {parameters:,} parameters, {weights})"

    @with_keywords(TRAIN)
    def train(self, *, callbacks: str | Mapping[str, Callable[..., object]] = "", **settings: Any) -> TrainResult:
        """Train this model; the data set defines the number of classes. See `runtime.trainer.fit` for the errors.

        Args:
            callbacks: functions by name, which this process calls: {"on_epoch_end": f} (see `sinks.callbacks`); or the
                Python path of an object with such functions.
        """
        from ray_yolo.runtime.trainer import fit

        functions: Mapping[str, object] = {}
        if isinstance(callbacks, Mapping):
            functions = callbacks
        elif callbacks:
            settings["callbacks"] = callbacks
        if settings.get("resume") is True and self._run_folder():
            settings["resume"] = self._run_folder()
        config, origins = self._resolved(TRAIN, settings)
        result = fit(config, functions=functions, origins=origins)
        self._load(str(result.best if result.best.exists() else result.last))
        return result

    @with_keywords(VAL, omit=("weights",))
    def val(self, **settings: Any) -> ValResult:
        """Validate the weights."""
        from ray_yolo.runtime.validator import validate

        return validate(self._config(VAL, settings, "val"))

    @overload
    def predict(self, source: object, *, stream: Literal[False] = False, device: str | int | None = None,
                **settings: Any) -> list[Results]: ...
    @overload
    def predict(self, source: object, *, stream: Literal[True], device: str | int | None = None,
                **settings: Any) -> Iterator[Results]: ...
    @overload
    def predict(self, source: object, *, stream: bool, device: str | int | None = None,
                **settings: Any) -> list[Results] | Iterator[Results]: ...

    @with_keywords(PREDICT, omit=NOT_IN_PREDICT)
    def predict(self, source: object, *, stream: bool = False, device: str | int | None = None, save: bool = False,
                **settings: Any) -> list[Results] | Iterator[Results]:
        """Detect objects in a path, pixels, a PIL image, a tensor, bytes, a list of these, a camera or a stream.

        See `data.sources.read_source`. Files are written only with `save`, `save_txt`, `save_crop`, `save_csv` or
        `save_json`.

        Args:
            save: write pictures and videos with boxes.
            stream: return an iterator, for long or endless sources, instead of a list. Until its end, torch computes on
                a single thread if there are several pictures.
            device: "cpu", "cuda:1", or a GPU's number; None: a GPU if there is one.

        Returns:
            Results for each picture and each frame of a video, in the order of the source. An unreadable file among
            several has an `error` and no boxes.

        Raises:
            InputError: if the source is of no such kind, or its only picture cannot be read.
            ResourcesError: if there is no such device.
        """
        if settings.get("num_workers"):
            raise InputError("num_workers: this call uses its own process; python -m ray_yolo.predict has workers")
        if settings.get("weights", self._weights) != self._weights:
            raise InputError(f"weights: this model has its own; use YOLO({settings['weights']!r}).predict(...)")
        if "nosave" in settings:
            raise InputError("nosave: use save=True or save=False; the default writes no pictures")
        config = self._config(PREDICT, {"source": "", **settings, "nosave": not save}, "predict")
        check_classes(config.classes, tuple(self.names.values()))
        predictor = self._predictor(config, device)
        inputs = read_source(source)
        output = None
        writes_files = save or config.save_txt or config.save_crop or config.save_csv or config.save_json
        if writes_files:
            from ray_yolo.runs.folders import output_folder

            output = Output(output_folder(config.placement, [media.path for media, _ in inputs.parts]), config)
        results = _detect(predictor, inputs, config, output)
        return results if stream else list(results)

    __call__ = predict

    @with_keywords(EXPORT, omit=("weights",))
    def export(self, **settings: Any) -> ExportResult:
        """Write the weights for other programs. Raises RayYoloError if the file's outputs differ from torch's."""
        from ray_yolo.inference.export import export

        return export(self._config(EXPORT, settings, "export"))

    @with_keywords(TUNE)
    def tune(self, **settings: Any) -> SearchResult:
        """Search for a better recipe by trainings of this model on Ray; by default `space="ladder"` and 300 trials."""
        from ray_yolo.tune.tuner import search

        if isinstance(settings.get("callbacks"), Mapping):
            raise InputError("callbacks: the trials of a search run in other processes; give an object's Python path")
        return search(self._config(TUNE, settings))

    @with_keywords(COMPARE)
    def compare(self, a: str, b: str, **settings: Any) -> ComparisonResult:
        """Say which of two sides is better, from pairs of trainings on fresh seeds: `model.compare("base", "lr0=0.1")`.

        A side is what the command takes: `base`, PATH=VALUE, a file of settings, a named recipe, a run, a data set, or
        weights.
        """
        from ray_yolo.tune.comparer import compare
        from ray_yolo.tune.sides import read_sides

        if isinstance(settings.get("callbacks"), Mapping):
            raise InputError("callbacks: trainings may run in other processes; give an object's Python path")
        config, origins = self._resolved(COMPARE, {**settings, "a": a, "b": b})
        return compare(config, read_sides(config, origins))

    def info(self) -> ModelInfo:
        """Size and cost of the model."""
        self._refuse_exported("info")
        return ModelInfo(self.model.num_classes, count_parameters(self.model), gflops(self.model),
                         self.model.head.strides)

    def _config(self, command: Command[Config], settings: dict[str, Any], needs_weights: str = "") -> Config:
        """The configuration of a call, with this model and its weights unless the settings name others."""
        return self._resolved(command, settings, needs_weights)[0]

    def _resolved(self, command: Command[Config], settings: dict[str, Any], needs_weights: str = ""
                  ) -> tuple[Config, dict[str, str]]:
        """The configuration of a call, as of `_config`, and the origin of each setting by its path."""
        if needs_weights and not self._weights and "weights" not in settings:
            raise InputError(f"{needs_weights}: this model has no weights yet; train it, or open it as YOLO('best.pt')")
        if command is not PREDICT:
            self._refuse_exported(command.prog.rpartition(".")[2])
        own = {} if needs_weights else {"model": self._name}
        if self._weights:
            own["weights"] = self._weights
        if settings.get("resume"):  # the run's record has its own
            own = {}
        given = sourced_by_keyword(own | read_keywords(command, settings))
        config, origins = resolve_config(command.model, given)
        if isinstance(config, (RunConfig, TuneConfig)) and not config.placement.resume:
            refuse_unread_loss(given, config.recipe)
        return config, origins

    def _refuse_exported(self, call: str) -> None:
        if isinstance(self._trained, Exported):
            raise InputError(f"{call}: {self._weights} is an exported file, which can only predict; open the .pt file "
                             "that it was made from")

    def _run_folder(self) -> str:
        """The folder of the run that has written this model's weights; '' if they are no run's."""
        folder, _, _ = self._weights.rpartition("/")
        run, _, last = folder.rpartition("/")
        return run if last == "weights" else ""

    def _load(self, weights: str) -> None:
        self._trained = open_weights(local_file(weights))
        self._weights = weights
        if isinstance(self._trained, Trained):  # an exported file has no model: `_refuse_exported` guards its uses
            self.model, self._name = self._trained.model, self._trained.recipe.model
        self.names, self._predictors = dict(enumerate(self._trained.names)), {}

    def _predictor(self, config: PredictConfig, device: str | int | None) -> Predictor:
        """The predictor for these settings. The model is fused and moved to each device once."""
        assert self._trained, "_config has checked that there are weights"
        warn_of_iou(self._trained, config)
        warn_of_classes(self._trained, config.classes)
        target = local_device(config.placement.gpus_per_worker) if device is None else _device(device)
        if target not in self._predictors:
            self._predictors[target] = build_predictor(self._trained, config, target)
        return replace(self._predictors[target], imgsz=input_size(self._trained, config.imgsz), settings=config)


def _device(name: str | int) -> torch.device:
    """The device of a name or of a GPU's number.

    Raises:
        InputError: for another name.
        ResourcesError: if this machine has no such device.
    """
    try:
        device = torch.device(f"cuda:{name}" if str(name).isdigit() else name)
    except (RuntimeError, TypeError):
        raise InputError(f"device: {name!r} is no device; give 'cpu', 'cuda', or the number of one GPU") from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError):  # torch's, by the kind of device that is missing
        gpus = format_count(torch.cuda.device_count(), "GPU")
        raise ResourcesError(f"device: {name} was requested, but this machine has {gpus} that torch can use; use "
                             "device='cpu', or leave it out") from None
    return device


def _detect(predictor: Predictor, inputs: InputSource, config: PredictConfig, output: Output | None
            ) -> Iterator[Results]:
    """The results one by one; the tables are written at the end."""
    threads = 0 if inputs.alone else len(os.sched_getaffinity(0))
    predictions = []
    frames = inputs.frames(config.vid_stride)
    try:
        for media, results in detect_frames(predictor, frames, output, threads=threads, batch_size=config.batch_size):
            if results.error and inputs.alone:
                raise InputError(f"source: {media.name} {results.error}")
            if output:
                predictions.append(prediction_of(media, results))
            yield results
    finally:
        if output:
            from ray_yolo.runs.location import publish

            write_tables(output, predictions, predictor.names)
            publish(output.folder)
