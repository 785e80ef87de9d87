import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.core.structures import Finding
from ray_yolo.labels.rows import LabelRules, Labels, UnreadableLabelsError
from ray_yolo.labels.yolo_txt import label_path, parse_labels

SIZE = (100, 200)  # (height, width)


def parse(text: str | bytes, num_classes: int = 3) -> tuple[Labels, list[Finding]]:
    content = text if isinstance(text, bytes) else text.encode()
    read = parse_labels(content, SIZE, LabelRules(("x",) * num_classes), "labels/a.txt")
    return read.labels, list(read.findings)


def test_a_box_row_becomes_corners_in_pixels() -> None:
    labels, findings = parse("1 0.5 0.5 0.2 0.4\n")
    assert labels.classes.tolist() == [1]
    assert labels.boxes.tolist() == [[80, 30, 120, 70]]
    assert labels.boxes.dtype == np.float32
    assert labels.polygons == ()
    assert findings == []


def test_an_outline_becomes_its_box_and_stays_an_outline() -> None:
    labels, _ = parse("0 0.1 0.2 0.5 0.1 0.3 0.9\n2 0.5 0.5 0.5 0.5\n")
    assert np.allclose(labels.boxes, [[20, 10, 100, 90], [50, 25, 150, 75]])
    assert np.allclose(labels.polygons[0], [[20, 20], [100, 10], [60, 90]])
    assert labels.polygons[1].shape == (0, 2)


def test_unambiguous_rows_are_read_in_every_notation() -> None:
    for text in [
        b"\xef\xbb\xbf1 0.5 0.5 0.2 0.4\n", b"1 0.5 0.5 0.2 0.4\r\n", b"1 0.5 0.5 0.2 0.4\r", b"1 0.5 0.5 0.2 0.4",
        b"\n\n  1\t0.5  0.5 0.2 0.4   \n\n", b"1.0 5e-1 .5 0.20 0.4", "1 0.5 0.5 0.2 0.4".encode("utf-16"),
    ]:
        labels, findings = parse(text)
        assert labels.boxes.tolist() == [[80, 30, 120, 70]], text
        assert findings == [], text


def test_an_empty_file_is_a_background_image() -> None:
    for text in ("", "\n", " \r\n"):
        assert len(parse(text)[0].classes) == 0


@pytest.mark.parametrize(("row", "why"), [
    ("0 nan 0.5 0.2 0.4", "outside 0 to 1"), ("0 inf 0.5 0.2 0.4", "outside 0 to 1"),
    ("0 -0.1 0.5 0.2 0.4", "outside 0 to 1"), ("0 0.5 0.5 -0.2 0.4", "outside 0 to 1"),
    ("0 0.5 1.5 0.2 0.4", "outside 0 to 1"), ("0 50 50 20 40", "outside 0 to 1"),
    ("0 0.5 0.5 0.2", "4 columns"), ("0 0.5 0.5 0.2 0.4 0.9", "6 columns"), ("0", "1 columns"),
    ("0 0.1 0.1 0.5 0.5 0.1 0.9 0.3", "8 columns"), ("0,0.5,0.5,0.2,0.4", "5 columns between commas"),
    ("cat 0.5 0.5 0.2 0.4", "row of numbers"), ("0 0,5 0,5 0,2 0,4", "numbers with a comma"),
    ("0 0_1 0.5 0.2 0.4", "row of numbers"), ("0.5 0.5 0.5 0.2 0.4", "not a whole number"),
    ("nan 0.5 0.5 0.2 0.4", "not a whole number"), ("0 0.5 0.5 0.2 0.4 # cat", "7 columns|row of numbers"),
])
def test_an_ambiguous_row_is_left_out_with_its_line(row: str, why: str) -> None:
    labels, (finding,) = parse(f"1 0.5 0.5 0.2 0.4\n\n{row}\n2 0.5 0.5 0.2 0.4\n")
    assert labels.classes.tolist() == [1, 2]
    assert (finding.where, finding.dropped, finding.image) == ("labels/a.txt:3", True, False)
    assert re.search(why, finding.what)


def test_rows_of_unnamed_classes_are_left_out_and_all_reported() -> None:
    for kind in ("3", "80", "-1", "1e9"):
        labels, findings = parse(f"1 0.5 0.5 0.2 0.4\n{kind} 0.5 0.5 0.2 0.4\n{kind} 0.5 0.5 0.2 0.4\n")
        assert labels.classes.tolist() == [1], kind
        found = [(finding.where, finding.dropped) for finding in findings]
        assert found == [("labels/a.txt:2", True), ("labels/a.txt:3", True)], kind
        assert "names 3 classes (0-2)" in findings[0].what, kind


def test_a_repeated_row_counts_once() -> None:
    labels, findings = parse("1 0.5 0.5 0.2 0.4\n0 0.5 0.5 0.2 0.4\n1 0.50 0.5 0.2 0.4\n")
    assert labels.classes.tolist() == [1, 0]
    assert [(finding.where, finding.dropped) for finding in findings] == [("labels/a.txt:3", False)]


def test_an_empty_box_labels_nothing() -> None:
    for row in ("1 0.5 0.5 0 0.4", "1 0.5 0.5 0.4 0.0", "1 0.1 0.1 0.5 0.1 0.9 0.1"):
        labels, findings = parse(f"{row}\n2 0.5 0.5 0.2 0.4\n")
        assert labels.classes.tolist() == [2], row
        assert [(finding.where, finding.dropped) for finding in findings] == [("labels/a.txt:1", True)], row


def test_a_box_without_area_in_single_precision_is_empty() -> None:
    for row in ("1 0.5 0.5 1e-9 0.4", "1 0.5 1.0 0.4 1e-12", "1 0.5 0.1 0.5000000001 0.9 0.5 0.5", "1 0 0 1e-30 1e-30"):
        labels, findings = parse(row)
        assert len(labels.classes) == 0, row
        assert [finding.what for finding in findings] == ["the box is empty; the row is left out"], row


def test_boxes_end_at_the_edges_and_rounding_beyond_one_is_forgiven() -> None:
    labels, findings = parse("0 1.0000001 0.5 0.5 0.4\n0 0.05 0.05 0.2 0.2\n")
    assert np.allclose(labels.boxes, [[150, 30, 200, 70], [0, 0, 30, 15]])
    assert findings == []


@pytest.mark.parametrize("content", [bytes(range(256)), b"\x89PNG\r\n\x1a\n\0\0"])
def test_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(UnreadableLabelsError):
        parse(content)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        labels, _ = parse(content)
    except UnreadableLabelsError:
        return
    assert labels.boxes.shape == (len(labels.classes), 4)


@given(st.lists(st.tuples(st.integers(0, 2), *[st.floats(0.0, 1.0)] * 4), max_size=8))
def test_boxes_never_leave_the_image_and_are_never_empty(rows: list[tuple[float, ...]]) -> None:
    labels, _ = parse("".join(" ".join(map(str, row)) + "\n" for row in rows))
    assert (labels.boxes[:, :2] >= 0).all()
    assert (labels.boxes[:, 2:] <= [200, 100]).all()
    assert (labels.boxes[:, 2:] >= labels.boxes[:, :2]).all()
    assert all(math.isfinite(value) for value in labels.boxes.ravel().tolist())


def test_the_last_images_folder_becomes_labels() -> None:
    labels = {"/d/images/train/a.jpg": "/d/labels/train/a.txt", "/d/flat/a.jpg": "/d/flat/a.txt",
              "/images/x/images/a.b.png": "/images/x/labels/a.b.txt", "/my_images/a.jpg": "/my_images/a.txt"}
    for image, label in labels.items():
        assert label_path(image) == label, image
