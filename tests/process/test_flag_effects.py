"""Every flag of training does what it says, seen in trainings and not in settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Summary
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from ray_yolo.runtime import trainer
from tests.support.flag_effects import EFFECTS
from tests.support.watched import Watched, train
from tests.unit.test_flag_effects import files

__all__ = ["files"]  # fixtures

Watch = Callable[[str], Watched]


@pytest.fixture(scope="module")
def watch(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """The training that words ask for, done once."""
    return functools.cache(lambda words: train(words, files, tmp_path_factory.mktemp("storage")))


@pytest.mark.parametrize("words", EFFECTS)
def test_the_flag_has_its_effect(watch: Watch, words: str) -> None:
    look, given = EFFECTS[words]
    seen, expected = look(watch(f"{given} {words}".strip()), watch(given))
    assert seen == expected


@pytest.mark.parametrize("words", EFFECTS)
def test_without_the_flag_there_is_no_such_effect(watch: Watch, words: str) -> None:
    look, given = EFFECTS[words]
    seen, expected = look(watch(given), watch(given))
    assert seen != expected


@pytest.mark.smoke
def test_resume_goes_on_where_the_run_was_stopped(watch: Watch, files: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("", files, tmp_path, stop_after=5)
    resumed = train("--resume", files, tmp_path)
    assert resumed.folder == tmp_path / "runs" / "train" / "exp"
    assert resumed.all("start", "step") == [0, 3]
    assert resumed.all("end", "status") == ["stopped", "done"]
    assert resumed.shapes == watch("").shapes[3:]
    with pytest.raises(InputError, match="no unfinished run"):
        train("--resume", files, tmp_path)


def test_a_finished_name_is_started_over_only_with_exist_ok(files: Path, tmp_path: Path) -> None:
    train("--name mine", files, tmp_path)
    with pytest.raises(InputError, match="add --exist-ok"):
        train("--name mine", files, tmp_path)
    assert train("--name mine --exist-ok", files, tmp_path).all("start", "step") == [0]
    assert {path.name for path in (tmp_path / "runs" / "train").iterdir()} == {"mine", "mine.old1"}


@pytest.mark.parametrize(("words", "cuda_graphs", "colour_kernel"), [
    ("", "auto", False), ("--cuda-graphs on --colour-kernel", "on", True), ("--cuda-graphs off", "off", False)])
def test_settings_of_gpus_reach_the_worker(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str,
                                           cuda_graphs: str, colour_kernel: bool) -> None:
    """The worker decides by them on a GPU."""
    contexts = []

    def note(spec: TrainSpec, context: WorkerContext, *others: Any, **named: Any) -> Summary | None:
        contexts.append(context)
        return run_session(spec, context, *others, **named)

    monkeypatch.setattr(trainer, "run_session", note)
    train(words, files, tmp_path)
    [context] = contexts
    assert (context.cuda_graphs, context.colour_kernel) == (cuda_graphs, colour_kernel)
