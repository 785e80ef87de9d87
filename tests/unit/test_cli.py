"""The commands: what each loads, and that it is there."""

from __future__ import annotations

import importlib
import shlex
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_yolo
from ray_yolo import cli
from ray_yolo.config.flags import build_parser, parse
from ray_yolo.core.errors import InputError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("own_signal_handlers")


def test_the_installed_program_has_every_command(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ray_yolo", *words])
        with pytest.raises(SystemExit) as ended:
            program()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["ray_yolo"].partition(":")
    program = getattr(importlib.import_module(module), name)
    assert status() == status("--help") == status("val", "--help") == 0
    output = capsys.readouterr().out
    assert all(f"\n    {command} " in output for command in ("train", "val", "predict", "export", "tune", "sync"))
    assert "python -m ray_yolo.val" in output
    assert status("predict", "--weights", "w.pt", "--source", "s", "--confidence", "2") == 2
    assert status("trian") == 2
    assert "--confidence: got '2'" in (errors := capsys.readouterr().err)
    assert "trian: no such command; the commands are train" in errors


def test_the_programs_help_has_six_lines_that_work_and_its_version_is_the_packages(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(cli.EXAMPLES) == 6
    for line, _ in cli.EXAMPLES:
        program, command, *words = shlex.split(line)
        assert program == "ray_yolo"
        parse(getattr(cli, command.upper()), words)
    for words in (["--version"], ["train", "--version"]):
        monkeypatch.setattr(sys, "argv", ["ray_yolo", *words])
        assert cli.console() == 0
        assert capsys.readouterr().out == f"ray_yolo {ray_yolo.__version__}\n"


def test_help_says_what_kind_of_value_each_flag_takes() -> None:
    for command in (cli.TRAIN, cli.VAL, cli.PREDICT, cli.EXPORT, cli.SERVE, cli.TUNE):
        named = {action.dest: action.metavar for action in build_parser(command)._actions}
        assert "VALUE" not in named.values()
    assert named["data"], named["epochs"] == ("YAML|DIR", "N")


def test_checks_shows_versions_devices_cluster_and_storage(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert cli.checks(["--storage-path", str(tmp_path)]) == 0
    page = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(page) == ["ray_yolo", "libraries", "CPU", "GPU", "cluster", "storage", "mlflow"]
    assert f"torch {torch.__version__.partition('+')[0]}" in page["libraries"]
    assert page["storage"].startswith(f"{tmp_path}: writable, ")

    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        assert cli.checks([]) == 4
    assert "cluster      address: no answer from 127.0.0.1:" in capsys.readouterr().out


def test_serve_hands_its_settings_to_ray_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_yolo.runtime import serving

    served: list[Any] = []
    monkeypatch.setattr(serving, "run", served.append)
    (tmp_path / "best.pt").touch()
    assert cli.serve(["--weights", str(tmp_path / "best.pt"), "--conf", "0.4", "--num-replicas", "2"]) == 0
    assert (served[0].weights, served[0].confidence, served[0].num_replicas) == (str(tmp_path / "best.pt"), 0.4, 2)
    with pytest.raises(InputError):
        cli.serve(["--weights", "nowhere.pt"])
