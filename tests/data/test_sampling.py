from pathlib import Path

import numpy as np

from ray_yolo.data.index import read_index
from ray_yolo.data.sampling import class_weights, image_weights, label_sizes
from tests.support.pictures import write_dataset


def test_class_weights_are_the_inverse_counts() -> None:
    assert np.allclose(class_weights(np.array([0, 0, 0, 1]), 2), [0.25, 0.75])
    assert np.allclose(class_weights(np.array([0, 0]), 2), [1 / 3, 2 / 3])  # absent counts as one label
    assert np.allclose(class_weights(np.zeros(0, np.int64), 4), 0.25)


def test_image_weights_by_hand(tmp_path: Path) -> None:
    row = "{} 0.5 0.5 0.5 {}\n"
    three = row.format(0, 0.5) + row.format(0, 0.25) + row.format(1, 0.5)
    index = read_index(write_dataset(tmp_path, {"a": row.format(0, 0.5), "b": three, "c": None}), "train")
    assert np.allclose(image_weights(index, np.zeros(2)), [0.25, 0.25 + 0.25 + 0.75, 0])
    assert np.allclose(image_weights(index, np.array([0.0, 0.8])), [0.25, 0.5 + 0.75 * 0.04, 0])


def test_weights_are_uniform_when_nothing_is_left_to_prefer(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, {"a": "0 0.5 0.5 0.5 0.5\n", "b": None}), "train")
    assert image_weights(index, np.ones(2)).tolist() == [1, 1]
    empty = read_index(write_dataset(tmp_path / "empty", {"a": None, "b": None}), "train")
    assert image_weights(empty, np.zeros(2)).tolist() == [1, 1]


def test_label_sizes_are_width_and_height_at_the_image_size(tmp_path: Path) -> None:
    index = read_index(write_dataset(tmp_path, {"a": None, "b": "0 0.5 0.5 0.5 0.25\n"}), "train")
    assert np.allclose(label_sizes(index, 128), [[64, 24]])  # 64 x 48 pixels become 128 x 96
