"""A user's functions are called in order, once each, and never hurt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.core.events import Event
from ray_yolo.runs.event_log import EVENTS_FILE, read_events, read_lines
from ray_yolo.sinks.base import Sinks
from ray_yolo.sinks.callbacks import Callbacks, check_functions, load_callbacks
from tests.support import run_log

RECIPE = Recipe(epochs=3)

USER = """
import threading
calls, called = [], threading.Event()
def on_run_start(run_dir, recipe):
    calls.append(("start", run_dir, recipe))
def on_epoch_end(event):
    calls.append(("epoch", event["epoch"], event["metrics"]["mAP50"]))
    called.set()
def on_run_end(result):
    calls.append(("end", result))
class Some:
    def on_run_end(self, result):
        calls.append(("some", result))
fitted = Some()
number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's module; importable as `users_own.module` too."""
    (tmp_path / "users_own").mkdir()
    (tmp_path / "users_own" / "module.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "users_own" / "module.py"
    for name in ("users_own", "users_own.module", "callbacks_module"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    run_log.write(tmp_path / "run" / EVENTS_FILE, [run_log.run()])
    return tmp_path / "run"


def notify(run_dir: Path, *events: Event) -> None:
    run_log.write(run_dir / EVENTS_FILE, events)


class Called:
    """The functions that a path names, called from now on as the log of a run grows."""

    def __init__(self, path: Path, run_dir: Path, warn: Callable[[str], None] = print) -> None:
        self.callbacks = Callbacks(load_callbacks(str(path)), run_dir, RECIPE, warn)
        self._sinks = Sinks(run_dir / EVENTS_FILE, [self.callbacks], warn)

    def finish(self, result: Any = None, limit_seconds: float = 10.0) -> None:
        self.callbacks.result, self.callbacks.limit_seconds = result, limit_seconds
        self._sinks.finish()


def calls() -> list[tuple[Any, ...]]:
    module: Any = sys.modules["callbacks_module"]
    return list(module.calls)


def test_functions_are_called_in_order_with_what_happened(module: Path, run_dir: Path) -> None:
    warnings: list[str] = []
    callbacks = Called(module, run_dir, warnings.append)
    notify(run_dir, run_log.start(), *run_log.trained_epoch(0), *run_log.trained_epoch(1), run_log.end(20))
    callbacks.finish("the result")
    assert calls() == [("start", run_dir, RECIPE), ("epoch", 0, 0.125), ("epoch", 1, 1.125), ("end", "the result")]
    assert warnings == []


def test_an_epoch_is_reported_during_training(module: Path, run_dir: Path) -> None:
    callbacks = Called(module, run_dir)
    notify(run_dir, run_log.start(), run_log.epoch(0))
    loaded: Any = sys.modules["callbacks_module"]
    assert loaded.called.wait(10)
    callbacks.finish()


def test_each_epoch_is_reported_once_over_restarts_and_continuations(module: Path, run_dir: Path) -> None:
    notify(run_dir, run_log.start(), *run_log.trained_epoch(0))
    callbacks = Called(module, run_dir)  # the command was run again
    notify(run_dir, run_log.start(10), run_log.epoch(0), run_log.epoch(1))
    notify(run_dir, run_log.start(10), run_log.epoch(0), *run_log.trained_epoch(1), *run_log.trained_epoch(2))
    callbacks.finish()
    assert [call[1] for call in calls() if call[0] == "epoch"] == [1, 2]
    assert [call[0] for call in calls()].count("end") == 1


@pytest.mark.parametrize(("raised", "text"), [("KeyError('mine')", "KeyError: 'mine'"),
                                              ("SystemExit(7)", "SystemExit: 7")])
def test_an_exception_is_a_warning_and_the_others_are_called(
        module: Path, run_dir: Path, raised: str, text: str) -> None:
    module.write_text(f"{USER}\ndef on_epoch_end(event):\n    raise {raised}\n")
    warnings: list[str] = []
    callbacks = Called(module, run_dir, warnings.append)
    notify(run_dir, run_log.start(), run_log.epoch(0), run_log.epoch(1))
    callbacks.finish()
    line = len(module.read_text().splitlines())
    assert warnings == [f"callbacks: on_epoch_end: {text} (module.py, line {line}: raise {raised})"] * 2
    assert [call[0] for call in calls()] == ["start", "end"]


def test_the_line_of_an_exception_is_the_last_one_of_the_users_file(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\ndef read():\n    return json.loads('')\ndef on_epoch_end(event):\n    read()\n")
    warnings: list[str] = []
    callbacks = Callbacks(load_callbacks(str(file)), run_dir, RECIPE, warnings.append)
    callbacks.event(run_log.epoch(0))
    callbacks.update()
    assert warnings[0].endswith(" (mine.py, line 3: return json.loads(''))")


def test_a_function_that_takes_nothing_is_named(run_dir: Path) -> None:
    warnings: list[str] = []
    Callbacks({"on_run_start": lambda: None}, run_dir, RECIPE, warnings.append).update()
    assert warnings[0].startswith("callbacks: on_run_start: TypeError: ")
    assert warnings[0].endswith("takes 0 positional arguments but 2 were given")


def test_stop_names_the_first_function_that_returned_it(run_dir: Path) -> None:
    callbacks = Callbacks({"on_run_start": lambda *_: "go on", "on_epoch_end": lambda event: "stop"}, run_dir, RECIPE,
                          print)
    callbacks.update()
    assert callbacks.stopped_by == ""
    callbacks.event(run_log.epoch(0))
    callbacks.update()
    assert callbacks.stopped_by == "on_epoch_end"


def test_a_function_that_does_not_come_back_is_left_behind(module: Path, run_dir: Path) -> None:
    module.write_text("import threading\nwait = threading.Event()\ndef on_run_end(result):\n    wait.wait(60)\n")
    warnings: list[str] = []
    callbacks = Called(module, run_dir, warnings.append)
    callbacks.finish(limit_seconds=0.5)
    assert warnings == ["callbacks: not complete after 0.5 s"]
    sys.modules["callbacks_module"].wait.set()


def test_start_and_end_are_reported_once_for_any_timing_of_the_thread(module: Path, run_dir: Path) -> None:
    callbacks = Callbacks(load_callbacks(str(module)), run_dir, RECIPE, print)
    callbacks.result = 1
    callbacks.update()
    callbacks.update()
    callbacks.event(run_log.epoch(0))
    callbacks.update(last=True)
    assert calls() == [("start", run_dir, RECIPE), ("epoch", 0, 0.125), ("end", 1)]


def test_an_epoch_is_passed_as_in_the_log(run_dir: Path) -> None:
    seen: list[dict[str, Any]] = []
    callbacks = Callbacks({"on_epoch_end": seen.append}, run_dir, RECIPE, print)
    notify(run_dir, run_log.epoch(0))
    [*_, line] = read_lines(run_dir / EVENTS_FILE)
    callbacks.event(read_events(run_dir / EVENTS_FILE)[-1])
    callbacks.update()
    assert seen == [line]


def test_no_path_is_no_callbacks() -> None:
    assert load_callbacks("") == {}


@pytest.mark.parametrize(("name", "hooks"), [
    ("", {"on_run_start", "on_epoch_end", "on_run_end"}), (":fitted", {"on_run_end"}), (":Some", {"on_run_end"}),
])
def test_a_path_names_a_module_an_object_or_a_class(module: Path, name: str, hooks: set[str]) -> None:
    assert load_callbacks(f"{module}{name}").keys() == hooks
    assert load_callbacks(f"users_own.module{name}").keys() == hooks
    load_callbacks(f"users_own.module{name}")["on_run_end"](3)
    assert sys.modules["users_own.module"].calls == [("some" if name else "end", 3)]


@pytest.mark.parametrize("path", ["users_own.nothing", "users_own.module:no", "users_own.module:number"])
def test_a_path_without_functions_is_refused_at_once(module: Path, path: str) -> None:
    with pytest.raises(InputError):
        load_callbacks(path)


def test_a_function_of_another_name_is_refused(tmp_path: Path) -> None:
    """As of Ultralytics. It would never be called."""
    file = tmp_path / "mine.py"
    file.write_text("def on_run_start(*_): pass\ndef on_train_epoch_end(*_): pass\ndef _on_fit(*_): pass\n")
    with pytest.raises(InputError):
        load_callbacks(str(file))
    file.write_text("def on_run_start(*_): pass\ndef _on_train_epoch_end(*_): pass\non_time = 3\n")
    assert set(load_callbacks(str(file))) == {"on_run_start"}


def test_functions_are_taken_by_name() -> None:
    assert check_functions({"on_epoch_end": print}) == {"on_epoch_end": print}
