from pathlib import Path

import pytest

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.errors import InputError
from ray_yolo.core.structures import SampleKey
from ray_yolo.data.dataset import TrainDataset
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from tests.support.corpus import CASES, Case


def test_the_corpus_is_large_and_its_cases_have_names_of_their_own() -> None:
    assert len(CASES) >= 100
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


def test_every_hostile_file_is_read_left_out_or_refused_as_agreed(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        try:
            assert_as_agreed(case, tmp_path / str(number))
        except BaseException as error:
            error.add_note(f"{case.kind}: {case.name}")
            raise


def assert_as_agreed(case: Case, tmp_path: Path) -> None:
    file = case.write(tmp_path)
    if case.outcome == "refused":
        with pytest.raises(InputError) as caught:
            read_index(read_description(file), "train")
        assert str(tmp_path) in str(caught.value), "the message names the file"
        assert "\n" not in str(caught.value)
        return
    index = read_index(read_description(file), "train")
    names = [Path(path).stem for path in index.paths]
    assert names[:2] == ["good1", "good2"]
    if case.outcome == "left out":
        assert "hostile" not in names
        *rows, finding = index.findings
        assert (finding.dropped, finding.image, [row.image for row in rows]) == (True, True, [False] * len(rows))
        assert all("hostile" in finding.where for finding in index.findings)
        with pytest.raises(InputError):
            read_index(read_description(file), "train", strict=True)
    elif case.kind != "yaml":
        assert len(index[2].classes) == case.labels
        sample = TrainDataset(index, ImageStore(index, 64), AugmentConfig(), 64, 0, 1)[SampleKey(0, 0, 2)]
        assert sample["image"].shape == (3, 64, 64)
