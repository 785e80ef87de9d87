import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ray_yolo
from ray_yolo.core.events import WarningEvent
from ray_yolo.runs.event_log import EVENTS_FILE, read_events
from ray_yolo.sinks.console import Console
from tests.support import run_log
from tests.support.terminal import Terminal


@pytest.fixture(autouse=True)
def _columns(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TTY_INTERACTIVE", raising=False)


BEGIN = [run_log.run(), run_log.start()]


def show(console, *events):
    for event in run_log.numbered(events):
        console.event(event)
    console.update()


def test_a_file_gets_whole_lines_without_carriage_returns(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path, stream)
    show(console, *BEGIN)
    for number in range(1, 11):
        show(console, run_log.step(number))
    show(console, run_log.epoch(0))
    assert len(stream.getvalue().splitlines()) == 5  # with the header of the epochs
    assert stream.getvalue().endswith("\n")
    console.finish()
    assert re.search(r"[\r\x1b]", stream.getvalue()) is None
    assert stream.getvalue().splitlines()[5].startswith("interrupted after 0 epochs")


class CellOutput(io.StringIO):
    """The stream of a notebook's cell."""


CellOutput.__module__ = "ipykernel.iostream"


class Displayed:
    """What IPython has displayed: the texts of each output, the newest last."""

    def __init__(self):
        self.outputs = []

    def display(self, data, *, raw, display_id):
        self.outputs.append([data["text/plain"]])
        return SimpleNamespace(update=lambda data, raw: self.outputs[-1].append(data["text/plain"]))


def test_a_notebook_has_rows_of_epochs_and_one_line_that_is_replaced(tmp_path, monkeypatch):
    """rich would add an output to the cell twice a second, most of them empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    displayed = Displayed()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=displayed.display))
    stream = CellOutput()
    console = Console(tmp_path, stream)
    show(console, *BEGIN)
    for number in range(1, 11):
        show(console, run_log.step(number))
    show(console, run_log.epoch(0))
    assert len(stream.getvalue().splitlines()) == 5  # three about the start, the header, the epoch
    console.finish()
    [texts] = displayed.outputs
    assert re.findall(r"\d+ %", "".join(texts))[:3] == ["10 %", "20 %", "30 %"]
    assert texts[-1] == ""


def test_a_long_epoch_is_reported_every_half_minute(tmp_path):
    stream, now = io.StringIO(), [0.0]
    console = Console(tmp_path, stream, clock=lambda: now[0])
    show(console, *BEGIN)
    for number in range(1, 10):
        now[0] += 10.0
        show(console, run_log.step(number))
    progress = [line for line in stream.getvalue().splitlines() if "left" in line]
    assert [re.search(r"\d+ %", line)[0] for line in progress] == ["30 %", "60 %", "90 %"]


def test_a_terminal_shows_one_live_line_that_is_redrawn(tmp_path):
    terminal = Terminal()
    console = Console(tmp_path, terminal)
    show(console, *BEGIN)
    for number in (1, 2):
        show(console, run_log.step(number))
    assert "20%" in terminal.screen[-1]
    assert not any("10%" in line for line in terminal.screen)
    show(console, WarningEvent(message="disk slow"))
    *above, live = terminal.screen
    assert above[-1] == "WARNING: disk slow"
    assert "20%" in live
    console.finish()
    assert terminal.screen[: len(above)] == above
    assert terminal.screen[len(above)].startswith("interrupted after 0 epochs")


def test_a_live_line_never_wraps(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    console = Console(tmp_path, terminal)
    show(console, *BEGIN)
    show(console, run_log.step(1))
    assert len(terminal.screen[-1]) == 59


def test_a_display_that_ends_gives_the_cursor_back(tmp_path):
    terminal = Terminal()
    run_log.write(tmp_path / EVENTS_FILE, BEGIN)
    console = Console(tmp_path, terminal)
    for event in run_log.numbered([run_log.start(), run_log.step(1)]):
        console.event(event)
    console.update()
    assert terminal.getvalue().rpartition("\x1b[?25")[2].startswith("l")
    console.finish()
    assert terminal.getvalue().rpartition("\x1b[?25")[2].startswith("h")


def test_a_dumb_terminal_gets_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    console = Console(tmp_path, terminal)
    show(console, *BEGIN)
    show(console, run_log.step(1))
    console.finish()
    assert re.search(r"[\r\x1b]", terminal.getvalue()) is None


def test_only_rich_writes_escape_codes():
    package = Path(ray_yolo.__file__).parent
    assert [file for file in package.rglob("*.py") if re.search(r"\\(x1b|033)", file.read_text("utf-8"))] == []


def test_letters_that_the_console_does_not_have_do_no_harm(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    show(Console(tmp_path, stream), run_log.run(name="Möwe"))
    assert raw.getvalue().startswith(b"M?we: ")


def test_of_earlier_starts_only_the_run_is_printed(tmp_path):
    terminal = Terminal()
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), run_log.epoch(0), run_log.checkpoint(10)])
    console = Console(tmp_path, terminal)
    run_log.write(tmp_path / EVENTS_FILE, [run_log.start(10), run_log.epoch(1)])
    for event in read_events(tmp_path / EVENTS_FILE):
        console.event(event)
    console.update()
    console.finish()
    assert terminal.screen[0].startswith("exp: yolov5s")
    assert terminal.screen[1].startswith("batch 8, microbatch 4, accumulation 8")
    assert terminal.screen[2] == "continuing with 2 workers from step 10, epoch 2"
    row, _ = (line.split() for line in terminal.screen if line.lstrip().startswith("all "))  # one more at the end
    assert row[1] == "16"  # validation images, known from the past only
    assert not any("1/3" in line for line in terminal.screen)


def test_at_the_end_the_outcome_and_the_notes_are_printed(tmp_path):
    stream, notes = io.StringIO(), []
    run_log.write(tmp_path / EVENTS_FILE, [run_log.run(), run_log.start(), *run_log.trained_epoch(0), run_log.end(10)])
    console = Console(tmp_path, stream, lambda: notes)
    notes.append("MLflow does not have everything yet.")
    console.finish()
    lines = stream.getvalue().splitlines()
    assert "done: 1 epoch in 0:01:00" in lines
    assert lines[-1] == "MLflow does not have everything yet."


def test_a_reader_that_has_gone_away_is_an_error_and_not_the_end_of_the_process(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        show(Console(tmp_path, Gone()), *BEGIN)


def test_text_that_the_stream_has_refused_is_printed_later(tmp_path):
    class Full(io.StringIO):
        is_full = True

        def write(self, text):
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Full()
    console = Console(tmp_path, stream)
    with pytest.raises(OSError, match="No space"):
        show(console, *BEGIN)
    stream.is_full = False
    console.update()
    assert stream.getvalue().startswith("exp: yolov5s")
