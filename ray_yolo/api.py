"""`YOLO`: the same calls from Python as from the command line.

    model = YOLO("yolov5n", nc=3)
    result = model.train(data="data.yaml", epochs=50, num_workers=2)
    model.val().metrics["mAP50"]
    model.predict("pictures/").predictions
    model.export(format="onnx").path
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from ray_yolo.config.commands import ExportConfig, PredictConfig, ValConfig
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.sources import given_by_keyword, resolve_config
from ray_yolo.config.yaml import load_yaml
from ray_yolo.engine.predict import load_trained
from ray_yolo.errors import InputError
from ray_yolo.families import build_model
from ray_yolo.models.detector import Detector, count_parameters, gflops

if TYPE_CHECKING:
    from ray_yolo.engine.export import ExportResult
    from ray_yolo.runtime.predictor import PredictResult
    from ray_yolo.runtime.trainer import TrainResult
    from ray_yolo.runtime.validator import ValResult

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True)
class ModelInfo:
    """The size of a model."""

    num_classes: int
    num_parameters: int
    gflops: float  # of one image of 640 pixels, 2 x multiply-adds of the fused model
    strides: tuple[int, ...]


class YOLO:
    """A model by name (yolov5n), by its rows (model.yaml) or with trained weights (best.pt).

    Its calls take the settings of `python -m ray_yolo.train`, `val`, `predict` and `export` by name (`imgsz=320`,
    `lr0=0.02`, `num_workers=2`, or a section such as `augment={"mosaic": 0.5}`).

    Attributes:
        model: the torch module; after `train` the averaged weights of the best epoch.

    Args:
        nc: number of classes of a model without weights.

    Raises:
        InputError: if the model is unknown or the weights cannot be used; by every call, for settings that cannot be
            used; by `val`, `predict` and `export`, if there are no weights yet.
    """

    def __init__(self, model: str = "yolov5s", *, nc: int = 80) -> None:
        self._name, self._weights = model, ""
        if model.endswith(".pt"):
            self._load(Path(model))
        else:
            rows = dict(load_yaml(model).data) if model.endswith((".yaml", ".yml")) else model
            self.model: Detector = build_model(rows, nc)

    def train(self, **settings: Any) -> TrainResult:
        """Train from this model; the number of classes is the data set's. See `runtime.trainer.fit` for its errors."""
        from ray_yolo.runtime.trainer import fit

        own = {"weights": self._weights} if self._weights else {}
        config, _ = resolve_config(RunConfig, given_by_keyword({"model": self._name, **own, **settings}))
        result = fit(config)
        self._load(result.best if result.best.exists() else result.last)
        return result

    def val(self, **settings: Any) -> ValResult:
        """Validate the weights."""
        from ray_yolo.runtime.validator import validate

        return validate(self._config(ValConfig, "val", settings))

    def predict(self, source: str, **settings: Any) -> PredictResult:
        """Detect in pictures and videos; InputError if the source names none."""
        from ray_yolo.runtime.predictor import predict

        return predict(self._config(PredictConfig, "predict", {"source": source, **settings}))

    def export(self, **settings: Any) -> ExportResult:
        """Write the weights for other programs; RayYoloError if the new file gives other numbers than torch."""
        from ray_yolo.engine.export import export

        return export(self._config(ExportConfig, "export", settings))

    def info(self) -> ModelInfo:
        """Size and cost of the model."""
        return ModelInfo(self.model.num_classes, count_parameters(self.model), gflops(self.model),
                         self.model.head.strides)

    def _config(self, config: type[Config], call: str, settings: dict[str, Any]) -> Config:
        """The configuration of a call, with this model's weights unless the settings name others."""
        if not self._weights and "weights" not in settings:
            raise InputError(f"{call}: this model has no weights yet; train it, or open it as YOLO('best.pt')")
        return resolve_config(config, given_by_keyword({"weights": self._weights, **settings}))[0]

    def _load(self, weights: Path) -> None:
        trained = load_trained(weights)
        self.model, self._weights, self._name = trained.model, str(weights), trained.recipe.model
