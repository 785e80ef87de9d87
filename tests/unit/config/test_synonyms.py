"""Hints: what users of other programs write, and typing errors. No hint where nothing is near."""

from __future__ import annotations

import random

import pytest

from ray_yolo.cli import EXPORT, PREDICT, SERVE, TRAIN, TUNE, VAL
from ray_yolo.config.addresses import corrected_store, corrected_tracking_uri
from ray_yolo.config.recipe import Recipe
from ray_yolo.config.settings import config_fields
from ray_yolo.config.synonyms import _SYNONYMS, edit_distance
from ray_yolo.tune.search import TuneConfig

COMMANDS = {"train": TRAIN, "val": VAL, "predict": PREDICT, "export": EXPORT, "serve": SERVE, "tune": TUNE}


def test_every_word_of_the_table_leads_to_a_setting() -> None:
    known = {path for command in COMMANDS.values() for path in config_fields(command.model)}
    assert set(_SYNONYMS) <= known | set(config_fields(TuneConfig)) | set(config_fields(Recipe))
    words = [word for each in _SYNONYMS.values() for word in each.split()]
    assert len(words) == len(set(words))


def slow_distance(one: str, other: str) -> int:
    """The definition, by recursion."""
    if not one or not other:
        return len(one) + len(other)
    best = min(slow_distance(one[1:], other) + 1, slow_distance(one, other[1:]) + 1,
               slow_distance(one[1:], other[1:]) + (one[0] != other[0]))
    if len(one) > 1 and len(other) > 1 and one[:2] == other[1::-1]:
        best = min(best, slow_distance(one[2:], other[2:]) + 1)
    return best


def test_the_distance_is_that_of_the_definition() -> None:
    draw = random.Random(0)
    for _ in range(150):
        one, other = ("".join(draw.choices("abc", k=draw.randint(0, 5))) for _ in range(2))
        assert edit_distance(one, other, 9) == slow_distance(one, other), (one, other)
        assert edit_distance(one, other, 1) == min(slow_distance(one, other), 2), (one, other)


@pytest.mark.parametrize(("given", "corrected"), [
    ("s3:/bucket", "s3://bucket"), ("s3:bucket/x", "s3://bucket/x"), ("s3//bucket", "s3://bucket"),
    ("S3://bucket", "s3://bucket"), ("gcs://bucket", "gs://bucket"), ("az:/bucket", "az://bucket"),
    ("s3:\\\\bucket", "s3://bucket"), ("s3:///bucket", "s3://bucket"), ("file:/runs", "file:///runs"),
    ("s3://bucket/x", ""), ("runs", ""), ("s3", ""), ("s3/x", ""), ("./s3:/b", ""), ("file:///runs", ""), ("", ""),
])
def test_a_mistyped_store_is_no_folder(given: str, corrected: str) -> None:
    assert corrected_store(given) == corrected


@pytest.mark.parametrize(("given", "corrected"), [
    ("localhost:5000", "http://localhost:5000"), ("127.0.0.1:5000", "http://127.0.0.1:5000"),
    ("mlflow.example.com:443/x", "http://mlflow.example.com:443/x"), ("[::1]:5000", "http://[::1]:5000"),
    ("http:/h:5000", "http://h:5000"), ("https//h", "https://h"), ("sqlite:/m.db", "sqlite:///m.db"),
    ("sqlite://m.db", "sqlite:///m.db"),
    ("http://h:5000", ""), ("sqlite:///m.db", ""), ("sqlite:////tmp/m.db", ""), ("databricks", ""), ("off", ""),
    ("mlruns", ""), ("", ""), ("postgresql://u:p@h/x", ""), ("databricks://profile", ""),
])
def test_a_mistyped_server_is_no_folder(given: str, corrected: str) -> None:
    assert corrected_tracking_uri(given) == corrected
