from pathlib import Path

import numpy as np
import pytest

from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.index import read_index
from ray_yolo.labels.description import describe


@pytest.mark.realdata
@pytest.mark.parametrize("split", ["train", "val"])
def test_real_data_reads_the_same_from_both_kinds_of_files(split: str) -> None:
    file = Path(__file__).parents[4] / "shared" / "data" / "bccd" / "data.yaml"
    description = read_description(file)
    as_json = describe({"train": "annotations", "val": "annotations", "names": list(description.names)}, file)
    text, coco = read_index(description, split), read_index(as_json, split)
    assert text.paths == coco.paths
    assert np.array_equal(text.classes, coco.classes)
    assert np.abs(text.boxes - coco.boxes).max() < 1e-3  # the text files have six decimals
