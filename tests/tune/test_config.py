"""The settings of a sweep."""

import pytest

from ray_yolo.cli import parse_tune
from ray_yolo.errors import ConfigError


@pytest.mark.parametrize("number", ["0", "-1", "none"])
def test_no_trials_at_a_time_are_refused(number):
    with pytest.raises(ConfigError, match=f"--max-concurrent: got {number}|got '{number}'"):
        parse_tune([f"--max-concurrent={number}"])


@pytest.mark.parametrize(("words", "value"), [([], "auto"), (["--max-concurrent", "auto"], "auto"),
                                              (["--max-concurrent", "1"], 1)])
def test_as_many_as_there_is_room_for_or_so_many(words, value):
    assert parse_tune(words).config.sweep.max_concurrent == value
