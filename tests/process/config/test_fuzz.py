"""Ten thousand random settings files, data-set files and command lines, always the same ones.

Each is a valid configuration, or an error that says what is wrong (exit 2).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ray_yolo.cli import EXPORT, PREDICT, TRAIN, VAL
from ray_yolo.config import yaml as yaml_files
from ray_yolo.config.flags import Command, parse
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.settings import GENES, config_fields, read_config_file, resolve_config
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.models.families import build_model
from tests.support.corpus import GOOD_YAML
from tests.support.fuzz import NASTY, PLAIN, ROUGH, damage, pick, replace_one, tally
from tests.support.jobs import TINY
from tests.support.pictures import smooth_picture, write_image

pytestmark = pytest.mark.timeout(120)

HYP = "lr0: 0.01\nmomentum: 0.937\nepochs: 3\nfreeze: [0, 1]\nnum_workers: 2-4\naugment:\n  mosaic: 1.0\n  scale: 0.5\n"
CONFIG_KEYS = (*config_fields(RunConfig), *GENES, "recipe", "placement", "optimizer", "iou_t", "epoch", "0", "''", "~")
DATA_KEYS = ("path", "train", "val", "test", "names", "nc", "download", "x", "0")
NOISE = (*ROUGH, b"a", b"1", b"names: ", b"epochs: ")
WORDS = (*NASTY, *PLAIN, "hyp.yaml", "noise.yaml", "none.yaml", "lr0=0.1", "optimizer.lr0=nan", "=", "=1", "a=b=c",
         "epochs=9", "loss=1", "64", "yolov5n")
MODEL_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 7, -10**9, 2**70, 0.5, -0.5, 1e-300, 1e300, "", "Conv", "C3", "nn.Upsample", "Detect",
    "nc", "anchors", "None", "__import__('os').abort()", [], [[]], [1, 2], [10, 13, 16, 30], {}, {"a": 1},
    "nn.ZeroPad2d")

both_parsers = pytest.mark.parametrize("parser", [yaml_files._PARSER, yaml.SafeLoader], ids=["libyaml", "python"])


def settings(rng: np.random.Generator, count: int, valid: str, keys: tuple[str, ...]) -> Iterator[bytes]:
    """YAML texts: a valid one damaged, one with a line more, such a line alone, noise."""
    for number in range(count):
        line = f"{pick(rng, keys)}: {pick(rng, NASTY + PLAIN * 4)}\n"
        if number % 4 == 0:
            yield damage(rng, valid.encode())
        elif number % 4 == 3:
            yield b"".join(pick(rng, NOISE) for _ in range(rng.integers(1, 15)))
        else:
            yield (valid * (number % 4 == 1) + line).encode()


@both_parsers
def test_settings_files_are_a_configuration_or_say_what_is_wrong(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: type) -> None:
    monkeypatch.setattr(yaml_files, "_PARSER", parser)
    file = tmp_path / "hyp.yaml"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        config, origins = resolve_config(RunConfig, read_config_file(str(file)))
        assert isinstance(config, RunConfig)
        assert set(origins) == set(config_fields(RunConfig))

    ends = tally(settings(np.random.default_rng(0), 2000, HYP, CONFIG_KEYS), read)
    assert min(ends["read"], ends["refused"]) > 200


@both_parsers
def test_data_set_files_are_a_description_or_say_what_is_wrong(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: type) -> None:
    monkeypatch.setattr(yaml_files, "_PARSER", parser)
    write_image(tmp_path / "images" / "a.png", smooth_picture(48, 64))

    def read(content: bytes) -> None:
        (tmp_path / "data.yaml").write_bytes(content)
        description = read_description(tmp_path)
        assert description.names
        assert all(name == name.strip() != "" and name.encode() for name in description.names)
        assert description.train or description.val

    ends = tally(settings(np.random.default_rng(1), 1500, GOOD_YAML, DATA_KEYS), read)
    assert min(ends["read"], ends["refused"]) > 100


def command_lines(rng: np.random.Generator, count: int, command: Command[Any]) -> Iterator[list[str]]:
    """One or two flags with odd values, after those that the command cannot do without."""
    flags = sorted(set(command.flags) - {"--help", "--version"})
    needed = [f"{flag}=x" for flag in ("--weights", "--source") if flag in flags]
    for _ in range(count):
        line = list(needed)
        for _ in range(rng.integers(1, 3)):
            flag, value = pick(rng, flags), pick(rng, WORDS + PLAIN * 6)
            line += pick(rng, ([flag, value], [flag, value], [f"{flag}={value}"], [flag], [value], [flag[:-1], value]))
        yield line


@pytest.mark.parametrize("command", [TRAIN, VAL, PREDICT, EXPORT], ids=lambda command: command.prog)
def test_command_lines_are_a_configuration_or_say_what_is_wrong(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        command: Command[Any]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hyp.yaml").write_text(HYP)
    (tmp_path / "noise.yaml").write_bytes(bytes(range(256)))
    with caplog.at_level(logging.ERROR):
        ends = tally(command_lines(np.random.default_rng(2), 1000, command), lambda line: parse(command, line))
    assert min(ends["read"], ends["refused"]) > 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hyp.yaml", "noise.yaml"]


def test_model_files_are_a_model_or_say_what_is_wrong() -> None:
    rng = np.random.default_rng(3)
    ends = tally((replace_one(rng, TINY, MODEL_VALUES) for _ in range(1000)), lambda content: build_model(content, 2))
    assert min(ends["read"], ends["refused"]) > 40
