"""The published models: parameter counts, cost, strides, anchors, names of tensors."""

from __future__ import annotations

import re

import torch

from ray_yolo.config.model_facts import MODELS as MODEL_FACTS
from ray_yolo.models.detector import Detector, count_parameters
from ray_yolo.models.families import build_model
from ray_yolo.models.zoo import YOLOV3, YOLOV5

MODELS = {**YOLOV5, **YOLOV3}

PARAMETERS = {  # with 80 and with 3 classes
    "yolov5nu": (2_654_816, 2_509_049), "yolov5su": (9_153_152, 9_123_353), "yolov5mu": (25_111_456, 25_066_873),
    "yolov5lu": (53_225_024, 53_165_657), "yolov5xu": (97_276_448, 97_202_297),
    "yolov8n": (3_157_200, 3_011_433), "yolov8s": (11_166_560, 11_136_761), "yolov8m": (25_902_640, 25_858_057),
    "yolov8l": (43_691_520, 43_632_153), "yolov8x": (68_229_648, 68_155_497),
    "yolov5n6": (3_246_940, 3_098_176), "yolov5s6": (12_626_620, 12_330_016), "yolov5m6": (35_731_932, 35_287_488),
    "yolov5l6": (76_770_172, 76_177_888), "yolov5x6": (140_794_780, 140_054_656),
    "yolov5n6u": (4_334_896, 4_134_396), "yolov5s6u": (15_309_328, 15_269_596), "yolov5m6u": (41_222_064, 41_162_620),
    "yolov5l6u": (86_099_920, 86_020_764), "yolov5x6u": (155_544_432, 155_445_564),
    "yolo11n": (2_624_080, 2_590_425), "yolo11s": (9_458_752, 9_428_953), "yolo11m": (20_114_688, 20_055_321),
    "yolo11l": (25_372_160, 25_312_793), "yolo11x": (56_966_176, 56_877_241),
    "yolo12n": (2_602_288, 2_568_633), "yolo12s": (9_284_096, 9_254_297), "yolo12m": (20_199_168, 20_139_801),
    "yolo12l": (26_450_784, 26_391_417), "yolo12x": (59_210_784, 59_121_849),
    "yolo26n": (2_572_280, 2_504_970), "yolo26s": (10_009_784, 9_950_186), "yolo26m": (21_896_248, 21_777_514),
    "yolo26l": (26_299_704, 26_180_970), "yolo26x": (58_993_368, 58_815_498)}
ROWS_11N = [464, 4672, 6640, 36992, 26080, 147712, 87040, 295424, 346112, 164608, 249728, 0, 0, 111296, 0, 0, 32096,
            36992, 0, 86720, 147712, 0, 378880, 464912]
ROWS_26N = {13: 119808, 16: 34304, 19: 95232, 22: 463104, 23: 309656}  # where they differ


def test_every_model_without_anchors_and_every_p6_model_is_counted() -> None:
    assert PARAMETERS.keys() | YOLOV5.keys() | YOLOV3.keys() == MODEL_FACTS.keys()


def test_each_row_has_the_published_parameters() -> None:
    rows_26n = [ROWS_26N.get(row, count) for row, count in enumerate(ROWS_11N)]
    for name, expected in (("yolo11n", ROWS_11N), ("yolo26n", rows_26n)):
        assert [count_parameters(layer) for layer in build_model(name, 80).model] == expected, name


def test_tensor_names_without_anchors_are_the_published_ones() -> None:
    norm = r"bn\.(weight|bias|running_mean|running_var|num_batches_tracked)"
    conv = rf"(conv\.weight|{norm})"
    head = rf"22\.(cv[23]\.[012]\.([01]\.{conv}|2\.(weight|bias))|dfl\.conv\.weight)"
    grammar = rf"model\.(\d+\.{conv}|\d+\.(cv[12]|m\.\d+\.cv[12])\.{conv}|{head})"
    state = build_model("yolov8n", 80).state_dict()
    assert [key for key in state if not re.fullmatch(grammar, key)] == []
    assert state["model.2.cv1.conv.weight"].shape == (32, 32, 1, 1)
    assert state["model.2.m.0.cv1.conv.weight"].shape == (16, 16, 3, 3)
    assert state["model.2.cv2.conv.weight"].shape == (32, 48, 1, 1)
    assert state["model.22.dfl.conv.weight"].flatten().tolist() == list(range(16))


def without_memory(name: str, num_classes: int = 80) -> Detector:
    """A model of shapes only: yolov5x takes 350 MB otherwise."""
    with torch.device("meta"):
        return MODELS[name].build(num_classes)


def test_fewer_classes_make_a_smaller_head() -> None:
    for num_classes, parameters in ((1, 7_022_326), (20, 7_073_569)):
        assert count_parameters(without_memory("yolov5s", num_classes)) == parameters, num_classes


def test_anchors_are_the_published_pixels_over_the_strides() -> None:
    head = YOLOV5["yolov5n"].build(80).head
    pixels = head.anchors * torch.tensor(head.strides)[:, None, None]
    assert pixels.tolist() == [[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]],
                               [[116, 90], [156, 198], [373, 326]]]


def test_tensor_names_are_the_published_ones() -> None:
    norm = r"bn\.(weight|bias|running_mean|running_var|num_batches_tracked)"
    conv = rf"(conv\.weight|{norm})"
    layers = {
        "yolov5n": rf"model\.(\d+\.{conv}|\d+\.(cv[123]|m\.\d+\.cv[12])\.{conv}|24\.(anchors|m\.[012]\.(weight|bias)))",
        "yolov3-spp": rf"model\.(\d+\.{conv}|\d+\.(\d\.)?cv[12]\.{conv}|28\.(anchors|m\.[012]\.(weight|bias)))",
    }
    for name, grammar in layers.items():
        state = without_memory(name).state_dict()
        assert [key for key in state if not re.fullmatch(grammar, key)] == []
    assert state["model.2.cv1.conv.weight"].shape == (32, 64, 1, 1)  # one bottleneck stands alone
    assert state["model.6.7.cv2.conv.weight"].shape == (256, 128, 3, 3)  # eight are a sequence
    assert state["model.12.cv2.conv.weight"].shape == (512, 2048, 1, 1)
    state = without_memory("yolov5n").state_dict()
    assert state["model.0.conv.weight"].shape == (16, 3, 6, 6)
    assert state["model.6.m.2.cv2.conv.weight"].shape == (64, 64, 3, 3)
    assert state["model.9.cv2.conv.weight"].shape == (256, 512, 1, 1)
    assert state["model.24.m.2.weight"].shape == (255, 256, 1, 1)
