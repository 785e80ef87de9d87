import itertools
import json
import math
import resource
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.core.events import RowEvent, StepEvent, WarningEvent
from ray_yolo.runs.event_log import (
    EventLog,
    best_row,
    check_log,
    durable,
    epoch_rows,
    follow,
    read_events,
    read_lines,
    surviving,
)
from tests.support import run_log


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


class TestWriting:
    def test_one_line_for_each_event_numbered_from_zero(self, path):
        log = EventLog(path)
        assert [log.append_line("step", step=1), log.append_line("epoch", epoch=0)] == [0, 1]
        first, second = lines_of(path)
        assert {**first, "time": 0, "crc": ""} == {"seq": 0, "time": 0, "type": "step", "step": 1, "crc": ""}
        assert second["seq"] == 1

    def test_numbers_go_on_after_reopening(self, path):
        for expected in range(3):
            log = EventLog(path)
            assert log.append(run_log.start()) == expected
            log.close()
        assert [event.seq for event in read_events(path)] == [0, 1, 2]

    def test_numbers_go_on_after_a_line_longer_than_the_first_look_at_the_end(self, path):
        log = EventLog(path)
        log.append(run_log.run(names=["x" * 50_000] * 5))
        log.close()
        assert EventLog(path).append(run_log.start()) == 1

    def test_a_line_is_written_by_one_call(self, path, monkeypatch):
        import os

        calls = []
        write = os.write
        log = EventLog(path)
        monkeypatch.setattr(os, "write", lambda file, data: calls.append(data) or write(file, data))
        log.append(run_log.run(names=["x" * 100_000]))
        assert len(calls) == 1
        assert calls[0].endswith(b"}\n")

    def test_several_threads_share_a_writer(self, path):
        log = EventLog(path)
        threads = [threading.Thread(target=lambda: [log.append(run_log.step(1)) for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [event.seq for event in read_events(path)] == list(range(800))


class TestValues:
    def test_what_is_not_finite_is_null(self, path):
        EventLog(path).append_line("step", loss=[math.nan, math.inf, 1.5], norm=-math.inf)
        (event,) = read_lines(path)
        assert event["loss"] == [None, None, 1.5]
        assert event["norm"] is None

    def test_arrays_and_tensors_become_lists_and_numbers(self, path):
        EventLog(path).append_line("step", a=np.float32(0.5), b=torch.tensor([1, 2]), c=np.array([np.nan]), d=(1, True),
                                   e=torch.tensor(0.25))
        (event,) = read_lines(path)
        assert [event[key] for key in "abcde"] == [0.5, [1, 2], [None], [1, True], 0.25]

    def test_anything_else_is_logged_as_text(self, path):
        EventLog(path).append_line("run", folder=path, names={1: "a"}, odd="\udc80 é\n")
        (event,) = read_lines(path)
        assert event["folder"] == str(path)
        assert event["names"] == {"1": "a"}
        assert event["odd"] == "\udc80 é\n"

    def test_secrets_do_not_reach_the_disk(self, path):
        EventLog(path).append(run_log.run(placement={"mlflow_uri": "https://ann:s3cr3t@host"},
                                          command="train --mlflow-uri=https://ann:s3cr3t@host"))
        assert "s3cr3t" not in path.read_text()


class TestTornLines:
    def test_a_log_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(self, tmp_path):
        whole = tmp_path / "whole.jsonl"
        run_log.write(whole, [run_log.start(), run_log.step(1), run_log.step(2)])
        content = whole.read_bytes()
        cut = tmp_path / "cut.jsonl"
        for length in range(len(content)):
            cut.write_bytes(content[:length])
            kept = content[:length].count(b"\n")
            assert len(read_events(cut)) == kept
            log = EventLog(cut)
            assert log.append(run_log.start()) == kept
            log.close()
            assert [event.seq for event in read_events(cut)] == list(range(kept + 1))

    def test_rubbish_is_no_event(self, path):
        rubbish = (b"\0" * 100, b"no json\n", b"[1]\n", b'{"no": "seq"}\n', b"\xff\xfe\n", b"\n")
        for number, line in enumerate(rubbish):
            file = path.with_name(f"{number}.jsonl")
            run_log.write(file, [run_log.start()])
            file.write_bytes(file.read_bytes() + line)
            run_log.write(file, [run_log.step(1)])
            assert [event.seq for event in read_events(file)] == [0, 1], line

    def test_a_log_not_begun_is_empty(self, path):
        assert read_events(path) == []


class TestFailingDisk:
    def test_what_cannot_be_logged_goes_to_stderr(self, capsys):
        log = EventLog("/dev/full")  # every write there fails with ENOSPC
        assert [log.append(run_log.step(1)) for _ in range(2)] == [0, 2]  # after the first one, the warning of the disk
        refused = "the checkpoint at step 4 could not be written"
        log.append(WarningEvent(message=refused))
        of_disk, of_save = capsys.readouterr().err.splitlines()
        assert of_disk.startswith("WARNING: /dev/full cannot be written (No space left on device): events wait")
        assert of_save == f"WARNING: {refused}"
        assert log.close() == [of_disk.removeprefix("WARNING: "), refused]

    def test_what_a_full_disk_refused_is_written_when_there_is_room(self, path):
        log = EventLog(path)
        log.append(run_log.start())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))  # room for a part of a line
        try:
            log.append(run_log.step(1))
            log.append(run_log.step(2))
            assert [event.type for event in read_events(path)] == ["start"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert log.append(run_log.step(3)) == 4
        lines = lines_of(path)
        assert [line["seq"] for line in lines] == [0, 1, 2, 3, 4]
        assert [line["type"] for line in lines] == ["start", "step", "warning", "step", "step"]
        assert check_log(path) is None

    def test_a_log_that_cannot_be_opened_at_all_is_refused_before_training(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            EventLog(tmp_path / "file" / "events.jsonl")


class TestChecksums:
    def test_each_flipped_bit_is_found(self, path):
        run_log.write(path, [run_log.start(), run_log.step(1)])
        run_log.write(path, [run_log.step(2)])  # by a second process
        whole = path.read_bytes()
        assert check_log(path) is None
        for at, bit in itertools.product(range(len(whole) - 1), (0, 3, 6)):  # without the last line's end
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert check_log(path), (at, bit)

    @pytest.mark.parametrize(("kept", "found"), [((0, 2), 2), ((1, 2), 1), ((0, 2, 1), 2), ((0, 0, 1, 2), 2)])
    def test_lines_that_are_missing_or_moved_are_found(self, path, kept, found):
        run_log.write(path, [run_log.step(number) for number in range(3)])
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[number] for number in kept))
        assert check_log(path) == (f"line {found} does not match its checksum: it was changed, or lines before it are "
                                   "missing")

    def test_logs_of_earlier_versions_are_continued(self, path):
        path.parent.mkdir()
        path.write_text('{"seq":0,"time":1.0,"type":"step","step":1}\n')
        assert check_log(path) is None
        run_log.write(path, [run_log.step(2), run_log.step(3)])
        assert check_log(path) is None
        assert [line["seq"] for line in read_lines(path)] == [0, 1, 2]
        first, *rest = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*rest, first]))
        assert check_log(path) == "line 3 has no checksum"

    @pytest.mark.parametrize("inserted", [b"\n", b'{"seq":0,"time":1.0,"type":"step","step":1}\n'])
    def test_a_line_before_the_first_one_is_found(self, path, inserted):
        run_log.write(path, [run_log.step(1), run_log.step(2)])
        path.write_bytes(inserted + path.read_bytes())
        assert check_log(path) == "line 1 has no checksum"

    def test_a_torn_line_is_no_damage(self, path):
        run_log.write(path, [run_log.step(1), run_log.step(2)])
        path.write_bytes(path.read_bytes()[:-5])
        assert check_log(path) is None
        run_log.write(path, [run_log.step(3)])
        assert check_log(path) is None


class TestFollowing:
    def test_each_event_comes_once(self, path):
        log = follow(path)
        assert next(log) == []
        run_log.write(path, [run_log.start(), run_log.step(1)])
        assert [event.seq for event in next(log)] == [0, 1]
        assert next(log) == []
        run_log.write(path, [run_log.step(2)])
        assert [event.seq for event in next(log)] == [2]

    def test_a_line_comes_when_it_is_whole(self, path):
        run_log.write(path, [run_log.start()])
        line = path.read_bytes()
        log = follow(path)
        path.write_bytes(line[:10])
        assert next(log) == []
        path.write_bytes(line)
        assert len(next(log)) == 1

    def test_following_does_not_read_again(self, path):
        run_log.write(path, [run_log.start(), run_log.step(1)])
        log = follow(path)
        next(log)
        path.write_bytes(b"#" * path.stat().st_size)  # what was read may be anything by now
        run_log_line = b'{"seq": 2, "type": "placement", "group": "g"}\n'
        path.write_bytes(path.read_bytes() + run_log_line)
        assert [event.seq for event in next(log)] == [2]

    def test_a_reader_beside_a_writer_sees_everything_once_and_in_order(self, path):
        writer = EventLog(path)
        thread = threading.Thread(target=lambda: [writer.append(run_log.step(1)) for _ in range(500)])
        log, seen = follow(path), []
        thread.start()
        deadline = time.monotonic() + 10
        while len(seen) < 500 and time.monotonic() < deadline:
            seen += [event.seq for event in next(log)]
        thread.join()
        assert seen == list(range(500))


@st.composite
def histories(draw):
    """Trainings of some steps with checkpoints at any step, each interrupted anywhere: the next one starts from the
    newest checkpoint."""
    events, committed, number = [run_log.run(), run_log.start(0)], 0, 0
    for action in draw(st.lists(st.sampled_from(["step", "step", "step", "save", "crash"]), max_size=40)):
        if action == "step":
            number += 1
            events.append(run_log.step(number))
            if number % run_log.STEPS_PER_EPOCH == 0:
                events.append(run_log.epoch(number // run_log.STEPS_PER_EPOCH - 1))
        elif action == "save":
            committed = number
            events.append(run_log.checkpoint(number))
        else:
            number = committed
            events.append(run_log.start(number))
    return run_log.numbered(events), number, committed


def steps_of(events):
    return [event.step for event in run_log.only(StepEvent, events)]


class TestProjection:
    def test_a_start_takes_back_the_rows_beyond_it(self):
        events = run_log.numbered([run_log.start(), run_log.step(1), run_log.checkpoint(1), run_log.step(2),
                                   run_log.start(1), run_log.step(2)])
        assert [event.seq for event in surviving(events)] == [0, 1, 2, 4, 5]

    def test_going_back_twice_takes_back_to_the_earlier_step(self):
        events = run_log.numbered([run_log.start(), run_log.step(1), run_log.checkpoint(1), run_log.step(2),
                                   run_log.checkpoint(2), run_log.start(2), run_log.start(1)])
        assert steps_of(surviving(events)) == [1]

    def test_where_workers_went_on_out_of_their_memory_nothing_is_durable(self):
        rows = [run_log.start(), run_log.step(1)]
        assert steps_of(durable(run_log.numbered([*rows, run_log.start(1, regrouped=True)]))) == []
        assert steps_of(durable(run_log.numbered([*rows, run_log.start(1)]))) == [1]

    def test_a_row_is_durable_once_a_checkpoint_of_its_step_follows(self):
        events = run_log.numbered([run_log.start(), run_log.step(1), run_log.step(2), run_log.checkpoint(1)])
        assert steps_of(durable(events)) == [1]
        assert steps_of(durable([*events, *run_log.numbered([run_log.end(2)])])) == [1, 2]

    @pytest.mark.parametrize("status", ["failed", "stopped"])
    def test_a_bad_end_makes_nothing_durable(self, status):
        events = run_log.numbered([run_log.start(), run_log.step(1), run_log.end(1, status)])
        assert steps_of(durable(events)) == []
        assert steps_of(surviving(events)) == [1]

    def test_a_checkpoint_commits_no_row_logged_after_it(self):
        events = run_log.numbered([run_log.checkpoint(5), run_log.step(3)])
        assert steps_of(durable(events)) == []

    @given(histories())
    def test_interruptions_leave_no_trace(self, history):
        events, number, _ = history
        assert steps_of(surviving(events)) == list(range(1, number + 1))

    @given(histories())
    def test_durable_is_what_the_newest_checkpoint_holds(self, history):
        events, _, committed = history
        assert steps_of(durable(events)) == list(range(1, committed + 1))

    @given(histories(), st.data())
    def test_what_is_durable_is_never_taken_back(self, history, data):
        events, _, _ = history
        earlier = events[: data.draw(st.integers(0, len(events)))]
        now = [event.seq for event in durable(events)]
        assert {event.seq for event in durable(earlier)} <= set(now)

    @given(histories())
    def test_filters_are_idempotent_and_keep_the_order(self, history):
        events, _, _ = history
        for project in (surviving, durable):
            kept = project(events)
            assert project(kept) == kept
            assert all(one.seq < other.seq for one, other in pairwise(kept))
        facts = Counter(event.type for event in events if not isinstance(event, RowEvent))
        assert facts == Counter(event.type for event in durable(events) if not isinstance(event, RowEvent))

    def test_the_best_row_is_the_last_that_was_better_than_all_before(self):
        rows = run_log.numbered([run_log.epoch(number, best=best) for number, best in enumerate([True, True, False])])
        assert best_row(rows).epoch == 1
        assert best_row(rows[2:]) is None

    def test_the_first_of_two_reports_of_an_epoch_counts(self):
        events = run_log.numbered([run_log.epoch(1), run_log.epoch(0, fitness=0.5), run_log.epoch(0, fitness=0.7)])
        assert [(row.epoch, row.fitness) for row in epoch_rows(events)] == [(0, 0.5), (1, 0.07)]
