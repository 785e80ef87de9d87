"""From written values to one configuration: what wins, where each value came from, and what is refused."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_yolo.config.placement import RunConfig
from ray_yolo.config.settings import (
    SourcedValue,
    config_fields,
    describe,
    read_config_file,
    resolve_config,
)
from ray_yolo.config.yaml import to_yaml
from ray_yolo.core.errors import InputError

SHARED_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


VALID = st.fixed_dictionaries({}, optional={
    "epochs": st.integers(1, 10**6), "imgsz": st.integers(2, 50).map(lambda n: 32 * n), "rect": st.booleans(),
    "optimizer.lr0": st.floats(1e-6, 1.0), "schedule.lrf": st.floats(1e-300, 1.0), "loss.box": st.floats(0, 1e300),
    "batch_size": st.none() | st.integers(1, 99), "freeze": st.lists(st.integers(0, 24), max_size=4),
    "num_workers": st.integers(0, 9) | st.tuples(st.integers(1, 4), st.integers(4, 9)),
    "gpus_per_worker": st.just("auto") | st.floats(0, 8),
    "project": st.text(st.characters(exclude_categories=["Cs", "Cc"])),
})


@SHARED_PATH
@given(VALID)
def test_a_description_reads_back_as_the_same_configuration(tmp_path: Path, values: dict[str, object]) -> None:
    given_values = {path: SourcedValue(value, "here") for path, value in values.items()}
    config, origins = resolve_config(RunConfig, given_values)
    path = tmp_path / "f.yaml"
    path.write_text(describe(config, origins), encoding="utf-8")
    assert resolve_config(RunConfig, read_config_file(str(path)))[0] == config
    path.write_text(to_yaml(config.model_dump()), encoding="utf-8")
    assert resolve_config(RunConfig, read_config_file(str(path)))[0] == config


NASTY = ["", "0", "-1", "1e-3", "nan", "inf", "-inf", "1e999", "9" * 400, "10", "1000000", "yes", "no", "null", "~",
         "auto", "ram", "2-4", "4-2", "²-3", "[1, 2]", "[[1], {a: 2}]", "{a: 1}", "{}", "[]", "'", "\"x\"", "a: b",
         "*a", "!!int 3", "\t", "#", "x" * 300, "\u202e", "shapes", "../../x", "True", "0x10", "1_0", "--", "-", "@"]
KEYS = st.sampled_from([*config_fields(RunConfig), "recipe", "placement", "optimizer", "lr0", "box", "iou_t", "epoch",
                        "0", "''", "recipe.epochs", "~", "true"])
LINES = st.lists(st.tuples(KEYS, st.sampled_from(NASTY) | st.integers(-9, 9).map(str)), max_size=4)


def outcome(path: str) -> tuple[RunConfig, dict[str, str]] | InputError:
    try:
        return resolve_config(RunConfig, read_config_file(path))
    except InputError as error:
        return error


@settings(SHARED_PATH, max_examples=1000)
@given(LINES | st.lists(st.tuples(KEYS, st.text(max_size=8)), max_size=2))
def test_any_file_is_a_configuration_or_an_input_error(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes("\n".join(f"{key}: {value}" for key, value in lines).encode("utf-8", "surrogatepass"))
    result = outcome(str(path))
    if isinstance(result, InputError):
        assert result.exit_code == 2
        assert str(path) in str(result)
    else:
        assert isinstance(result[0], RunConfig)
        assert set(result[1]) == set(config_fields(RunConfig))
