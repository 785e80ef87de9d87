"""The MLflow model of a run, as code: MLflow copies this file into the model's folder and runs it to load the model.

The folder also holds this package, and the weights as plain tensors. Nothing in it is unpickled, and nothing needs Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext

from ray_yolo.config.commands import DetectConfig
from ray_yolo.core.errors import InputError
from ray_yolo.data.images import UnreadableImageError, read_image
from ray_yolo.data.pixels import PixelRange
from ray_yolo.inference.predictor import Predictor, build_predictor, load_trained


class DetectorModel(PythonModel):
    """Detects in images: `model.predict({"image": [...]})`."""

    predictor: Predictor

    def load_context(self, context: PythonModelContext) -> None:
        """Load the weights beside this file."""
        trained = load_trained(Path(context.artifacts["weights"]))
        self.predictor = build_predictor(trained, DetectConfig())

    def predict(self, context: PythonModelContext, model_input: pd.DataFrame,
                params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Detect in the images of a column `image`: paths of files, or (height, width, 3) uint8 RGB.

        Returns:
            A row for each detection, by image and descending score. The columns are image (its row in the input, from
            0), x1, y1, x2, y2 in pixels, score, class, name.
        """
        pixel_range = self.predictor.pixel_range
        images = []
        for cell in model_input["image"]:
            images += _images(cell, pixel_range)
        rows = []
        for number, image in enumerate(images):
            for *box_and_score, kind in self.predictor(image).tolist():
                rows.append((number, *box_and_score, int(kind), self.predictor.names[int(kind)]))
        columns = ["image", "x1", "y1", "x2", "y2", "score", "class", "name"]
        return pd.DataFrame(rows, columns=columns).astype({"image": "int64", "class": "int64", "name": "object"})


def _images(cell: Any, pixel_range: PixelRange) -> list[np.ndarray]:
    """The images in a cell: one, or all, since MLflow passes a dict of a list as one cell."""
    if isinstance(cell, str):
        try:
            return [read_image(cell, pixel_range=pixel_range)]
        except UnreadableImageError as error:
            raise InputError(f"image: {cell} {error}") from error
    if not isinstance(cell, (list, tuple, np.ndarray)):
        raise InputError("image: give paths, or (height, width, 3) uint8 RGB pixels")
    try:
        values = np.asarray(cell)
        pixels = values.astype(np.uint8)
    except ValueError:  # paths, or images of several sizes
        values = pixels = np.empty(0, np.uint8)
    if pixels.ndim == 3 and not np.array_equal(pixels, values):  # more than 8 bits, or floats
        raise InputError(f"image: pixels of {values.dtype} from {values.min()} to {values.max()}; give uint8 RGB, 0 "
                         "to 255, or the path of the file, whose values are read as in training")
    return [pixels] if pixels.ndim == 3 else [image for part in cell for image in _images(part, pixel_range)]


set_model(DetectorModel())
