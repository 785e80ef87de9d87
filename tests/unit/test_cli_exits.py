"""How a command ends: exit status and what is said, for every way there is."""

from __future__ import annotations

import errno
import os
import signal
import sys

import pytest

from ray_yolo.cli import JOB_VARIABLE, run
from ray_yolo.config.placement import Placement
from ray_yolo.core.errors import CheckpointError, ConfigError, DatasetError, InputError, ResourcesError, TrainingError
from ray_yolo.core.signals import raise_from_now_on
from ray_yolo.runtime.cluster import worker_environment

pytestmark = pytest.mark.usefixtures("own_signal_handlers")


def raising(error: BaseException) -> int:
    def main() -> int:
        raise error

    return run(main)


def test_a_commands_own_status_is_kept() -> None:
    assert run(lambda: 0) == 0
    assert run(lambda: 4) == 4


@pytest.mark.parametrize(("error", "status"), [
    (InputError, 2), (ConfigError, 2), (DatasetError, 2), (CheckpointError, 2), (TrainingError, 3),
    (ResourcesError, 4),
])
def test_errors_raised_on_purpose_are_one_line_and_their_status(
        capsys: pytest.CaptureFixture[str], error: type[Exception], status: int) -> None:
    assert raising(error("f.yaml:3: epochs: got 'x'")) == status
    assert capsys.readouterr() == ("", f"{error.__name__}: f.yaml:3: epochs: got 'x'\n")


@pytest.mark.parametrize(("job", "noted"), [
    ("", False), ('{"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}', False), ('{"metadata": {}}', True),
    ('{"runtime_env": {"env_vars": {}}}', True)])
def test_bad_input_of_a_job_without_a_working_directory_names_its_folder(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str, noted: bool) -> None:
    monkeypatch.setenv(JOB_VARIABLE, job)
    assert raising(DatasetError("mine.yaml: no such file")) == 2
    assert (f"it runs in {os.getcwd()} on " in capsys.readouterr().err) is noted
    assert raising(TrainingError("diverged")) == 3
    assert capsys.readouterr().err == "TrainingError: diverged\n"


def test_a_defect_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ZeroDivisionError("ours")) == 3
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nZeroDivisionError: ours\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_read_only_disk_is_one_line(capsys: pytest.CaptureFixture[str], number: int) -> None:
    assert raising(OSError(number, os.strerror(number), "/runs/exp/run.json")) == 3
    assert capsys.readouterr().err == (f"/runs/exp/run.json: {os.strerror(number)}; free or repair the storage and "
                                       "rerun the same command\n")
    assert raising(OSError(number, os.strerror(number))) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_passwords_in_messages_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    raising(InputError("http://me:canary@host is not there"))
    assert capsys.readouterr().err == "InputError: http://***@host is not there\n"


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    raising(InputError("one\x1b[2J\ntwo\r"))
    assert capsys.readouterr().err == "InputError: one\\x1b[2J\ntwo\\r\n"


def test_an_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "")


def test_sigterm_is_143_after_the_finally_blocks() -> None:
    seen = []

    def main() -> int:
        raise_from_now_on()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            seen.append("closed")
        return 0

    assert run(main) == 143
    assert seen == ["closed"]


@pytest.mark.parametrize(("variables", "status"), [
    ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, 2), ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}, 7),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, 2), ({"WORLD_SIZE": "2"}, 7)])
def test_one_of_several_processes_of_a_launcher_is_refused(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], status: int
        ) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(lambda: 7) == status
    assert ("run the command once, without " in capsys.readouterr().err) is (status == 2)


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (15, 143)])
def test_exits_of_argparse_and_of_rays_sigterm_handler_are_translated(code: int | None, status: int) -> None:
    assert raising(SystemExit(code)) == status


@pytest.mark.parametrize("code", ["a reason", ["a", "reason"], 7])
def test_any_other_exit_is_left_as_it_is(code: object) -> None:
    with pytest.raises(SystemExit) as stop:
        raising(SystemExit(code))
    assert stop.value.code is code


@pytest.mark.parametrize(("error", "status"), [
    (InputError("f.yaml:3: epochs: got 'x'"), 2),
    (OSError(errno.ENOSPC, "No space left on device"), 3),
    (ZeroDivisionError("ours"), 3),
])
def test_an_error_that_has_no_reader_keeps_its_status(
        monkeypatch: pytest.MonkeyPatch, error: Exception, status: int) -> None:
    """As in `2>&1 | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, open(writer, "w", buffering=1) as without_reader:
        patch.setattr(sys, "stderr", without_reader)
        assert raising(error) == status
        patch.undo()
        with pytest.raises(BrokenPipeError):
            without_reader.close()


def test_a_broken_pipe_that_is_not_our_output_is_a_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(BrokenPipeError("a socket")) == 3
    assert "BrokenPipeError: a socket" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "seen"), [(None, "1000"), ("5", "5")])
def test_threads_that_wait_for_one_another_soon_sleep_unless_the_user_has_said_how_long(
        own: str | None, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", own or "")
    if own is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    values: list[str] = []
    assert run(lambda: values.append(os.environ["GOMP_SPINCOUNT"]) or 0) == 0
    assert values == [seen]
    assert worker_environment(Placement())["GOMP_SPINCOUNT"] == seen
