"""The commonest command lines of YOLOv5, typed as they are: each does what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ray_yolo import cli
from ray_yolo.core.errors import InputError

PAGE = (Path(__file__).parents[3] / "docs" / "coming_from_yolov5.md").read_text()
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.partition("## Ten command lines")[2].partition("\n## ")[0],
                       re.MULTILINE))
DOES: dict[str, dict[str, Any] | str] = {
    "train --data coco.yaml --epochs 300 --weights '' --cfg yolov5n.yaml --batch-size 128": {
        "recipe.data": "coco.yaml", "recipe.epochs": 300, "recipe.weights": "", "recipe.model": "yolov5n.yaml",
        "recipe.batch_size": 128},
    "train --img 640 --batch 16 --epochs 3 --data coco128.yaml --weights yolov5s.pt --cache": {
        "recipe.imgsz": 640, "recipe.batch_size": 16, "recipe.weights": "yolov5s.pt", "recipe.model": "yolov5s",
        "placement.cache": "ram"},
    "train --data data.yaml --weights yolov5s.pt --img 640 --batch 64 --device 0,1": "use --num-workers 2",
    "train --resume": {"placement.resume": "auto"},
    "train --data data.yaml --weights yolov5s.pt --hyp hyp.scratch-high.yaml": "--recipe scratch-high has its settings",
    "train --data data.yaml --weights yolov5s.pt --epochs 10 --cache --evolve": "use python -m ray_yolo.tune",
    "val --weights yolov5s.pt --data coco.yaml --img 640 --half": {"precision": "fp16", "imgsz": 640},
    "predict --weights yolov5s.pt --source 0": {"source": "0"},
    "predict --weights best.pt --img 640 --conf 0.25 --source data/images --save-txt": {
        "confidence": 0.25, "save_txt": True, "imgsz": 640, "placement.nosave": False},
    "export --weights yolov5s.pt --include torchscript onnx": "run it again with --format onnx",
}


def test_the_page_has_these_lines() -> None:
    assert list(ROWS) == list(DOES)


@pytest.mark.parametrize("line", DOES)
def test_a_line_does_what_the_page_says(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command, *words = shlex.split(line)
    does, parse = DOES[line], getattr(cli, f"parse_{command}")
    if isinstance(does, str):
        with pytest.raises(InputError, match=re.escape(does)):
            parse(words)
        assert f'"{does}"' in ROWS[line]
        return
    assert not ROWS[line].startswith("refused")
    settings = parse(words).config
    for path, value in does.items():
        found = settings
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value, path
