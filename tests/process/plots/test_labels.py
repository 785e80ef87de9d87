"""The labels of a data set as a figure."""

from pathlib import Path

import numpy as np
from matplotlib.colors import to_hex

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.plots.labels import plot_labels
from ray_yolo.plots.style import COLOURS
from tests.support.figures import num_colours, rectangles


def index(offsets: list[int], classes: list[int], boxes: list[list[float]], names: tuple[str, ...]) -> AnnotationIndex:
    images = len(offsets) - 1
    return AnnotationIndex(
        tuple(f"{i}.jpg" for i in range(images)), np.array([[100, 200]] * images, dtype=np.int32).reshape(-1, 2),
        np.array(offsets), np.array(classes, dtype=np.int64), np.array(boxes, dtype=np.float32).reshape(-1, 4), names)


def test_panels_count_classes_images_places_and_sizes(tmp_path: Path) -> None:
    """Three images of 200 x 100 pixels with two, no and one label."""
    boxes = [[0.0, 0.0, 40.0, 20.0], [0.0, 0.0, 40.0, 20.0], [100.0, 50.0, 200.0, 100.0]]
    figure = plot_labels(index([0, 2, 2, 3], [0, 0, 1], boxes, ("cat", "dog")), tmp_path / "labels.png")
    classes, images, overlaid, centres, sizes = figure.axes
    assert classes.get_title(loc="left") == "3 labels in 2 classes"
    assert [t.get_text() for t in classes.get_xticklabels()] == ["cat", "dog"]
    assert [height for *_, height in rectangles(classes)] == [2, 1]
    assert [to_hex(bar.get_facecolor()) for bar in classes.patches] == list(COLOURS[:2])
    assert images.get_title(loc="left") == "3 images, 1 without labels"
    assert [height for *_, height in rectangles(images)] == [1, 1, 1]
    assert all(tick == round(tick) for axes in (classes, images) for tick in axes.get_yticks())
    cells = np.asarray(centres.collections[0].get_array()).reshape(50, 50)  # rows: y
    assert {(y, x): cells[y, x] for y, x in zip(*np.nonzero(cells), strict=True)} == {(0, 0): 2.0, (49, 49): 1.0}
    assert (centres.get_xlim(), centres.get_ylim()) == ((0.1, 0.75), (0.75, 0.1))  # the part that has any
    cells = np.asarray(sizes.collections[0].get_array()).reshape(50, 50)
    assert cells[49, 49] == 1.0
    assert cells.sum() == 3.0
    [lines] = overlaid.collections
    assert [to_hex(colour) for colour in lines.get_colors()] == [COLOURS[0], COLOURS[0], COLOURS[1]]
    assert lines.get_segments()[2].tolist() == [[-0.25, -0.25], [0.25, -0.25], [0.25, 0.25], [-0.25, 0.25],
                                                [-0.25, -0.25]]
    assert overlaid.get_xlim() == (-0.26, 0.26)
    assert num_colours(tmp_path / "labels.png") > 10


def test_of_many_boxes_some_are_overlaid(tmp_path: Path) -> None:
    figure = plot_labels(index([0, 1500], [0] * 1500, [[0, 0, 9, 9]] * 1500, ("cat",)), tmp_path / "l.png")
    assert len(figure.axes[2].collections[0].get_segments()) == 1000
    assert figure.axes[2].get_title(loc="right") == "1,000 of 1,500"


def test_classes_beyond_what_fits_are_numbered(tmp_path: Path) -> None:
    figure = plot_labels(index([0, 1], [0], [[0, 0, 9, 9]], tuple(f"c{i}" for i in range(50))), tmp_path / "l.png")
    assert figure.axes[0].get_xlabel() == "Class number"
    assert len(figure.axes[0].patches) == 50


def test_crowded_images_do_not_make_more_bars_than_can_be_seen(tmp_path: Path) -> None:
    figure = plot_labels(index([0, 1000], [0] * 1000, [[0, 0, 9, 9]] * 1000, ("cat",)), tmp_path / "l.png")
    assert len(figure.axes[1].patches) <= 50
    assert sum(height for *_, height in rectangles(figure.axes[1])) == 1


def test_a_data_set_without_labels_has_a_picture(tmp_path: Path) -> None:
    plot_labels(index([0, 0], [], [], ("cat",)), tmp_path / "some.png")
    plot_labels(index([0], [], [], ("cat",)), tmp_path / "none.png")
    assert (tmp_path / "none.png").stat().st_size > 0
