"""`YOLO` with trained weights: the commands' own calls, with their settings by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo import YOLO
from ray_yolo.core.errors import InputError
from tests.support.jobs import make_dataset


def test_functions_are_called_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_dataset(tmp_path, 8)
    epochs: list[int] = []
    ends: list[object] = []
    result = YOLO("yolov5n").train(
        data="data.yaml", epochs=2, imgsz=64, batch=4, threads=1, num_workers=0, noplots=True, mlflow_uri="off",
        callbacks={"on_epoch_end": lambda event: epochs.append(event["epoch"]), "on_run_end": ends.append})
    assert epochs == [0, 1]
    assert ends == [result]
    resumed = YOLO(result.run_dir)
    with pytest.raises(InputError, match=str(result.run_dir)):
        resumed.train(resume=True)  # its run, which has ended
