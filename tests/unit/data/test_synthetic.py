import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ray_yolo.cli import _status, train
from ray_yolo.data.dataset_yaml import read_description
from ray_yolo.data.images import read_image
from ray_yolo.data.index import read_index
from ray_yolo.data.synthetic import BUILT_IN, VERSION, draw, ensure_shapes, label_text

DIGESTS = {"shapes": "57175ee814ec2567", "shapes8": "893242acb62682cd", "shapes1k": "32a8fcecb628bfa2"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_generator_version_always_draws_the_same_pixels(name: str) -> None:
    digest = hashlib.sha256()
    for split in (0, 1):
        for number in range(8):
            image, shown = draw(BUILT_IN[name], split, number)
            digest.update(image.tobytes())
            digest.update(label_text(shown).encode())
    assert digest.hexdigest()[:16] == DIGESTS[name], "raise shapes.VERSION with any change of what is drawn"


def test_the_written_data_set_reads_back_as_it_was_drawn() -> None:
    description = read_description("shapes8")
    index = read_index(description, "train", strict=True)
    assert description.names == ("circle", "square", "triangle")
    assert len(index) == 8
    for number in range(8):
        image, shown = draw(BUILT_IN["shapes8"], 0, number)
        assert np.array_equal(index[number].classes, shown.classes)
        assert np.allclose(index[number].boxes, shown.boxes, atol=1e-3)
        assert np.abs(read_image(index.paths[number]).astype(int) - image).mean() < 12  # JPEG loses some of the noise


def test_boxes_lie_inside_the_image_and_fit_their_figure() -> None:
    for number in range(20):
        image, shown = draw(BUILT_IN["shapes1k"], 0, number)
        assert (shown.boxes >= 0).all()
        assert (shown.boxes <= image.shape[0]).all()
        assert (shown.boxes[:, 2:] - shown.boxes[:, :2] > 6).all()


def test_some_images_are_empty_and_every_class_appears() -> None:
    drawing = BUILT_IN["shapes"]
    counts = [draw(drawing, 0, number)[1].classes for number in range(drawing.num_train)]
    assert 2 <= sum(len(classes) == 0 for classes in counts) <= 20
    assert np.bincount(np.concatenate(counts), minlength=3).min() > 55


def test_colour_is_independent_of_class() -> None:
    """The mean colour inside the boxes of each class differs by less than a few levels."""
    colours: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}
    for number in range(128):
        image, shown = draw(BUILT_IN["shapes"], 0, number)
        for kind, box in zip(shown.classes.tolist(), shown.boxes, strict=True):
            x, y = box.reshape(2, 2).mean(axis=0).astype(int)
            colours[kind].append(image[y, x])
    means = np.array([np.mean(values, axis=0) for values in colours.values()])
    assert np.ptp(means, axis=0).max() < 30  # a mean of some 100 uniform levels has a deviation of 7


def test_concurrent_processes_create_one_complete_data_set(own_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: ensure_shapes("shapes8"), range(4)))
    assert files == {own_cache / f"shapes8-v{VERSION}" / "data.yaml"}
    assert [path.name for path in own_cache.iterdir()] == [f"shapes8-v{VERSION}"]
    assert len(list((own_cache / f"shapes8-v{VERSION}").rglob("*.jpg"))) == 16


def test_a_command_without_its_cache_ends_with_2(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.chdir(tmp_path)
    assert _status(lambda: train(["--data", "shapes8", "--model", "yolov5n", "--num-workers", "0"])) == 2
    assert capsys.readouterr().err.count("\n") == 1
