"""Records are read whole, by what wrote them, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import InputError
from ray_yolo.runs.run_record import RECORD_FILE, FolderRecord, RunRecord, SweepRecord, read_record, write_record

RUN = RunRecord(digest="ab", asked=Recipe(), recipe=Recipe(batch_size=16, microbatch=8), architecture={"nc": 3},
                anchors=[[[1.0, 2.0]]], num_parameters=7, names=("a", "b"), labels="cd", command="x",
                provenance={"p": "1"})
SWEEP = SweepRecord(digest="ab", space="evolve", trials=3)


@pytest.mark.parametrize("record", [RUN, SWEEP], ids=["training", "sweep"])
def test_what_was_written_is_read(tmp_path: Path, record: FolderRecord) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_each_flipped_bit_of_a_record_is_damage(tmp_path: Path) -> None:
    write_record(tmp_path, RUN)
    whole = (tmp_path / RECORD_FILE).read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        (tmp_path / RECORD_FILE).write_bytes(flipped)
        with pytest.raises(InputError):
            read_record(tmp_path)


def test_a_record_of_an_earlier_version_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_text(RUN.model_copy(update={"format": 1}).model_dump_json())
    assert read_record(tmp_path) == RUN.model_copy(update={"format": 1})


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RUN.digest = "other"
