"""The configurations of the commands that use trained weights."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ray_yolo.config.commands import ExportConfig, PredictConfig, ValConfig

NEEDED = {ValConfig: {"weights": "w.pt"}, PredictConfig: {"weights": "w.pt", "source": "s"},
          ExportConfig: {"weights": "w.pt"}}


@pytest.mark.parametrize("command", NEEDED)
def test_the_image_size_is_that_of_the_training_or_a_multiple_of_32(command: type[ValConfig]) -> None:
    assert command.model_validate(NEEDED[command]).imgsz is None
    assert command.model_validate({**NEEDED[command], "imgsz": 96}).imgsz == 96
    for other in (32, 100):
        with pytest.raises(ValidationError):
            command.model_validate({**NEEDED[command], "imgsz": other})


def test_weights_are_used_in_this_process_unless_workers_are_asked_for() -> None:
    for config in (ValConfig(weights="w.pt"), PredictConfig(weights="w.pt", source="s")):
        assert config.placement.num_workers == 0
    assert ValConfig(weights="w.pt").placement.project != PredictConfig(weights="w.pt", source="s").placement.project


def test_classes_are_one_number_a_list_or_a_text() -> None:
    for given, expected in ((3, (3,)), ((3,), (3,)), ([3], (3,)), ("3", (3,)), ("0,3", (0, 3)), ("0 3", (0, 3)),
                            ("[0, 3]", (0, 3))):
        assert PredictConfig.model_validate({**NEEDED[PredictConfig], "classes": given}).classes == expected, given
    for refused in ("", "3.5", "dog", "0,dog", "0;3"):
        with pytest.raises(ValidationError):
            PredictConfig.model_validate({**NEEDED[PredictConfig], "classes": refused})
