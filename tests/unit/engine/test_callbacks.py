"""Functions of the user in the middle of a training: an event only where one is needed, and no harm."""

from __future__ import annotations

from ray_yolo.engine.callbacks import TrainingCallbacks


def never() -> dict[str, object]:
    raise AssertionError("an event of no function")


def test_no_event_is_made_without_a_function() -> None:
    TrainingCallbacks({"on_step_end": print}).call("on_batch_end", never)


def test_the_first_function_that_returns_stop_is_named() -> None:
    steps: list[int] = []
    callbacks = TrainingCallbacks({"on_step_end": lambda event: steps.append(event["step"]),
                                   "on_val_end": lambda event: "stop", "on_batch_end": lambda event: "stop"})
    callbacks.call("on_step_end", lambda: {"step": 3})
    assert (steps, callbacks.stopped_by) == ([3], "")
    callbacks.call("on_val_end", dict)
    callbacks.call("on_batch_end", dict)
    assert callbacks.stopped_by == "on_val_end"


def test_an_exception_of_each_step_is_one_warning() -> None:
    def fail(event: dict[str, int]) -> None:
        raise ValueError(f"after {event['after']}")

    warnings: list[str] = []
    callbacks = TrainingCallbacks({"on_step_end": fail}, warnings.append)
    for after in (1, 1, 2):
        callbacks.call("on_step_end", lambda after=after: {"after": after})
    where = "(test_callbacks.py, line "
    assert [warning.partition(where)[0] for warning in warnings] == [
        "callbacks: on_step_end: ValueError: after 1 ", "callbacks: on_step_end: ValueError: after 2 "]
    assert callbacks.stopped_by == ""
