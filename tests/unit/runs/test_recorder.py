import time

import pytest

from ray_yolo.runs.event_log import read_events
from ray_yolo.runs.recorder import LocalRecorder
from tests.support import run_log


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run" / "events.jsonl")


class TestWithoutRay:
    def test_what_is_emitted_is_in_the_log_when_the_recorder_is_closed(self, path):
        recorder = LocalRecorder(path)
        emit = recorder.emit
        for number in range(100):
            emit(run_log.step(number))
        recorder.close()
        assert [event.step for event in read_events(path)] == list(range(100))

    def test_what_was_emitted_is_in_the_log_after_a_flush_and_more_can_follow(self, path):
        recorder = LocalRecorder(path)
        for number in range(100):
            recorder.emit(run_log.step(number))
        recorder.flush()
        assert len(read_events(path)) == 100
        recorder.emit(run_log.end(1))
        recorder.close()
        assert len(read_events(path)) == 101

    def test_emitting_gives_no_answer_and_waits_for_no_disk(self, path, monkeypatch):
        import os

        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: time.sleep(0.2) or write(file, data))
        recorder = LocalRecorder(path)
        began = time.monotonic()
        assert recorder.emit(run_log.step(1)) is None
        assert time.monotonic() - began < 0.1
        recorder.close()
        assert len(read_events(path)) == 1

    def test_a_hung_disk_delays_no_sender_beyond_the_limit(self, path, monkeypatch):
        import os

        monkeypatch.setattr(os, "write", lambda *_: time.sleep(1.0) or len(_[1]))
        recorder = LocalRecorder(path)
        recorder.emit(run_log.step(1))
        began = time.monotonic()
        recorder.close(wait_seconds=0.1)
        assert time.monotonic() - began < 0.5
