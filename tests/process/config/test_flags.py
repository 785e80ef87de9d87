"""Flags: names, meaning, precedence, and the messages for wrong ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_yolo.cli import (
    parse_train,
)
from ray_yolo.config.flags import Parsed
from ray_yolo.config.placement import RunConfig
from ray_yolo.config.settings import config_fields
from ray_yolo.core.errors import InputError
from tests.unit.config.test_flags import TRAIN_FLAGS

WORDS = st.sampled_from([
    *sorted(TRAIN_FLAGS - {"--help", "--version"}),
    "-", "--", "-x", "", "0", "-1", "1e-3", "nan", "9" * 400, "ten", "yes", "null",
    "auto", "2-4", "²-3", "640", "10", "cpu", "lr0=0.1", "epochs=3", "optimizer=SGD", "=", "a\0b", "\udc80", "%s",
]) | st.text(st.characters(exclude_characters="h"), max_size=6)


def outcome(argv: list[str]) -> Parsed[RunConfig] | InputError:
    try:
        return parse_train(argv)
    except InputError as error:
        return error


@settings(max_examples=1000, deadline=None)
@given(st.lists(WORDS, max_size=6))
def test_any_command_line_is_a_configuration_or_an_input_error(argv: list[str]) -> None:
    result = outcome(argv)
    if isinstance(result, InputError):
        assert result.exit_code == 2
        assert str(result)
    else:
        assert isinstance(result.config, RunConfig)
        assert set(result.origins) == set(config_fields(RunConfig))
