import io
import sys
from dataclasses import replace

import pytest

from ray_yolo.config.recipe import Recipe
from ray_yolo.tune.claim import Claim
from ray_yolo.tune.console import SweepDisplay, closing_message, result_line, summary_line, table_rows
from ray_yolo.tune.ledger_events import ClaimedEvent
from ray_yolo.tune.trials import Trial
from tests.support.terminal import Terminal


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TTY_INTERACTIVE", raising=False)


def measured(number, fitness=0.5, epochs=3, state="finished", **genes):
    trial = Trial(number, {"lr0": 0.01, "optimizer.name": "SGD", **genes})
    return replace(trial, state=state, fitness=fitness, epochs=epochs)


def failed(number, reason="out of memory"):
    return replace(Trial(number, {"lr0": 0.01, "optimizer.name": "SGD"}), state="failed", reason=reason)


def test_the_table_has_the_five_best_with_the_genes_in_which_they_differ():
    trials = [measured(0, 0.25), failed(1), measured(2, 0.75, 1, "paused", lr0=0.012345), measured(3, 0.5, lr0=0.02),
              *(measured(number, 0.3) for number in range(4, 8)), Trial(8, {})]
    assert table_rows(trials) == [
        ("trial", "epochs", "fitness", "lr0"), ("3", "3", "0.5000", "0.02"), ("4", "3", "0.3000", "0.01"),
        ("5", "3", "0.3000", "0.01"), ("6", "3", "0.3000", "0.01"), ("7", "3", "0.3000", "0.01")]
    assert table_rows(trials[1:3]) == [("trial", "epochs", "fitness"), ("2", "1", "0.7500")]
    assert table_rows([]) == [("trial", "epochs", "fitness")]


def test_the_summary_counts_and_names_the_best():
    assert summary_line([]) == "0 trials, 0 trained to the end"
    trials = [measured(0, 0.25), failed(1), measured(2, 0.43125), measured(3, 0.9, 1, "paused")]
    assert summary_line(trials) == "4 trials, 2 trained to the end, 1 failed; best 0.4313 (trial 2)"


def test_a_result_is_one_line():
    assert result_line(measured(0, 0.25)) == "trial 0: fitness 0.25 after 3 epochs"
    assert result_line(replace(measured(0, 0.25), seeds={4: 0.5})) == (
        "trial 0: fitness 0.25 after 3 epochs, 0.5 on seed 4")
    trial = failed(0, "\x1b[36mray::fit\x1b[39m died\n  Traceback\n" + "x" * 500)
    assert result_line(trial) == "trial 0 failed: ray::fit died Traceback " + "x" * 136 + "..."


def test_a_file_gets_one_whole_line_for_each_result(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of nothing
    stream, left = io.StringIO(), [None]
    display = SweepDisplay(stream, [measured(0)], lambda: left[0])
    display.say("begin")
    display.started("trial1", 3)
    display.update([measured(0), failed(1)])
    display.update([measured(0), failed(1), Trial(2, {})])
    left[0] = 60.0
    display.update([replace(measured(0), seeds={1: 0.75}), failed(1), Trial(2, {})])
    display.close()
    display.say("end " * 100)
    best = "trials, 1 trained to the end, 1 failed; best 0.5000 (trial 0)"
    assert stream.getvalue().splitlines() == [
        "begin", f"trial 1 failed: out of memory; 2 {best}",
        f"trial 0: fitness 0.5 after 3 epochs, 0.75 on seed 1; 3 {best}; about 0:01:00 left", "end " * 100]


def test_a_terminal_shows_one_table_that_is_redrawn():
    terminal = Terminal()
    display = SweepDisplay(terminal, left=lambda: 180.0)
    assert terminal.screen[-1] == "0 trials, 0 trained to the end; about 0:03:00 left"
    display.started("trial0", 3)
    display.started("trial1-seed4", 9)
    display.ended("trial0")
    display.update([measured(0, 0.375)])
    assert [line.split() for line in terminal.screen[:2]] == [["trial", "epochs", "fitness"], ["0", "3", "0.3750"]]
    assert terminal.screen[2:] == [
        "", "training: trial1-seed4 to epoch 9",
        "1 trial, 1 trained to the end; best 0.3750 (trial 0); about 0:03:00 left"]
    display.close()
    display.say("after")
    assert terminal.screen[5:] == ["after", ""]


def test_other_prints_and_reasons_appear_above_the_table(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = SweepDisplay(terminal)
    print("from elsewhere: [/bold] :smile:", end="", flush=True)
    display.say("path " * 30)
    display.update([failed(0)])
    display.close()
    print("after")
    assert terminal.screen[0] == "from elsewhere: [/bold] :smile:"
    assert terminal.screen[1] == "path " * 30
    assert terminal.screen[2].startswith("trial 0 failed: out of memory; 1 trial, 0 trained to the end, 1 failed")
    assert terminal.screen[3].split() == ["trial", "epochs", "fitness"]
    assert terminal.screen[-3:] == ["1 trial, 0 trained to the end, 1 failed", "after", ""]


def test_what_goes_into_a_file_stays_there(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    display = SweepDisplay(terminal)
    print("from elsewhere")
    display.close()
    assert file.getvalue() == "from elsewhere\n"


@pytest.mark.parametrize("columns", [100, 30])
def test_the_table_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    display = SweepDisplay(terminal, left=lambda: 5e5)
    for number in range(40):
        display.started(f"trial{number}", 9)
    display.update([measured(number, lr0=number / 100, **{f"gene{each}": number for each in range(30)})
                    for number in range(8)])
    assert len(terminal.screen) == 9
    assert max(map(len, terminal.screen)) <= columns
    display.close()


def test_a_plain_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    display = SweepDisplay(terminal)
    display.started("trial0", 3)
    display.update([measured(0)])
    display.close()
    assert terminal.getvalue() == (
        "trial 0: fitness 0.5 after 3 epochs; 1 trial, 1 trained to the end; best 0.5000 (trial 0)\n")


def test_the_last_line_is_the_claim(tmp_path):
    claim = ClaimedEvent(winner=4, claim=Claim(better=True, gain=0.0625, margin=0.03, runs=3, detectable=0.03))
    lines = closing_message(tmp_path, Recipe(), measured(4), claim).splitlines()
    assert lines[-1] == "claim: trial 4 is better than the default by 0.0625 +- 0.03 over 3 fresh seeds"
    assert len(closing_message(tmp_path, Recipe(), measured(4)).splitlines()) == 3


@pytest.mark.parametrize(("winner", "claim", "text"), [
    (0, Claim(better=False, gain=-0.01, margin=0.1, runs=2, detectable=0.1),
     "not better than the default; 2 fresh seeds could have shown 0.1; the default (trial 0) is kept"),
    (4, Claim(better=False, gain=0.02, margin=0.05, runs=2, detectable=0.1),
     "trial 4 is not better than the default; 2 fresh seeds could have shown 0.1; it is kept for its "
     "expected gain of 0.02"),
    (4, Claim(better=False),
     "trial 4 is not compared with the default: no training of both finished in time with a fitness above 0; it is "
     "kept because the default failed")])
def test_without_significance_it_says_which_one_is_kept_and_why(winner, claim, text):
    assert str(ClaimedEvent(winner=winner, claim=claim)) == text


@pytest.mark.parametrize("kind", [io.TextIOWrapper, type("TTY", (io.TextIOWrapper,), {"isatty": lambda self: True})])
def test_letters_that_the_console_does_not_have_do_no_harm(kind):
    raw = io.BytesIO()
    display = SweepDisplay(kind(raw, encoding="ascii", write_through=True))
    display.update([replace(failed(0), reason="Möwe…")])
    display.say("Möwe")
    display.close()
    assert b"failed: M?we?" in raw.getvalue()
    assert b"\nM?we" in raw.getvalue() or b"KM?we" in raw.getvalue()
