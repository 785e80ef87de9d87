"""Export trained weights for other programs, with decoded predictions or selected detections as output.

A file is kept only if its outputs equal those of torch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import batched_nms

from ray_yolo.checkpoints.weights_file import local_file, weights_file
from ray_yolo.config.commands import ExportConfig, NmsConfig
from ray_yolo.core.errors import InputError, RayYoloError
from ray_yolo.core.files import replacing
from ray_yolo.inference.exported import METADATA_SECTION, load_exported
from ray_yolo.inference.predictor import Trained, input_size, load_trained, warn_of_iou
from ray_yolo.models.detector import Detector, fuse
from ray_yolo.models.families import Family
from ray_yolo.ops.nms import select
from ray_yolo.storage.store import is_address

if TYPE_CHECKING:
    from onnx import ModelProto

_log = logging.getLogger(__name__)
LARGEST_DIFFERENCE = 1e-4  # Boxes, as shares of the image, and scores may differ by so much.

_ONNX = ("onnx", "onnxruntime", "onnxscript")
_REQUIRED = {"onnx": _ONNX, "openvino": (*_ONNX, "openvino"), "torchscript": ()}
_SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torchscript": ".torchscript"}

RunOnnx = Callable[[Tensor], np.ndarray]  # an exported model

_ONNX_SUPPRESSION = """
    overlap = Constant <value = float {{{iou}}}> ()
    place = Constant <value = int64[2] {{0, 2}}> ()
    by_class = Transpose <perm = [0, 2, 1]> ({competing})
    kept = NonMaxSuppression (corners, by_class, limit, overlap, score)
    kept_place = Gather <axis = 1> (kept, place)
    kept_scores = GatherND (single, kept_place)
    survivors = ScatterND (nothing, kept_place, kept_scores)
"""

_ONNX_TEXT = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
selection (float[images, boxes, numbers] predictions) => (float[found, 7] detections)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] four = {{4}}, int64[1] end = {{65536}},
 int64[2] row = {{0, -1}}, int64[1] limit = {{{limit}}}, float score = {{{confidence}}}>
{{
    corners = Slice (predictions, zero, four, two)
    scores = Slice (predictions, four, end, two)
    best, label = TopK <axis = 2> (scores, one)
    shape = Shape (scores)
    nothing = ConstantOfShape <value = float[1] {{0}}> (shape)
    single = ScatterElements <axis = 2> (nothing, label, best)
{suppression}
    entered = Reshape ({entered}, row)
    classes = Gather (shape, two)
    entered_shape = Shape (entered)
    entries = Gather (entered_shape, one)
    count = Min (limit, entries)
    highest, entry = TopK <axis = 1> (entered, count)
    above = Greater (highest, score)
    where = NonZero (above)
    chosen = Transpose <perm = [1, 0]> (where)
    image = Gather <axis = 1> (chosen, zero)
    chosen_score = GatherND (highest, chosen)
    chosen_entry = GatherND (entry, chosen)
    number = Div (chosen_entry, classes)
    class = Mod (chosen_entry, classes)
    number_column = Unsqueeze (number, one)
    at = Concat <axis = 1> (image, number_column)
    image_column = Cast <to = 1> (image)
    box = GatherND (corners, at)
    score_column = Unsqueeze (chosen_score, one)
    class_number = Cast <to = 1> (class)
    class_column = Unsqueeze (class_number, one)
    detections = Concat <axis = 1> (image_column, box, score_column, class_column)
}}
"""  # `entered`: the scores (images, boxes, classes) of which each image's highest are its detections


@dataclass(frozen=True)
class ExportResult:
    """A verified exported file."""

    path: Path
    metadata: dict[str, str]
    largest_difference: float  #: the outputs differ from torch's by this, see LARGEST_DIFFERENCE
    takes: str  #: the accepted images

    def __str__(self) -> str:
        return (f"{self.path}: the largest difference from torch is {self.largest_difference:.1e} "
                f"(allowed: {LARGEST_DIFFERENCE})\n{self.takes}")


class Decoded(nn.Module):
    """A detector with output (B, N, 4 + classes): xyxy in pixels, and a score per class."""

    def __init__(self, detector: Detector, family: Family) -> None:
        super().__init__()
        self.detector = detector
        self._decode, self.suppress = family.decode, family.suppress

    def forward(self, images: Tensor) -> Tensor:
        """Predictions of images (B, 3, H, W) in 0..1."""
        return torch.cat(self._decode(self.detector.head, self.detector(images)), 2)


def export(config: ExportConfig) -> ExportResult:
    """Write trained weights in another format, beside them or into `project`, and verify the file against torch.

    Raises:
        InputError: if the weights cannot be used (CheckpointError), or the extra packages are missing.
        RayYoloError: if the outputs differ from those of torch; the file is removed.
    """
    config, trained = check(config)
    path = _exported_file(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    imgsz = input_size(trained, config.imgsz)
    metadata = {  # YOLOv5's keys, but `detections`; `names` reads as a Python dict
        "names": str(dict(enumerate(trained.names))), "stride": str(max(trained.model.head.strides)),
        "imgsz": str([imgsz, imgsz]), "batch": str(config.batch_size), "task": "detect",
        "nms" if trained.family.suppress else "detections": str(config.nms)}
    if trained.pixel_range:
        metadata["pixel_range"] = json.dumps(dict(trained.pixel_range))
    if trained.trained_classes is not None:
        metadata["classes"] = json.dumps(trained.trained_classes)
    model = Decoded(fuse(trained.model).requires_grad_(False), trained.family).eval()
    write = {"onnx": _write_onnx, "openvino": _write_openvino, "torchscript": _write_torchscript}[config.format]
    with replacing(path) as temporary, _quiet():
        difference = write(model, config, imgsz, metadata, temporary)
    takes = (f"it takes sides in multiples of {model.detector.grid} px; with predict's padding its detections equal "
             "those of predict")
    if config.format != "torchscript" and not config.dynamic:
        takes = (f"it takes squares of {imgsz} px: scale an image to fit and centre it on grey 114; its detections "
                 "then equal those of predict --square (predict alone pads less; for that, export with --dynamic)")
    return ExportResult(path, metadata, difference, takes)


def check(config: ExportConfig) -> tuple[ExportConfig, Trained]:
    """The configuration completed from the weights, and the weights; raises as `export` does, writes no file."""
    missing = [name for name in _REQUIRED[config.format] if importlib.util.find_spec(name) is None]
    if missing:
        extra = "openvino" if config.format == "openvino" else "export"
        raise InputError(f"format: {config.format} needs {', '.join(missing)}; install with pip install "
                         f"ray_yolo[{extra}]")
    if config.format == "openvino" and config.nms:
        raise InputError("nms: OpenVINO files have none; leave it out, or export with --format onnx --nms, which "
                         "OpenVINO reads too")
    if is_address(config.project):
        raise InputError(f"project: {config.project} is in a store; give a local folder")
    if is_address(config.weights) and not config.project:
        raise InputError("weights: the export would be written beside them, in a store; give a local folder by "
                         "--project")
    weights = str(local_file(config.weights)) if is_address(config.weights) else weights_file(config.weights)
    folder = Path(config.project or Path(weights).parent).expanduser()
    trained = load_trained(Path(weights))
    warn_of_iou(trained, config)
    if trained.trained_classes is not None:
        kept = ", ".join(map(str, trained.trained_classes))
        _log.warning("the weights were trained with --classes %s: the file has scores of all %d classes; those of the "
                     "others mean nothing, and predict leaves them out", kept, len(trained.names))
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        setting = "project" if config.project else "weights"
        raise InputError(f"{setting}: {existing} cannot be written to; give another folder by --project")
    decided = {"weights": weights, "project": str(folder), "imgsz": input_size(trained, config.imgsz)}
    return config.model_copy(update=decided), trained


def _exported_file(config: ExportConfig) -> Path:
    """The file that a completed configuration asks for."""
    return (Path(config.project) / Path(config.weights).name).with_suffix(_SUFFIXES[config.format])


def _write_onnx(model: Decoded, config: ExportConfig, imgsz: int, metadata: dict[str, str], path: Path) -> float:
    import onnx
    from onnx import compose, helper

    num_images = max(config.batch_size, 2) if config.dynamic else config.batch_size  # a batch of 1 would be fixed
    example = torch.zeros(num_images, 3, imgsz, imgsz)
    grid = model.detector.grid
    sides = {0: torch.export.Dim("batch"), 2: grid * torch.export.Dim("h"), 3: grid * torch.export.Dim("w")}
    program = torch.onnx.export(
        model, (example,), input_names=["images"], output_names=["predictions"], dynamo=True, verbose=False,
        opset_version=config.opset, dynamic_shapes={"images": sides} if config.dynamic else None)
    assert program is not None
    graph = program.model_proto
    opset = next(entry.version for entry in graph.opset_import if entry.domain == "")
    if config.opset not in (None, opset):
        raise InputError(f"opset: the exporter cannot write {config.opset}, only {opset}; leave --opset out")
    helper.set_model_props(graph, metadata)
    onnx.save(graph, path)
    difference = _compare_predictions(model, _onnx_run(path), config.batch_size, imgsz, dynamic=config.dynamic)
    if config.nms:
        selection = onnx_selection(config, graph.ir_version, opset, suppress=model.suppress)
        onnx.save(selection, path)
        difference = max(difference, _compare_selection(_onnx_run(path), config, suppress=model.suppress))
        graph = compose.merge_models(graph, selection, io_map=[("predictions", "predictions")])
        onnx.checker.check_model(graph)
        onnx.save(graph, path)
        _onnx_run(path)(example)
    return difference


def _write_openvino(model: Decoded, config: ExportConfig, imgsz: int, metadata: dict[str, str], path: Path) -> float:
    """Convert the ONNX file. The weights are in a .bin file of the name of the final .xml file, which refers to it."""
    import openvino

    weights = _exported_file(config).with_suffix(".bin")
    with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        onnx_file = Path(folder) / "model.onnx"
        difference = _write_onnx(model, config, imgsz, metadata, onnx_file)
        converted = openvino.convert_model(onnx_file)
        for key, value in metadata.items():
            converted.set_rt_info(value, [METADATA_SECTION, key])
        file = Path(folder) / "model.xml"
        openvino.save_model(converted, file, compress_to_fp16=False)
        run = load_exported(file).run
        own = _compare_predictions(model, lambda images: run(images.numpy()), config.batch_size, imgsz,
                                   dynamic=config.dynamic)
        file.with_suffix(".bin").replace(weights)
        file.replace(path)
    return max(difference, own)


def _write_torchscript(model: Decoded, config: ExportConfig, imgsz: int, metadata: dict[str, str],
                       path: Path) -> float:
    example = torch.zeros(config.batch_size, 3, imgsz, imgsz)
    traced = _trace(model, example)
    difference = _compare_predictions(model, lambda images: traced(images).numpy(), config.batch_size, imgsz,
                                      dynamic=True)
    if config.nms:
        selection = _trace(Selection(config, suppress=model.suppress), random_predictions())
        of_selection = _compare_selection(lambda boxes: selection(boxes).numpy(), config, suppress=model.suppress)
        difference = max(difference, of_selection)
        traced = _trace(nn.Sequential(traced, selection), example)
    with path.open("wb") as file:  # torch takes no path that is not UTF-8
        torch.jit.save(traced, file, _extra_files={"config.txt": json.dumps(metadata)})
    return difference


def _trace(model: nn.Module, example: Tensor) -> Any:
    return torch.jit.trace(model, example, check_trace=False)


def _onnx_run(path: Path) -> RunOnnx:
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])  # see `_open_onnx`
    name = session.get_inputs()[0].name
    return lambda tensor: np.asarray(session.run(None, {name: tensor.numpy()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporters' logs and deprecation warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _compare_predictions(model: Decoded, run: RunOnnx, batch_size: int, imgsz: int, *, dynamic: bool) -> float:
    """`_difference` for a batch of noise, and for one of another shape if shapes are dynamic."""
    shapes = [(batch_size, 3, imgsz, imgsz)]
    if dynamic:
        shapes.append((batch_size + 1, 3, imgsz, imgsz + model.detector.grid))
    generator = torch.Generator().manual_seed(0)
    noise = [torch.rand(shape, generator=generator) for shape in shapes]
    return max(_difference(model(images).numpy(), run(images), slice(0, 4), imgsz) for images in noise)


def _compare_selection(run: RunOnnx, settings: NmsConfig, *, suppress: bool) -> float:
    """`_difference` from `select` on clusters of overlapping boxes."""
    predictions = random_predictions()
    detections = select(predictions[..., :4], predictions[..., 4:], confidence=settings.confidence,
                        iou=settings.iou if suppress else None, max_detections=settings.max_detections,
                        multi_label=False, agnostic=settings.agnostic_nms)
    # A column in front with the number of the image.
    expected = torch.cat([nn.functional.pad(rows, (1, 0), value=image) for image, rows in enumerate(detections)])
    return _difference(expected.numpy(), run(predictions), slice(1, 5), 640)


def random_predictions(num_images: int = 2, num_boxes: int = 300, num_classes: int = 3) -> Tensor:
    """(images, boxes, 4 + classes) overlapping boxes in 640 pixels with random scores, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randint(0, 6, (num_images, num_boxes, 2), generator=generator) * 100.0 + 50
    edges = torch.rand(num_images, num_boxes, 4, generator=generator) * 20
    boxes = torch.cat([centre - 40 - edges[..., :2], centre + 40 + edges[..., 2:]], 2)
    return torch.cat([boxes, torch.rand(num_images, num_boxes, num_classes, generator=generator)], 2)


def _difference(expected: np.ndarray, actual: np.ndarray, boxes: slice, imgsz: int) -> float:
    """The largest absolute difference, with boxes as shares of the image; RayYoloError if too large."""
    if expected.shape != actual.shape:
        raise RayYoloError(f"the exported model gives {actual.shape} numbers where torch gives {expected.shape}; "
                           "nothing was written")
    difference = np.abs(expected.astype(np.float64) - actual)
    difference[..., boxes] /= imgsz
    largest = float(difference.max(initial=0.0))
    if not largest <= LARGEST_DIFFERENCE:
        raise RayYoloError(f"the exported model differs from torch by up to {largest:.1e} (allowed "
                           f"{LARGEST_DIFFERENCE}); nothing was written")
    return largest


def onnx_selection(settings: NmsConfig, ir_version: int, opset: int, *, suppress: bool) -> ModelProto:
    """`ops.nms.select` as a graph from `predictions` (B, N, 4 + classes) to `detections`.

    Detections are (m, 7) float32 rows [image, x1, y1, x2, y2, score, class], by image and descending score.
    """
    from onnx import parser

    # Names of values in the graph: one class per box, or all its classes.
    if suppress:
        competing = "best" if settings.agnostic_nms else "single"  # across all classes, or within each
        suppression, entered = _ONNX_SUPPRESSION.format(iou=settings.iou, competing=competing), "survivors"
    else:
        suppression, entered = "", "single" if settings.agnostic_nms else "scores"
    return parser.parse_model(_ONNX_TEXT.format(
        ir=ir_version, opset=opset, limit=settings.max_detections, confidence=settings.confidence,
        suppression=suppression, entered=entered))


class Selection(nn.Module):
    """`onnx_selection` for TorchScript; with suppression, loading the file needs torchvision."""

    def __init__(self, settings: NmsConfig, *, suppress: bool) -> None:
        super().__init__()
        self.settings, self.suppress = settings, suppress

    def forward(self, predictions: Tensor) -> Tensor:
        """Detections of `predictions` (B, N, 4 + classes)."""
        settings, boxes, scores = self.settings, predictions[..., :4], predictions[..., 4:]
        labels = torch.arange(scores.shape[2], device=scores.device).expand_as(scores)
        if self.suppress or settings.agnostic_nms:  # one class per box
            scores, labels = scores.max(2, keepdim=True)
        if self.suppress:
            scores = _survivors(boxes, scores, labels, settings.confidence, settings.iou, settings.agnostic_nms)
        return _highest(boxes, scores, labels, settings.confidence, settings.max_detections)


@torch.jit.script_if_tracing
def _survivors(boxes: Tensor, best: Tensor, labels: Tensor, confidence: float, iou: float, agnostic: bool) -> Tensor:
    """The best score of each box, (images, boxes, 1), 0 for suppressed ones."""
    survivors = torch.zeros_like(best)
    for image in range(best.shape[0]):
        chosen = torch.nonzero(best[image, :, 0] > confidence)[:, 0]
        group = torch.zeros_like(chosen) if agnostic else labels[image, chosen, 0]  # boxes of one compete
        order = batched_nms(boxes[image, chosen], best[image, chosen, 0], group, iou)
        kept = chosen[order]
        survivors[image, kept] = best[image, kept]
    return survivors


@torch.jit.script_if_tracing
def _highest(boxes: Tensor, scores: Tensor, labels: Tensor, confidence: float, limit: int) -> Tensor:
    """The rows of the highest of each image's scores, which have labels, for each of its boxes."""
    detections = [torch.zeros((0, 7), device=scores.device)]  # the type, and the result of no image
    for image in range(scores.shape[0]):
        rows, columns = torch.nonzero(scores[image] > confidence).unbind(1)
        order = scores[image, rows, columns].sort(descending=True, stable=True)[1]
        order = order[:limit]
        rows, columns = rows[order], columns[order]
        number = torch.full((rows.shape[0], 1), float(image), device=scores.device)  # (m, 1)
        score = scores[image, rows, columns].unsqueeze(1)
        label = labels[image, rows, columns].unsqueeze(1).float()
        detections.append(torch.cat([number, boxes[image, rows], score, label], 1))  # (m, 7)
    return torch.cat(detections)
