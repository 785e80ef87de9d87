"""Load trained weights, and detect objects in images, in pixels of the image.

Images are letterboxed as in validation, and each is processed alone unless a batch is requested. The detections of an
image therefore depend only on the image and the settings (in batches, up to rounding).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ray_yolo.checkpoints.foreign import Weights, class_names, read_weights
from ray_yolo.config.commands import DetectConfig, NmsConfig
from ray_yolo.config.model_facts import off_grid, plugin_of
from ray_yolo.config.recipe import Recipe, recipe_of_later_version
from ray_yolo.config.sections import EvaluateConfig
from ray_yolo.core.errors import CheckpointError, ConfigError, InputError
from ray_yolo.core.versioned import is_of_later_version
from ray_yolo.data.augment import letterbox
from ray_yolo.data.dataset import padded_shapes
from ray_yolo.data.image_cache import loaded_sizes, resized
from ray_yolo.data.pixels import PixelRange, read_pixel_range
from ray_yolo.engine.evaluate import STAGES, autocast
from ray_yolo.engine.spec import CPU
from ray_yolo.inference.exported import SUFFIXES as EXPORTED_SUFFIXES
from ray_yolo.inference.exported import Exported, load_exported
from ray_yolo.models.detector import Detector, fuse
from ray_yolo.models.families import FAMILY_OF, Family, build_model, find_family
from ray_yolo.models.heads import Predictions
from ray_yolo.ops.boxes import to_original
from ray_yolo.ops.network_input import unit_range
from ray_yolo.ops.nms import select

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A model with its weights, class names and recipe."""

    model: Detector  # the model in eval mode
    family: Family
    names: tuple[str, ...]
    recipe: Recipe  # the training's; the defaults for a file of plain tensors
    pixel_range: PixelRange = field(default_factory=dict)  # the range of the training images with more than 8 bits

    @property
    def trained_classes(self) -> tuple[int, ...] | None:
        """The classes that were trained, if not all (`classes` of the recipe); the others were background."""
        return None if self.recipe.single_cls else self.recipe.classes  # under single_cls all became one

    @property
    def imgsz(self) -> int:
        """Long side of the training's images in pixels."""
        return self.recipe.imgsz

    @property
    def grid(self) -> int:
        """Sides of the network input are multiples of it."""
        return self.model.grid

    @property
    def suppress(self) -> bool:
        """Whether predictions need non-maximum suppression."""
        return self.family.suppress


Opened = Trained | Exported
"""A model that can predict."""


def open_weights(path: Path) -> Opened:
    """A model with its weights, or an exported network.

    Raises:
        CheckpointError: if the file cannot be used.
    """
    return load_exported(path) if path.suffix in EXPORTED_SUFFIXES else load_trained(path)


def load_trained(path: Path) -> Trained:
    """The averaged model of a checkpoint of ours, or a known model with the weights of another file.

    Raises:
        CheckpointError: if the file cannot be used, or fits no known model.
    """
    weights = read_weights(path)
    if weights.meta is None:
        return _recognise(weights, path)
    needed, is_later = weights.meta.get("plugin"), is_of_later_version(weights.meta)
    model_name = weights.meta.get("recipe", {}).get("model", "")
    if needed and plugin_of(str(model_name)) is None:
        raise CheckpointError(f"{path}: its model {model_name} is of the package {needed[0]} (version {needed[1]}), "
                              "which is not installed here; install it")
    try:
        read_recipe = recipe_of_later_version if is_later else Recipe.model_validate
        recipe = read_recipe(weights.meta["recipe"])
        named = weights.meta["architecture"] or recipe.model
        model = build_model(named, len(weights.names), weights.meta["anchors"])
        model.load_state_dict(weights.tensors)
        pixel_range = read_pixel_range(weights.meta.get("pixel_range", {}))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if is_later:
            raise CheckpointError(f"{path}: written by a later ray_yolo, which this one cannot use ({reason}); use "
                                  "that one") from None
        raise CheckpointError(f"{path}: is not a checkpoint of this ray_yolo ({reason}); give a .pt file of a run"
                              ) from None
    return Trained(model.eval(), find_family(named), weights.names, recipe, pixel_range)


def select_classes(trained: Trained, classes: Sequence[int]) -> Trained:
    """The same weights with only these classes, in this order. It changes the model in place."""
    trained.model.head.select_classes(classes)
    return replace(trained, names=tuple(trained.names[number] for number in classes))


def _recognise(weights: Weights, path: Path) -> Trained:
    """The known model with these tensor names and shapes."""
    tensors = {name: tensor for name, tensor in weights.tensors.items() if not name.endswith(".anchor_grid")}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    layer_numbers = [int(name.split(".")[1]) for name in shapes if re.match(r"model\.\d+\.", name)]
    num_layers = max(layer_numbers, default=-1) + 1
    first_width = shapes.get("model.0.conv.weight", torch.Size([0]))[0]
    fitting = [(name, family) for name, family in FAMILY_OF.items()
               if family.models[name].key == (num_layers, first_width)]
    for (name, family), num_classes in product(fitting, _class_counts(shapes)):
        with torch.device("meta"):  # shapes without memory
            expected = build_model(name, num_classes).state_dict()
        if shapes != {tensor_name: tensor.shape for tensor_name, tensor in expected.items()}:
            continue
        model = build_model(name, num_classes)
        model.load_state_dict(tensors)
        if weights.names and len(weights.names) != num_classes:
            _log.warning("%s: has %d class names for %d classes; they are ignored", path, len(weights.names),
                         num_classes)
        recipe = Recipe(model=name)
        if weights.imgsz:  # rounded up, as by its own program
            recipe = Recipe(model=name, imgsz=math.ceil(weights.imgsz / model.grid) * model.grid)
        return Trained(model.eval(), family, class_names(weights, num_classes), recipe)
    raise CheckpointError(f"{path}: has no recipe and its tensors fit no known model; train from it with "
                          "python -m ray_yolo.train --model MODEL --weights FILE")


def _class_counts(shapes: Mapping[str, torch.Size]) -> set[int]:
    """The class counts that fit the lengths of a head's biases."""
    counts = set()
    for name, shape in shapes.items():
        if re.fullmatch(r"model\.\d+\.m\.0\.bias", name):  # anchor-based: 3 anchors of box, objectness and classes
            counts.add(shape.numel() // 3 - 5)
        elif re.fullmatch(r"model\.\d+\.cv3\.0\.2\.bias", name):  # anchor-free: the classes alone
            counts.add(shape.numel())
    return {number for number in counts if number > 0}


class ImageDetections(NamedTuple):
    """The detections of an image, and their timing."""

    detections: np.ndarray  # (n, 6) float32 rows [x1, y1, x2, y2, score, class], in pixels of the image, best first
    speed: dict[str, float]  # ms per image: preprocess, inference, postprocess


class Network(Protocol):
    """The network of a predictor."""

    @property
    def grid(self) -> int: ...  # sides of the input are multiples of it
    @property
    def suppress(self) -> bool: ...  # whether predictions need non-maximum suppression
    @property
    def takes_rectangles(self) -> bool: ...  # else only squares

    def __call__(self, pixels: np.ndarray, precision: str) -> Predictions:
        """Predictions of images (B, height, width, 3) uint8 RGB."""


@dataclass(frozen=True)
class TorchNetwork:
    """A torch module with its decoder."""

    model: Detector  # fused, on its device
    family: Family
    device: torch.device
    takes_rectangles: ClassVar[bool] = True

    @property
    def grid(self) -> int:
        """Sides of the input are multiples of it."""
        return self.model.grid

    @property
    def suppress(self) -> bool:
        """Whether predictions need non-maximum suppression."""
        return self.family.suppress

    def __call__(self, pixels: np.ndarray, precision: str) -> Predictions:
        """Predictions of images (B, height, width, 3) uint8 RGB."""
        batch = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2)
        with autocast(self.device, precision):
            levels = self.model(unit_range(batch))
        predictions = self.family.decode(self.model.head, levels)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the time would count as postprocessing
        return predictions


@dataclass(frozen=True)
class Predictor:
    """A callable model: `predictor(image)`. Thread-safe.

    It detects the classes of its settings, else those that were trained.
    """

    network: Network
    names: tuple[str, ...]
    imgsz: int
    settings: DetectConfig
    device: torch.device
    pixel_range: PixelRange = field(default_factory=dict)  # the range of images with more than 8 bits
    trained_classes: tuple[int, ...] | None = None  # None: all

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """The detections of one image (height, width, 3) uint8 RGB, as in `ImageDetections`."""
        return self.detect([image])[0].detections

    @torch.no_grad()
    def detect(self, images: Sequence[np.ndarray]) -> list[ImageDetections]:
        """Detect in images (height, width, 3) uint8 RGB; images of equal padded shape form a batch."""
        start = perf_counter()
        rect = self.settings.rect and self.network.takes_rectangles
        prepared = [to_network(image, self.imgsz, self.network.grid, rect=rect) for image in images]
        preprocess = (perf_counter() - start) / len(images)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number, (pixels, _, _) in enumerate(prepared):
            by_shape.setdefault(pixels.shape, []).append(number)
        detected: dict[int, ImageDetections] = {}
        for numbers in by_shape.values():
            start = perf_counter()
            batch = np.stack([prepared[number][0] for number in numbers])
            boxes, scores = self.network(batch, self.settings.precision)
            inference = (perf_counter() - start) / len(numbers)
            for row, number in enumerate(numbers):
                start = perf_counter()
                _, ratio, pad = prepared[number]
                selected = self._select(boxes[row : row + 1], scores[row : row + 1])
                corners = to_original(selected[:, :4], ratio, pad, images[number].shape[:2])
                detections = np.concatenate([corners, selected[:, 4:]], 1)
                postprocess = perf_counter() - start
                times = zip(STAGES, (preprocess, inference, postprocess), strict=True)
                speed = {name: 1e3 * seconds for name, seconds in times}  # ms
                detected[number] = ImageDetections(detections, speed)
        return [detected[number] for number in range(len(images))]

    def _select(self, boxes: Tensor, scores: Tensor) -> np.ndarray:
        """(n, 6) detections of one image's predictions."""
        settings = self.settings
        classes = self.trained_classes if settings.classes is None else settings.classes
        if classes is not None:  # Only boxes whose best class is wanted stay.
            best = scores[0].argmax(1)
            chosen = torch.isin(best, torch.tensor(classes, device=scores.device))
            boxes, scores = boxes[:, chosen], scores[:, chosen]
        iou = settings.iou if self.network.suppress else None  # None: the model's boxes need no suppression
        selected = select(boxes, scores, confidence=settings.confidence, iou=iou,
                          max_detections=settings.max_detections, multi_label=False, agnostic=settings.agnostic_nms)
        return selected[0].numpy()


@torch.no_grad()
def build_predictor(trained: Opened, settings: DetectConfig, device: torch.device = CPU) -> Predictor:
    """A predictor for trained weights, or for an exported network, which runs on the CPU."""
    network: Network
    if isinstance(trained, Exported):
        network = trained
    else:
        model = fuse(trained.model).to(device).to(memory_format=torch.channels_last)
        network = TorchNetwork(model, trained.family, device)
    imgsz = input_size(trained, settings.imgsz)
    network(np.zeros((1, imgsz, imgsz, 3), np.uint8), settings.precision)  # the first pass takes longer than the others
    return Predictor(network, trained.names, imgsz, settings, device, trained.pixel_range, trained.trained_classes)


def input_size(trained: Opened, imgsz: int | None) -> int:
    """Long side of the network input in pixels; None: that of the training. ConfigError if it is off the grid."""
    size = imgsz or trained.imgsz
    reason = off_grid(size, trained.grid)
    if reason:
        raise ConfigError(f"imgsz: {size} {reason} (these weights have cells of {trained.grid} px)")
    if isinstance(trained, Exported):
        trained.check_size(size)
    return size


def warn_of_iou(trained: Opened, settings: NmsConfig | EvaluateConfig) -> None:
    """Warn, once in a process, of a given `iou` that has no effect: these detections are not suppressed."""
    if not trained.suppress and "iou" in settings.model_fields_set:
        _warn_once("iou is ignored: this model's detections need no non-maximum suppression")


def warn_of_classes(trained: Opened, classes: Sequence[int] | None = None) -> None:
    """Warn, once in a process, that only some classes were trained, unless `classes` are given."""
    if classes is None and trained.trained_classes is not None:
        kept = ", ".join(f"{number} {trained.names[number]}" for number in trained.trained_classes)
        _warn_once(f"the weights were trained with --classes: of {len(trained.names)} classes, only {kept} are used; "
                   "--classes chooses others")


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def check_classes(classes: Sequence[int] | None, names: Sequence[str]) -> None:
    """Refuse unknown class numbers: the InputError lists the classes."""
    unknown = [number for number in classes or () if not 0 <= number < len(names)]
    if unknown:
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        raise InputError(f"classes: {unknown[0]} is none of the classes ({listed})")


def to_network(image: np.ndarray, imgsz: int, grid: int, *, rect: bool = True
               ) -> tuple[np.ndarray, tuple[float, float], tuple[int, int]]:
    """The network's input for an image, letterboxed as in validation; without `rect`, to a square of `imgsz`.

    Returns:
        The letterboxed image (h, w, 3) uint8; the (vertical, horizontal) scale and the (top, left) padding, which
        `ops.boxes.to_original` reverts.
    """
    size = np.array([image.shape[:2]])
    height, width = loaded_sizes(size, imgsz)[0].tolist()
    ratio = height / image.shape[0], width / image.shape[1]
    padded_height, padded_width = padded_shapes(size, imgsz, grid)[0].tolist() if rect else (imgsz, imgsz)
    scaled = resized(image, (height, width), smooth=True)
    padded, pad = letterbox(scaled, (padded_height, padded_width))
    return padded, ratio, pad
