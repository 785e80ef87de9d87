"""Configurations of `ray_yolo.val`, `ray_yolo.predict`, `ray_yolo.serve`, `ray_yolo.export` and `ray_yolo.replay`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ray_yolo.config.model_facts import GRID
from ray_yolo.config.placement import Placement
from ray_yolo.config.sections import Classes, ConfigModel, EvaluateConfig

ImageSize = Annotated[int | None, Field(ge=2 * GRID, multiple_of=GRID)]


class ResultsPlacement(Placement):
    """Placement of a command that uses trained weights: in this process unless workers are requested."""

    num_workers: int | tuple[int, int] = 0
    """Ray workers: a number, a range 'low-high', or 0 to run in this process without Ray."""
    name: str = ""
    """Name of the results; '': a new expN."""
    exist_ok: bool = False
    """Reuse --name: existing results are renamed to NAME.oldN, never mixed or overwritten; in object storage they are
    refused."""


class ValPlacement(ResultsPlacement):
    """Placement of a validation."""

    project: str = "runs/val"
    """Folder of validations; its name is the MLflow experiment."""
    mlflow_uri: str = "off"
    """Tracking server that records the validation as a run; '': MLFLOW_TRACKING_URI, else sqlite in the storage folder;
    'off': none."""
    max_failures: int = Field(0, ge=-1)
    """Times that the share of a lost worker is computed again; -1: no limit."""


class ReplayPlacement(ResultsPlacement):
    """Placement of a replay, which runs in this process."""

    project: str = "runs/replay"
    """Folder of replays."""


class ReplayConfig(ConfigModel):
    """One step of a run, trained again in this process."""

    run: str
    """Folder or address of the run, such as runs/train/exp."""
    step: int | None = Field(None, ge=1)
    """Number of the step, counted from 1 as in events.jsonl."""
    around: Literal["nan", "spike", "worst"] | None = None
    """A step of the log instead. nan: the first that was skipped or not finite; spike: the one whose loss rises most
    over the median of the 50 logged steps before it; worst: the one with the highest loss."""
    data: str = ""
    """Dataset, if it has moved since the training; '': as in training."""
    placement: ReplayPlacement = ReplayPlacement()

    @model_validator(mode="after")
    def _check_step(self) -> ReplayConfig:
        if (self.step is None) == (self.around is None):
            raise ValueError("give either --step N or --around nan, spike or worst")
        return self


class LabelFiles(ConfigModel):
    """Label files of detections."""

    save_txt: bool = False
    """Write labels/NAME.txt: rows of class, centre x, centre y, width, height as fractions of the image."""
    save_conf: bool = False
    """Add the score to each row of the text files."""


class ValConfig(LabelFiles):
    """A validation of trained weights. The metrics do not depend on the placement."""

    weights: str
    """Weights to validate, such as runs/train/exp/weights/best.pt."""
    data: str = ""
    """Dataset: a YAML file, its address, or a built-in one; '': the one that the weights were trained on."""
    split: Literal["val", "test", "train"] = "val"
    """Split of the dataset."""
    imgsz: ImageSize = None
    """Long side of the network input in pixels, a multiple of 32; default: as in training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass; auto: as in training (fp32 if the file does not record it)."""
    single_cls: bool = False
    """Treat every label and every detection as class 0; default: as in training."""
    allow_empty: bool = False
    """Validate even if the split has no boxes."""
    labels_with_confidence: bool = False
    """YOLO rows may end with a confidence, which is not used; default: as in training."""
    keep_difficult: bool = False
    """Use VOC objects that are marked difficult; default: as in training."""
    allow_names: bool = False
    """Accept weights with other class names, equal in number: names that match go together, the others by order."""
    coco: bool = False
    """Also compute the twelve metrics of the COCO protocol."""
    classes: Classes = None
    """Numbers of the classes to evaluate; default: all."""
    worst: int = Field(0, ge=0)
    """Draw and list this many of the images with the highest loss, and of the labels that are most probably wrong; 0:
    none."""
    save_json: bool = False
    """Write detections.json in COCO's result format, with the ids of the dataset's COCO files if it has any."""
    evaluate: EvaluateConfig = EvaluateConfig()
    placement: ValPlacement = ValPlacement()


class NmsConfig(ConfigModel):
    """Detections in prediction, serving and export; validation has its own thresholds."""

    confidence: float = Field(0.25, ge=0.0, lt=1.0)
    """Detections below this score are dropped."""
    iou: float = Field(0.45, gt=0.0, le=1.0)
    """Overlap above which non-maximum suppression removes a detection."""
    max_detections: int = Field(1000, ge=1)
    """Detections kept per image."""
    agnostic_nms: bool = False
    """Suppress overlapping detections of different classes too."""


class DetectConfig(NmsConfig):
    """Detections of an image, and the network's input and arithmetic."""

    imgsz: ImageSize = None
    """Long side of the network input in pixels, a multiple of 32; default: as in training."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass."""
    classes: Classes = None
    """Numbers of the classes to detect; default: all."""
    rect: bool = True
    """Pad an image to the smallest rectangle, as in validation; false: to a square, as for exported models with static
    shapes."""


class PredictPlacement(ResultsPlacement):
    """Placement of a prediction."""

    project: str = "runs/detect"
    """Folder of predictions."""
    nosave: bool = False
    """Do not write images and videos with boxes."""


class PredictConfig(DetectConfig, LabelFiles):
    """A prediction. The detections of an image depend only on that image (in batches, up to rounding)."""

    weights: str
    """Weights to use, such as runs/train/exp/weights/best.pt."""
    source: str
    """Pictures and videos: a folder, a file, a pattern such as 'day*/*.jpg', a .txt file with one path per line, the
    number of a camera, or the address of a stream."""
    batch_size: int = Field(1, ge=1)
    """Images of equal shape per forward pass; larger batches are faster on a GPU and round differently."""
    save_json: bool = False
    """Write predictions.json: all detections in pixels."""
    save_csv: bool = False
    """Write predictions.csv: a row for each detection, in pixels."""
    save_crop: bool = False
    """Write the image region of each box: crops/CLASS/NAME.N.jpg."""
    vid_stride: int = Field(1, ge=1)
    """Frame interval of videos and streams: 1 uses every frame, 2 every second one."""
    hide_labels: bool = False
    """Draw boxes without names."""
    hide_conf: bool = False
    """Draw boxes without scores."""
    line_thickness: int | None = Field(None, ge=1)
    """Line width in pixels; default: 1/200 of the picture's shorter side."""
    placement: PredictPlacement = PredictPlacement()


class ServeConfig(DetectConfig):
    """One application of Ray Serve, `ray_yolo.serve:app`."""

    weights: str
    """Weights to use, such as runs/train/exp/weights/best.pt, at a path that every node can read."""
    batch_size: int = Field(8, ge=1)
    """Most images per forward pass; 1 gives the bits of `predict`, larger batches round differently."""
    batch_wait_ms: float = Field(5.0, ge=0.0)
    """Longest time that an image waits for its batch to fill."""
    num_replicas: int = Field(1, ge=1)
    """Copies of the model; a lost one is replaced while the others continue to serve."""
    gpus_per_replica: float = Field(0.0, ge=0.0)
    """GPUs per copy, which may be a fraction; 0: run on CPUs."""
    cpus_per_replica: int = Field(1, ge=1)
    """CPUs per copy."""
    host: str = "127.0.0.1"
    """Address on which each node listens; 0.0.0.0: all of its addresses."""
    port: int = Field(8000, ge=1, le=65535)
    """Port on which each node listens."""
    max_waiting: int = Field(200, ge=1)
    """Queue limit in images; requests beyond it get status 503 at once."""
    max_bytes: int = Field(20_000_000, ge=1)
    """Largest accepted file in bytes."""
    max_pixels: int = Field(50_000_000, ge=1)
    """Largest decoded picture in pixels."""


class ExportConfig(NmsConfig):
    """Export of trained weights for other programs. The thresholds have an effect only with `nms`."""

    weights: str
    """Weights to export, such as runs/train/exp/weights/best.pt."""
    project: str = ""
    """Local folder for the new file; default: that of the weights."""
    format: Literal["onnx", "openvino", "torchscript"] = "onnx"
    """Format of the file; openvino writes an .xml and a .bin file."""
    imgsz: ImageSize = None
    """Sides of the network input in pixels, a multiple of 32; default: as in training."""
    batch_size: int = Field(1, ge=1)
    """Images per call."""
    dynamic: bool = False
    """Accept any number of images of any size in multiples of 32 (TorchScript always does); else squares of imgsz."""
    nms: bool = False
    """Include non-maximum suppression: the output has rows of image, x1, y1, x2, y2, score, class."""
    opset: int | None = Field(None, ge=16)
    """ONNX operator set; default: the exporter's."""
