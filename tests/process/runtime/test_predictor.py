"""Predictions with the files they leave, the same in this process and on Ray workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_yolo.core.errors import RayYoloError
from ray_yolo.runtime import cluster
from ray_yolo.runtime.predictor import PredictResult
from tests.support.weights import make_weights
from tests.unit.runtime.test_predictor import contents, local, run, source, stored_in, weights

__all__ = ["local", "source", "weights"]  # fixtures


@pytest.mark.smoke
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_workers_write_the_same_bytes_as_this_process(
        weights: Path, source: Path, tmp_path: Path, local: PredictResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "cache"))
    result = run(weights, source, tmp_path, "x", placement={"num_workers": 2, "gpus_per_worker": 0})
    assert contents(result.folder) == contents(local.folder)
    for one, other in zip(result.predictions, local.predictions, strict=True):
        assert one[:3] == other[:3]
        assert one.error == other.error
        assert one.detections.tobytes() == other.detections.tobytes()
    run(weights, source, Path("p"), "x", placement={"num_workers": 2, "gpus_per_worker": 0,
                                                    "storage_path": f"file://{tmp_path}/bucket"})
    assert stored_in(tmp_path / "bucket" / "p" / "x") == contents(local.folder)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_workers_error_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(tmp_path)
    monkeypatch.setattr(cluster, "wait_for_room", lambda *_: weights.unlink())
    with pytest.raises(RayYoloError, match=r"^worker 0: .*best\.pt: no such weights file.*$"):
        run(weights, source, tmp_path, "x", placement={"num_workers": 1, "gpus_per_worker": 0})
