"""When a shape is recorded, and what a failed recording means. What is repeated: `test_network_graph.py` and others."""

from __future__ import annotations

import pytest

from ray_yolo.engine import cuda_graphs
from ray_yolo.engine.cuda_graphs import LaunchRecorder, Recordings
from tests.support.recorders import FunctionRecorder

RECORDER = FunctionRecorder()


@pytest.fixture(autouse=True)
def short_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is recorded at its third use; there are at most two recordings."""
    monkeypatch.setattr(cuda_graphs, "PLAIN_USES", 2)
    monkeypatch.setattr(cuda_graphs, "MAX_RECORDINGS", 2)


def name_of(shape: str, recorder: LaunchRecorder) -> str:
    assert recorder is RECORDER
    return f"recording of {shape}"


def used(recordings: Recordings[str], shapes: str) -> list[str | None]:
    """What each use of these shapes gets."""
    return [recordings.use(shape, lambda recorder, shape=shape: name_of(shape, recorder)) for shape in shapes]


def test_a_shape_is_recorded_once_after_plain_uses_of_its_own() -> None:
    recordings: Recordings[str] = Recordings("loss", RECORDER, [])
    a, b = "recording of a", "recording of b"
    assert used(recordings, "aabaabba") == [None, None, None, a, a, None, b, a]
    assert len(recordings) == 2


def test_shapes_beyond_the_limit_run_as_written() -> None:
    recordings: Recordings[str] = Recordings("loss", RECORDER, [])
    assert used(recordings, "aaabbbcccca")[-5:] == [None, None, None, None, "recording of a"]
    assert len(recordings) == 2


def test_what_cannot_be_recorded_yet_is_asked_again() -> None:
    complaints: list[str] = []
    recordings: Recordings[str] = Recordings("loss", RECORDER, complaints)
    answers = iter([None, "now"])
    assert [recordings.use("a", lambda _: next(answers)) for _ in range(5)] == [None, None, None, "now", "now"]
    assert not complaints


def test_after_a_failure_nothing_new_is_recorded_and_one_line_says_why() -> None:
    def fail(_: LaunchRecorder) -> str:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 3 GiB" + 300 * "!")

    complaints: list[str] = []
    recordings: Recordings[str] = Recordings("update", RECORDER, complaints)
    assert used(recordings, "aaa")[-1] == "recording of a"
    assert [recordings.use("b", fail) for _ in range(4)] == [None] * 4
    assert used(recordings, "bcccca") == [None, None, None, None, None, "recording of a"]
    [complaint] = complaints
    assert complaint == ("no further shape of the update is recorded as a CUDA graph: CUDA out of memory. Tried to "
                         "allocate 3 GiB" + 157 * "!" + "; --cuda-graphs off does not try it")


def test_other_errors_are_not_taken_for_a_failed_recording() -> None:
    def break_down(_: LaunchRecorder) -> str:
        raise TypeError

    recordings: Recordings[str] = Recordings("loss", RECORDER, [])
    used(recordings, "aa")
    with pytest.raises(TypeError):
        recordings.use("a", break_down)
