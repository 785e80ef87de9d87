"""The configurations of `ray_yolo.val`, `ray_yolo.predict`, `ray_yolo.serve` and `ray_yolo.export`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ray_yolo.config.model_facts import GRID
from ray_yolo.config.placement import Placement
from ray_yolo.config.sections import Classes, ConfigModel, EvaluateConfig

ImageSize = Annotated[int | None, Field(ge=2 * GRID, multiple_of=GRID)]


class ResultsPlacement(Placement):
    """Where trained weights are used: in this process unless workers are asked for."""

    num_workers: int | tuple[int, int] = 0
    """Ray workers: a number, a range 'low-high', or 0 to work in this process without Ray."""
    name: str = ""
    """Name of the results; '': a new expN."""
    exist_ok: bool = False
    """Use --name again: results that lie there already are moved aside to NAME.oldN, never mixed or overwritten; in a
    store they are refused."""


class ValPlacement(ResultsPlacement):
    """Where a validation runs."""

    project: str = "runs/val"
    """Folder of validations; its name is MLflow's experiment."""
    mlflow_uri: str = "off"
    """Server that gets the validation as a run of its own; '': MLFLOW_TRACKING_URI, else sqlite in the storage folder;
    'off': none."""
    max_failures: int = Field(0, ge=-1)
    """Restarts after worker failures, each from the first image; -1: no limit."""


class ValConfig(ConfigModel):
    """One validation of trained weights. The numbers do not depend on the placement."""

    weights: str
    """Weights to validate, such as runs/train/exp/weights/best.pt."""
    data: str = ""
    """Data set: a YAML file, its address, or a built-in one; '': the one that the weights were trained on."""
    split: Literal["val", "test", "train"] = "val"
    """Part of the data set."""
    imgsz: ImageSize = None
    """Long side of the network input in pixels, a multiple of 32; left out: that of the training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass; auto: that of the training, as in its epochs (fp32 if the file does not say)."""
    single_cls: bool = False
    """Treat every label and every detection as class 0."""
    allow_empty: bool = False
    """Validate also where the split holds no box at all."""
    coco: bool = False
    """Also give the twelve numbers of the COCO protocol."""
    classes: Classes = None
    """Numbers of the classes that count; left out: all."""
    save_txt: bool = False
    """Write labels/NAME.txt: rows of class, centre x, centre y, width, height as shares of the image."""
    save_conf: bool = False
    """Add the score to each row of the text files."""
    save_json: bool = False
    """Write detections.json in COCO's result format, with the ids of the data set's COCO files if it has such."""
    evaluate: EvaluateConfig = EvaluateConfig()
    placement: ValPlacement = ValPlacement()


class NmsConfig(ConfigModel):
    """How predictions become detections, for use; validation has its own numbers."""

    confidence: float = Field(0.25, ge=0.0, lt=1.0)
    """Detections below this score are dropped."""
    iou: float = Field(0.45, gt=0.0, le=1.0)
    """Overlap above which non-maximum suppression removes a detection."""
    max_detections: int = Field(1000, ge=1)
    """Detections kept per image."""
    agnostic_nms: bool = False
    """Let detections suppress those of other classes too."""


class DetectConfig(NmsConfig):
    """What counts as found in an image."""

    classes: Classes = None
    """Numbers of the classes that are looked for; left out: all."""
    rect: bool = True
    """Pad an image to the smallest rectangle, as validation does; false: to a square, which an exported model takes
    that is not dynamic."""


class PredictPlacement(ResultsPlacement):
    """Where a prediction runs."""

    project: str = "runs/detect"
    """Folder of predictions."""
    nosave: bool = False
    """Write no pictures and videos with boxes."""


class PredictConfig(DetectConfig):
    """One prediction. What is found in an image depends on that image alone (in batches, up to rounding)."""

    weights: str
    """Weights to use, such as runs/train/exp/weights/best.pt."""
    source: str
    """Pictures and videos: a folder, a file, a pattern such as 'day*/*.jpg', a .txt file with one path per line; or a
    camera's number, or the address of a stream."""
    imgsz: ImageSize = None
    """Long side of the network input in pixels, a multiple of 32; left out: that of the training."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass."""
    batch_size: int = Field(1, ge=1)
    """Images that go through the network at once, where their shapes are equal; more suit a GPU, and round
    differently."""
    save_txt: bool = False
    """Write labels/NAME.txt: rows of class, centre x, centre y, width, height as shares of the image."""
    save_conf: bool = False
    """Add the score to each row of the text files."""
    save_json: bool = False
    """Write predictions.json: all detections in pixels."""
    save_csv: bool = False
    """Write predictions.csv: a row for each detection, in pixels."""
    save_crop: bool = False
    """Write what each box encloses: crops/CLASS/NAME.N.jpg."""
    vid_stride: int = Field(1, ge=1)
    """Look at every so many-th frame of videos and streams."""
    hide_labels: bool = False
    """Draw boxes without names."""
    hide_conf: bool = False
    """Draw boxes without scores."""
    line_thickness: int | None = Field(None, ge=1)
    """Width of drawn lines in pixels; left out: 1/200 of the picture's shorter side."""
    placement: PredictPlacement = PredictPlacement()


class ServeConfig(DetectConfig):
    """One application of Ray Serve, `ray_yolo.serve:app`."""

    weights: str
    """Weights to use, such as runs/train/exp/weights/best.pt, at a path that every node sees."""
    imgsz: ImageSize = None
    """Long side of the network input in pixels, a multiple of 32; left out: that of the training."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass."""
    batch_size: int = Field(8, ge=1)
    """Most images that go through the network at once; 1 gives the bits of `predict`, more round differently."""
    batch_wait_ms: float = Field(5.0, ge=0.0)
    """How long an image waits for others to go with."""
    num_replicas: int = Field(1, ge=1)
    """Copies of the model; one that is lost is replaced, and the others answer meanwhile."""
    gpus_per_replica: float = Field(0.0, ge=0.0)
    """GPUs of each copy, or a part of one; 0: it runs on CPUs."""
    cpus_per_replica: int = Field(1, ge=1)
    """CPUs of each copy."""
    max_waiting: int = Field(200, ge=1)
    """Images that may wait; further ones are answered with 503 at once."""
    max_bytes: int = Field(20_000_000, ge=1)
    """Longest file that is accepted."""
    max_pixels: int = Field(50_000_000, ge=1)
    """Largest picture that is decoded."""


class ExportConfig(NmsConfig):
    """Trained weights as a file for other programs. The thresholds count with `nms` only."""

    weights: str
    """Weights to export, such as runs/train/exp/weights/best.pt; the new file lies beside them."""
    format: Literal["onnx", "torchscript"] = "onnx"
    """Form of the file."""
    imgsz: ImageSize = None
    """Sides of the network input in pixels, a multiple of 32; left out: that of the training."""
    batch_size: int = Field(1, ge=1)
    """Images of one call."""
    dynamic: bool = False
    """Take any number of images of any size in multiples of 32 (TorchScript always does); else squares of imgsz."""
    nms: bool = False
    """Suppress overlapping boxes inside: gives rows of image, x1, y1, x2, y2, score, class."""
    opset: int | None = Field(None, ge=16)
    """ONNX operator set; left out: the exporter's own."""
