"""The process that makes the records of a training, and the command that waits for it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ray_yolo.sinks import record_process
from ray_yolo.sinks.record_process import (
    JOB_SECONDS,
    PROMPT_SECONDS,
    ends_with_command,
    waiting_limit,
)

TINI, SYSTEMD = (1, "tini -- x", 0, 1), (1, "systemd", 0, 1)


class TestEnds:
    """A table of processes: (id, command line, parent, process group). The command is the first one."""

    @pytest.mark.parametrize(("ends", "table"), [
        (True, [(1, "python", 0, 1)]),  # docker run image python ...
        (True, [(7, "python", 0, 7)]),  # docker exec container python ...
        (True, [(7, "python", 1, 1), (1, "sh -c x", 0, 1)]),  # sh -c "cd x; python ..."
        (True, [(7, "python", 1, 7), TINI]),  # docker run --init
        (True, [(8, "python", 7, 7), (7, "sh -c x", 1, 7), TINI]),
        (True, [(8, "python", 7, 7), (7, "timeout 6h python", 1, 7), (1, "sh -c x", 0, 1)]),
        (True, [(8, "python", 7, 8), (7, "setsid -w python", 1, 1), (1, "bash run.sh", 0, 1)]),
        (True, [(7, "python", 1, 7), (1, "bash -eu run.sh", 0, 1)]),  # with set -m
        (True, [(7, "python", 1, 7), (1, "bash -eo pipefail -lc x", 0, 1)]),
        (True, [(7, "python", 1, 1), (1, "bash", 0, 1)]),  # docker run -i image bash < script
        (False, [(7, "python", 1, 7), (1, "bash", 0, 1)]),  # typed into docker run -it image bash
        (False, [(7, "python", 1, 7), (1, "bash --rcfile a -o vi -i", 0, 1)]),
        (False, [(9, "python", 7, 9), (7, "-bash", 1, 7), TINI]),
        (False, [(9, "python", 8, 9), (8, "timeout 6h python", 7, 9), (7, "zsh -l", 1, 7), TINI]),
        (False, [(9, "python", 7, 9), (7, "bash", 5, 7), (5, "sshd", 1, 5), SYSTEMD]),
        (True, [(9, "python", 7, 9), (7, "slurmstepd", 1, 7), SYSTEMD]),  # srun --pty python
        (True, [(9, "python", 8, 8), (8, "slurm_script", 7, 8), (7, "slurmstepd", 1, 7), SYSTEMD]),
        (False, [(9, "python", 8, 9), (8, "bash", 7, 8), (7, "slurmstepd", 1, 7), SYSTEMD]),
        (True, [(9, "python", 8, 9), (8, "sh -c x", 7, 8), (7, "cron", 1, 7), SYSTEMD]),
    ])
    def test_the_end_of_all_is_where_no_shell_is_at_a_prompt(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool,
            table: list[tuple[int, str, int, int]]) -> None:
        for pid, line, parent, group in table:
            words = line.split()
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "stat").write_text(f"{pid} ({words[0].lstrip('-')}) S {parent} {group} 0 0")
            (tmp_path / str(pid) / "cmdline").write_text("\0".join(words) + "\0")
        _, _, parent, group = table[0]
        monkeypatch.setattr(os, "getppid", lambda: parent)
        monkeypatch.setattr(os, "getpgid", lambda _: group)
        assert ends_with_command(tmp_path) == ends

    def test_an_interactive_python_goes_on_after_a_training(
            self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.ps1", "In : ", raising=False)
        assert not ends_with_command(tmp_path)

    def test_a_command_waits_longer_in_a_job_and_without_a_limit_where_all_ends_with_it(
            self, monkeypatch: pytest.MonkeyPatch) -> None:
        for ends, is_terminal, expected in ((False, True, PROMPT_SECONDS), (False, False, JOB_SECONDS),
                                            (True, True, math.inf), (True, False, math.inf)):
            monkeypatch.setattr(record_process, "ends_with_command", lambda ends=ends: ends)
            monkeypatch.setattr("sys.stdout.isatty", lambda shown=is_terminal: shown, raising=False)
            assert waiting_limit() == expected

    def test_in_a_notebook_a_training_waits_as_in_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next cell may open `results.png`."""
        monkeypatch.setattr(record_process, "ends_with_command", lambda: False)
        monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
        monkeypatch.setattr("sys.ps1", "In : ", raising=False)
        assert waiting_limit() == JOB_SECONDS
