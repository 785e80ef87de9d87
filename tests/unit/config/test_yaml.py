"""The YAML reader: what scalars mean, where every key stands, and its limits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_yolo.config import yaml as yaml_files
from ray_yolo.config.yaml import MAX_BYTES, MAX_DEPTH, load_text_yaml, load_yaml, to_yaml
from ray_yolo.core.errors import InputError
from tests.support.messages.config import CODE

SHARED_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

# text without surrogates (not encodable) and without the leading BOM that the reader drops
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-10**17, 10**17) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(0, 99), inner, max_size=3),
    max_leaves=10,
)


def load(tmp_path: Path, content: str | bytes) -> yaml_files.YamlFile:
    path = tmp_path / "f.yaml"
    tmp_path.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_yaml(path)


def test_scalars_mean_what_yaml_1_2_says(tmp_path: Path) -> None:
    for number, (written, value) in enumerate((
        ("1e-3", 0.001), ("1.", 1.0), (".5", 0.5), ("-3", -3), ("+1", 1), ("007", 7), ("1E+2", 100.0), ("10.0", 10.0),
        ("123456789012345678901", 123456789012345678901.0),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("12:30:00", "12:30:00"),
        ("2026-01-02", "2026-01-02"), ("0x10", "0x10"), ("1_000", "1_000"), (".inf", ".inf"), (".nan", ".nan"),
        ("1e999", "1e999"), ("'1'", "1"), ('"no"', "no"), ("'null'", "null"), ("=", "="), ("<<", "<<"),
    )):
        read = load(tmp_path / str(number), f"key: {written}").data["key"]
        assert read == value, written
        assert type(read) is type(value), written


def test_text_reading_keeps_the_spelling_and_only_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("names: {0: true, 01: 007, 2: 1e5, 3: no, 4: null, 5: 'null'}")
    assert load_text_yaml(path).data == {
        "names": {"0": "true", "01": "007", "2": "1e5", "3": "no", "4": None, "5": "null"}}


def test_every_key_and_item_keeps_its_line(tmp_path: Path) -> None:
    file = load(tmp_path, "# comment\nlr0: 1\n\nloss:\n  box: 2\n  cls:\n    3\nrows:\n- a\n-\n  - b\n")
    assert file.lines == {("lr0",): 2, ("loss",): 4, ("loss", "box"): 5, ("loss", "cls"): 6, ("rows",): 8,
                          ("rows", 0): 9, ("rows", 1): 11, ("rows", 1, 0): 11}
    assert file.where("loss", "cls") == f"{tmp_path / 'f.yaml'}:6"
    assert file.where("absent") == f"{tmp_path / 'f.yaml'}:1"


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    contents = ("", "# only a comment\n", "---\n", "---\n...\n", "null", "{}", "\ufeff")
    for number, content in enumerate(contents):
        assert load(tmp_path / str(number), content).data == {}, content


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfepochs: 3\r\nimgsz: 64\r\n").data == {"epochs": 3, "imgsz": 64}


def test_the_deepest_legal_file_is_read(tmp_path: Path) -> None:
    value = load(tmp_path, "a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH).data["a"]
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value == []


def test_size_is_limited(tmp_path: Path) -> None:
    assert load(tmp_path, b"a: 1\n#".ljust(MAX_BYTES, b"x")).data == {"a": 1}


def test_the_number_of_values_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_files, "MAX_VALUES", 5)
    assert load(tmp_path, "a: [1, 2, 3, 4]").data == {"a": [1, 2, 3, 4]}
    with pytest.raises(InputError):
        load(tmp_path, "a: [1, 2, 3, 4,\n5]")


@pytest.mark.parametrize("parser", [yaml_files._PARSER, yaml.SafeLoader])
def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: type) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(yaml_files, "_PARSER", parser)
    with pytest.raises(InputError):
        load(tmp_path, CODE)
    assert [path.name for path in tmp_path.iterdir()] == ["f.yaml"]


@SHARED_PATH
@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_what_is_written_is_read_back_here_and_by_yaml_1_1(tmp_path: Path, values: dict[str, object]) -> None:
    (tmp_path / "f.yaml").write_text(to_yaml(values), encoding="utf-8")
    assert load_yaml(tmp_path / "f.yaml").data == values
    assert yaml.safe_load(to_yaml(values)) == values


def test_order_is_kept_and_every_value_stays_on_one_line() -> None:
    shared = [1, 2]
    assert to_yaml({"b": shared, "a": shared, "c": (), "name": "1e3"}) == 'b: [1, 2]\na: [1, 2]\nc: []\nname: "1e3"\n'
    assert to_yaml({"text": "a\nb " + 50 * "long "}) == f'text: "a\\nb {50 * "long "}"\n'


def outcome(tmp_path: Path, content: str | bytes) -> yaml_files.YamlFile | InputError:
    try:
        return load(tmp_path, content)
    except InputError as error:
        return error


@SHARED_PATH
@given(st.binary(max_size=200) | st.text(st.sampled_from("ab01.-:#?&*!|>'\"%@`{}[], \n\t~<\\"), max_size=60))
def test_any_bytes_are_a_mapping_or_an_input_error(tmp_path: Path, content: bytes | str) -> None:
    result = outcome(tmp_path, content)
    if isinstance(result, InputError):
        assert "\n" not in str(result)
    else:
        assert isinstance(result.data, dict)
        assert all(math.isfinite(value) for value in result.data.values() if isinstance(value, float))
