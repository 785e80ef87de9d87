import io
import sys
from dataclasses import replace

import pytest

from ray_yolo.tune.console import SweepDisplay, TrialStatus, ended_line, seconds_left, summary_line, table_rows
from ray_yolo.tune.trials import new_trial
from tests.support.terminal import Terminal


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TTY_INTERACTIVE", raising=False)


def finished(number, fitness=0.5, epochs=3):
    return replace(new_trial(number, {}), state="finished", fitness=fitness, epochs=epochs)


def failed(number, reason="out of memory"):
    return replace(new_trial(number, {}), state="failed", reason=reason)


def test_rows_are_the_running_trials_and_then_the_ended_ones():
    running = [TrialStatus(2), TrialStatus(3, epoch=3, fitness=(0.1, 0.43125, 0.25))]
    ended = [TrialStatus(1, "failed"), TrialStatus(0, "finished", 14, (0.5,))]
    assert table_rows(running, ended, 14, 24) == [
        ("2", "running", "-/14", "-", "-"), ("3", "running", "3/14", "0.2500", "0.4313"),
        ("1", "failed", "-/14", "-", "-"), ("0", "finished", "14/14", "0.5000", "0.5000")]


@pytest.mark.parametrize(("limit", "expected"), [
    (5, ["4", "5", "6", "3", "2"]), (4, ["4", "5", "6", "3"]), (3, ["4", "5", "6"]), (2, ["4", "..."]), (1, ["..."])])
def test_there_are_never_more_rows_than_fit(limit, expected):
    rows = table_rows([TrialStatus(number) for number in (4, 5, 6)], [TrialStatus(3), TrialStatus(2)], 14, limit)
    assert [row[0] for row in rows] == expected


def test_rows_that_do_not_fit_are_counted():
    assert table_rows([TrialStatus(number) for number in range(9)], [], 14, 3)[-1] == ("...", "7 more", "", "", "")


def test_the_time_left_is_the_mean_trial_for_each_that_waits_and_the_rest_of_those_that_run():
    # (4 x 60 + (60 - 20) + nothing of the one that takes longer than the mean) / 2
    assert seconds_left([50.0, 70.0], [20.0, 90.0], num_waiting=4, slots=2) == 140.0
    assert seconds_left([60.0], [], num_waiting=1, slots=8) == 60.0  # one trial cannot use eight places
    assert seconds_left([], [20.0], num_waiting=4, slots=1) is None
    assert seconds_left([60.0], [], num_waiting=0, slots=1) is None


def test_the_summary_counts_and_names_the_best():
    assert summary_line([], 300) == "0/300 trials ended"
    trials = [finished(0, 0.25), failed(1), finished(2, 0.43125), replace(new_trial(3, {}), state="running")]
    assert summary_line(trials, 300) == "3/300 trials ended, 1 failed; best 0.4313 (trial 2)"


def test_a_trial_that_has_ended_is_one_line():
    trials = [finished(0, 0.25), failed(1)]
    assert ended_line(trials[0], trials, 8) == (
        "2/8  trial 0 finished: fitness 0.25 after 3 epochs; best 0.25 (trial 0)")
    assert ended_line(trials[1], trials, 8) == "2/8  trial 1 failed: out of memory; best 0.25 (trial 0)"


def test_a_reason_becomes_one_short_line():
    trial = failed(0, "\x1b[36mray::fit\x1b[39m died\n  Traceback\n" + "x" * 500)
    assert ended_line(trial, [trial], 8) == "1/8  trial 0 failed: ray::fit died Traceback " + "x" * 133 + "..."


def test_a_file_gets_one_whole_line_for_each_trial_that_ends(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of nothing
    stream, now = io.StringIO(), [0.0]
    display = SweepDisplay(stream, 3, 3, lambda: now[0])
    display.say("begin")
    for number, trial in enumerate([finished(0), failed(1), finished(2, 0.75)]):
        display.started(number)
        display.epoch(number, 1, 0.5)
        now[0] += 90.0
        display.ended(trial, [finished(0), failed(1), finished(2, 0.75)][:number + 1])
    display.close()
    display.say("end " * 100)
    assert stream.getvalue().splitlines() == [
        "begin",
        "1/3  trial 0 finished: fitness 0.5 after 3 epochs; best 0.5 (trial 0); about 0:03:00 left",
        "2/3  trial 1 failed: out of memory; best 0.5 (trial 0); about 0:01:30 left",
        "3/3  trial 2 finished: fitness 0.75 after 3 epochs; best 0.75 (trial 2)",
        "end " * 100]


def test_a_terminal_shows_one_table_that_is_redrawn():
    terminal, now = Terminal(), [0.0]
    display = SweepDisplay(terminal, 8, 14, lambda: now[0])
    assert terminal.screen[-1] == "0/8 trials ended"
    display.started(0)
    display.started(1)
    display.epoch(0, 1, 0.5)
    display.epoch(0, 2, 0.25)
    now[0] += 60.0
    display.ended(finished(0, 0.375), [finished(0, 0.375), replace(new_trial(1, {}), state="running")])
    assert [line.split() for line in terminal.screen[:3]] == [
        ["trial", "state", "epoch", "fitness", "best"], ["1", "running", "-/14", "-", "-"],
        ["0", "finished", "3/14", "0.3750", "0.5000"]]
    # Six wait, and the one that runs has run as long as the other took: 6 x 60 / 2
    assert terminal.screen[3:] == ["", "1/8 trials ended; best 0.3750 (trial 0); about 0:03:00 left"]
    display.close()
    display.say("after")
    assert terminal.screen[4:] == ["1/8 trials ended; best 0.3750 (trial 0); about 0:03:00 left", "after", ""]


def test_what_a_restart_finds_counts():
    terminal = Terminal()
    SweepDisplay(terminal, 8, 14, trials=[finished(0), failed(1)]).close()
    assert "2/8 trials ended, 1 failed; best 0.5000 (trial 0)" in terminal.screen


def test_other_prints_and_reasons_appear_above_the_table(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = SweepDisplay(terminal, 8, 14)
    display.started(0)
    print("from elsewhere: [/bold] :smile:", end="", flush=True)
    display.say("path " * 30)
    display.ended(failed(0), [failed(0)])
    display.close()
    print("after")
    assert terminal.screen[0] == "from elsewhere: [/bold] :smile:"
    assert terminal.screen[1] == "path " * 30
    assert terminal.screen[2].startswith("1/8  trial 0 failed: out of memory")
    assert [line.split() for line in terminal.screen[3:5]] == [
        ["trial", "state", "epoch", "fitness", "best"], ["0", "failed", "-/14", "-", "-"]]
    assert terminal.screen[-3:] == ["1/8 trials ended, 1 failed; about 0:00:00 left", "after", ""]


def test_what_goes_into_a_file_stays_there(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    display = SweepDisplay(terminal, 8, 14)
    print("from elsewhere")
    display.close()
    assert file.getvalue() == "from elsewhere\n"


@pytest.mark.parametrize(("columns", "lines"), [(100, 24), (30, 8), (30, 5)])
def test_the_table_fits_the_terminal(monkeypatch, columns, lines):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    terminal, now = Terminal(), [0.0]
    display = SweepDisplay(terminal, 300, 14, lambda: now[0])
    for number in range(40):
        display.started(number)
    now[0] += 5e5
    display.ended(finished(0), [finished(0)])
    assert len(terminal.screen) < lines
    assert max(map(len, terminal.screen)) <= columns
    assert terminal.screen[-1].startswith("1/300 trials ended")
    display.close()


def test_a_plain_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    display = SweepDisplay(terminal, 1, 3)
    display.started(0)
    display.ended(finished(0), [finished(0)])
    display.close()
    assert terminal.getvalue() == "1/1  trial 0 finished: fitness 0.5 after 3 epochs; best 0.5 (trial 0)\n"


@pytest.mark.parametrize("kind", [io.TextIOWrapper, type("TTY", (io.TextIOWrapper,), {"isatty": lambda self: True})])
def test_letters_that_the_console_does_not_have_do_no_harm(kind):
    raw = io.BytesIO()
    display = SweepDisplay(kind(raw, encoding="ascii", write_through=True), 8, 14)
    display.started(0)
    display.ended(replace(failed(0), reason="Möwe…"), [failed(0)])
    display.say("Möwe")
    display.close()
    assert b"failed: M?we?" in raw.getvalue()
    assert b"\nM?we" in raw.getvalue() or b"KM?we" in raw.getvalue()
