"""Settings that change in the middle of a training, as population based training finds them.

Written `30: lr0=0.005 mosaic=0`: once 30 epochs are trained, these hold. Only what a training reads anew at each step
or epoch can change: gains, rates, augmentation; not what its tensors are shaped by. Nothing here imports torch or ray.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_serializer, model_validator

from ray_yolo.config.fields import canonical, did_you_mean
from ray_yolo.config.sections import SECTIONS, Frozen

CHANGEABLE = tuple(
    path for section, model in SECTIONS.items() for name in model.model_fields
    if (path := f"{section}.{name}") not in ("optimizer.name", "optimizer.nominal_batch"))
"""Paths of the settings that may change."""

_EPOCH = re.compile(r"\s*[0-9]{1,9}\s*")


class Change(Frozen):
    """Other values for some settings from an epoch on; its plain form is the text that users write."""

    epoch: int = Field(ge=1)
    """Trained epochs before it."""
    settings: dict[str, Any]
    """New values by path."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        epoch, colon, words = value.partition(":")
        if not (colon and _EPOCH.fullmatch(epoch) and all("=" in word for word in words.split())):
            raise ValueError("write 'EPOCHS: NAME=VALUE ...', e.g. '30: lr0=0.005 mosaic=0'")
        return {"epoch": int(epoch), "settings": dict(word.split("=", 1) for word in words.split())}

    @field_validator("settings")
    @classmethod
    def _check(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(_checked(name, value) for name, value in settings.items()))

    @model_serializer
    def _write(self) -> str:
        return f"{self.epoch}:" + "".join(f" {path}={str(value).lower()}" for path, value in self.settings.items())


def _checked(name: str, value: object) -> tuple[str, Any]:
    """Path and value of a setting, by the rules of its section."""
    path = canonical(name)
    if path not in CHANGEABLE:
        raise ValueError(f"{name} cannot change in the middle of a training"
                         f"{did_you_mean(name, {path.rpartition('.')[2]: path for path in CHANGEABLE})}")
    section, _, field = path.partition(".")
    try:
        return path, getattr(SECTIONS[section].model_validate({field: value}), field)
    except ValidationError as error:
        raise ValueError(f"{name}={value}: {error.errors(include_url=False)[0]['msg']}") from None
