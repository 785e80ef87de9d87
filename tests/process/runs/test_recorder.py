import time

import pytest

from ray_yolo.core.events import StepEvent, WarningEvent
from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.recorder import open_log, start_recorder
from tests.support import run_log
from tests.unit.runs.test_recorder import path

__all__ = ["path"]  # fixtures


@pytest.mark.ray
class TestWithRay:
    @pytest.fixture(autouse=True)
    def _ray(self, ray_session):
        pass

    def test_workers_and_driver_write_one_log(self, path):
        import ray

        recorder = open_log(path)

        @ray.remote(num_cpus=0)
        def work(worker):
            emit = recorder.emit
            for number in range(50):
                emit(run_log.step(number, batch=worker))
            recorder.flush()

        recorder.emit(run_log.run())
        ray.get([work.remote(worker) for worker in range(2)])
        recorder.close()
        events = read_events(path)
        assert [event.seq for event in events] == list(range(101))
        for worker in range(2):
            assert [event.step for event in run_log.only(StepEvent, events) if event.batch == worker] == list(range(50))

    def test_it_runs_on_the_drivers_node_and_takes_no_cpu(self, path):
        import ray

        free = ray.available_resources().get("CPU")
        recorder = open_log(path)
        assert ray.available_resources().get("CPU") == free
        recorder.close()

    def test_sending_to_a_dead_recorder_neither_raises_nor_waits(self, path):
        recorder = open_log(path)
        emit = recorder.emit
        recorder.close()
        began = time.monotonic()
        for number in range(100):
            emit(run_log.step(number))
        assert time.monotonic() - began < 1.0

    def test_warnings_that_a_full_disk_refuses_are_printed(self, capsys):
        recorder = open_log("/dev/full")  # every write there fails with ENOSPC
        recorder.emit(WarningEvent(message="the checkpoint at step 4 could not be written"))
        recorder.close()
        errors = capsys.readouterr().err
        assert "WARNING: the checkpoint at step 4 could not be written\n" in errors
        assert "WARNING: /dev/full cannot be written (No space left on device)" in errors

    def test_a_recorder_whose_process_dies_goes_on_with_the_same_log(self, path):
        import os
        import signal

        import ray

        recorder = open_log(path)
        emit = recorder.emit
        emit(run_log.step(0))
        process = ray.get(recorder.actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(process, signal.SIGKILL)
        emit(run_log.step(1))
        recorder.wait(60)
        recorder.close()
        assert [(event.seq, event.step) for event in read_events(path)] == [(0, 0), (1, 1)]

    def test_rows_on_their_way_to_a_recorder_that_ends_are_appended_by_their_sender(self, path):
        """With Ray's head or the driver, the recorder ends before the worker that saves the steps last."""
        import os
        import signal

        import ray

        recorder = open_log(path)
        for number in (1, 2, 3, 2):  # step 2 is done again
            recorder.emit(run_log.step(number))
        recorder.flush()
        process = ray.get(recorder.actor.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(process, signal.SIGSTOP)  # what is sent from now on does not arrive
        for number in (3, 4):
            recorder.emit(run_log.step(number, batch=9))
        recorder.emit(run_log.run())
        ray.kill(recorder.actor, no_restart=True)
        recorder.flush(30)
        recorder.flush(30)
        events = [event for event in read_events(path) if isinstance(event, StepEvent)]
        assert [(event.step, event.batch == 9) for event in events] == [
            (1, False), (2, False), (3, False), (2, False), (3, True), (4, True)]
        assert [event.seq for event in events] == list(range(6))

    def test_one_process_writes_one_log_after_another_and_nothing_into_a_closed_one(self, tmp_path):
        import ray

        actor = start_recorder()
        logs = [tmp_path / name / "events.jsonl" for name in ("a", "b", "a")]
        for number, log in enumerate(logs):
            recorder = open_log(str(log), actor)
            recorder.emit(run_log.step(number))
            recorder.close()
            recorder.emit(run_log.step(99))  # of a worker that is late
        recorder.flush()
        assert [[event.step for event in read_events(log)] for log in logs[:2]] == [[0, 2], [1]]
        ray.kill(actor)

    def test_a_value_that_cannot_be_sent_is_not_the_senders_trouble(self, path, caplog):
        import threading

        recorder = open_log(path)
        emit = recorder.emit
        emit(threading.Lock())
        emit(run_log.step(1))
        recorder.close()
        assert [event.step for event in read_events(path)] == [1]
        assert "could not be sent" in caplog.text

    def test_a_log_that_cannot_be_opened_is_refused_before_training(self, tmp_path):
        import ray

        (tmp_path / "file").write_text("")
        with pytest.raises(ray.exceptions.RayError):
            open_log(str(tmp_path / "file" / "events.jsonl"))
