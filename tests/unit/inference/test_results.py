"""Results: equal numbers in every form, plots, crops, and compatibility with tools for Ultralytics' results."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from supervision import Detections

from ray_yolo.data.images import read_image
from ray_yolo.inference.results import Boxes, Results, label_rows
from tests.support.pictures import smooth_picture

ROWS = torch.tensor([[10.0, 20, 30, 60, 0.9, 1], [0, 0, 100, 50, 0.5, 0]])
PICTURE = smooth_picture(200, 100)


@pytest.fixture
def results() -> Results:
    bgr = np.ascontiguousarray(PICTURE[..., ::-1])
    return Results(bgr, "in/a.jpg", {0: "cat", 1: "../dog"}, Boxes(ROWS, (200, 100)))


@pytest.mark.parametrize("boxes", [Boxes(ROWS, (200, 100)), Boxes(ROWS, (200, 100)).numpy()], ids=["torch", "numpy"])
def test_boxes_are_the_same_in_every_form(boxes: Boxes) -> None:
    kind = type(boxes.data)
    assert boxes.xyxy.tolist() == [[10, 20, 30, 60], [0, 0, 100, 50]]
    assert boxes.xywh.tolist() == [[20, 40, 20, 40], [50, 25, 100, 50]]
    assert np.allclose(boxes.xyxyn, [[0.1, 0.1, 0.3, 0.3], [0, 0, 1, 0.25]])
    assert np.allclose(boxes.xywhn, [[0.2, 0.2, 0.2, 0.2], [0.5, 0.125, 1, 0.25]])
    assert (boxes.cls.tolist(), len(boxes), tuple(boxes.shape)) == ([1, 0], 2, (2, 6))
    assert np.allclose(boxes.conf, [0.9, 0.5])
    assert all(isinstance(one, kind) for one in (boxes.xyxy, boxes.xywh, boxes.xyxyn, boxes.xywhn, boxes.conf))
    assert [box.xyxy.tolist() for box in boxes] == [[row] for row in boxes.xyxy.tolist()]
    assert boxes[boxes.conf > 0.7].cls.tolist() == [1]


def test_results_have_the_attributes_that_tools_read(results: Results) -> None:
    assert results.boxes.xyxy.cpu().numpy().shape == (2, 4)
    assert results.boxes.cls.cpu().numpy().astype(int).tolist() == [1, 0]
    assert (results.boxes.id, results.masks, results.obb, results.probs, results.keypoints) == (None,) * 5
    assert (len(results), results.orig_shape, results.path) == (2, (200, 100), "in/a.jpg")
    assert results[:1].boxes.conf.tolist() == results.boxes.conf[:1].tolist()


def test_supervision_reads_results(results: Results) -> None:
    read = Detections.from_ultralytics(results)
    assert read.xyxy.tolist() == results.boxes.xyxy.tolist()
    assert (read.class_id.tolist(), read["class_name"].tolist()) == ([1, 0], ["../dog", "cat"])


def test_the_table_has_a_row_for_each_detection(results: Results) -> None:
    table = results.to_pandas()
    assert table.columns.tolist() == ["xmin", "ymin", "xmax", "ymax", "confidence", "class", "name"]
    assert table.iloc[0].tolist() == pytest.approx([10, 20, 30, 60, 0.9, 1, "../dog"])
    assert len(results[:0].to_df()) == 0


def test_a_plot_changes_the_picture_at_the_boxes_alone(results: Results) -> None:
    before = results.orig_img.copy()
    drawn = results[1:].plot(labels=False, conf=False, line_width=1)
    changed = (drawn != before).any(2)
    assert np.array_equal(results.orig_img, before)
    assert changed[:51].sum() > 200
    assert not changed[51:].any()
    assert not changed[5:45, 5:95].any()


def test_a_plot_is_saved_at_its_path(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.save() == "results_a.jpg"
    assert results.save(tmp_path / "b.png", conf=False) == str(tmp_path / "b.png")
    assert np.array_equal(read_image("b.png")[..., ::-1], results.plot(conf=False))


def test_a_picture_too_wide_for_jpeg_is_saved_as_png(tmp_path: Path) -> None:
    rows = torch.tensor([[0.0, 0, 70_000, 8, 0.9, 0]])
    wide = Results(np.zeros((8, 70_000, 3), np.uint8), "in/a.jpg", {0: "cat"}, Boxes(rows, (8, 70_000)))
    assert wide.save(tmp_path / "b.jpg") == str(tmp_path / "b.png")
    wide.save_crop(tmp_path / "crops")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.*"))] == [
        "b.png", "crops/cat/a.1.png"]


def test_crops_are_the_pixels_of_the_boxes_and_stay_in_their_folder(results: Results, tmp_path: Path) -> None:
    first, second = results.crop()
    assert np.array_equal(first[..., ::-1], PICTURE[20:60, 10:30])
    assert second.shape == (50, 100, 3)
    results.save_crop(tmp_path / "crops")
    written = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.jpg"))]
    assert written == ["crops/___dog/a.1.jpg", "crops/cat/a.2.jpg"]


def test_crops_of_each_class_have_a_folder(tmp_path: Path) -> None:
    """`c+` and `c#` have equal names of folders otherwise, and so has `c__0` with the first one's next name."""
    rows = torch.tensor([[10.0, 20, 30, 60, 0.9, kind] for kind in range(4)])
    names = {0: "c+", 1: "c#", 2: "c__0", 3: "car"}
    results = Results(PICTURE[..., ::-1].copy(), "a.jpg", names, Boxes(rows, (200, 100)))
    results.save_crop(tmp_path)
    written = {path.parent.name for path in tmp_path.rglob("*.jpg")}
    assert written == {"c__0_0", "c__1", "c__0_2", "car"}


def test_a_crop_has_every_pixel_that_the_box_touches() -> None:
    rows = torch.tensor([[10.3, 20.9, 29.2, 59.1, 0.9, 0], [10.0, 20, 30, 60, 0.9, 0]])
    pieces = Results(PICTURE, "a", {0: "cat"}, Boxes(rows, (200, 100))).crop()
    assert all(np.array_equal(piece, PICTURE[20:60, 10:30]) for piece in pieces)


def test_a_crop_at_the_edge_has_at_least_one_pixel() -> None:
    flat = torch.tensor([[100.0, 200, 100, 200, 0.9, 0], [5, 5, 5, 5, 0.9, 0]])
    pieces = Results(np.zeros((200, 100, 3), np.uint8), "a", {0: "cat"}, Boxes(flat, (200, 100))).crop()
    assert [piece.shape for piece in pieces] == [(1, 1, 3)] * 2


FOUND = np.array([[10, 20, 30, 60, 0.9, 1], [0, 0, 100, 200, 1 / 3, 0]], np.float32)


def test_label_rows_are_shares_of_the_image() -> None:
    assert label_rows(FOUND, (200, 100), scores=False) == "1 0.2 0.2 0.2 0.2\n0 0.5 0.5 1 1\n"


def test_label_rows_end_with_the_score_on_request() -> None:
    assert label_rows(FOUND, (200, 100), scores=True) == "1 0.2 0.2 0.2 0.2 0.9\n0 0.5 0.5 1 1 0.333333\n"


def test_no_detections_are_no_rows() -> None:
    assert label_rows(FOUND[:0], (200, 100), scores=True) == ""


def test_a_label_file_is_written_once_however_often_it_is_saved(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "labels" / "a.txt"
    for _ in range(2):
        assert results.save_txt(path) == str(path)
    assert path.read_text() == "1 0.2 0.2 0.2 0.2\n0 0.5 0.125 1 0.25\n"
    results.save_txt(path, save_conf=True)
    assert path.read_text() == "1 0.2 0.2 0.2 0.2 0.9\n0 0.5 0.125 1 0.25 0.5\n"
    results[:0].save_txt(path)
    assert path.read_text() == ""


def test_a_summary_has_a_dict_for_each_box_and_json_is_its_text(results: Results) -> None:
    first, second = results.summary(decimals=3)
    assert first == {"name": "../dog", "class": 1, "confidence": 0.9,
                     "box": {"x1": 10.0, "y1": 20.0, "x2": 30.0, "y2": 60.0}}
    assert second["class"] == 0
    assert results.summary(normalize=True)[1]["box"] == {"x1": 0, "y1": 0, "x2": 1, "y2": 0.25}
    assert json.loads(results.to_json(normalize=True)) == results.summary(normalize=True)
    assert json.loads(results[:0].to_json()) == []


def test_a_small_image_is_enlarged_before_labels_are_drawn(results: Results) -> None:
    assert results.plot(least_side=480).shape == (600, 300, 3)
    assert np.array_equal(results.plot(least_side=200), results.plot())
    plain = results[:0].plot(least_side=480)
    assert np.array_equal(plain[::3, ::3], results.orig_img)
    changed = (results[:1].plot(labels=False, conf=False, line_width=1, least_side=480) != plain).any(2)
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (60, 180, 30, 90)


def test_a_plot_for_pillow_has_the_same_pixels(results: Results) -> None:
    picture = results.plot(conf=False, pil=True)
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture)[..., ::-1], results.plot(conf=False))


def test_show_opens_a_viewer_or_the_output_of_a_notebook(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer: list[Image.Image] = []
    output: list[tuple[dict[str, str], bool]] = []
    monkeypatch.setattr(Image.Image, "show", lambda self: viewer.append(self))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    results.show(labels=False)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(
        display=lambda data, raw: output.append((data, raw))))
    results.show()
    [(data, raw)] = output
    assert [len(viewer), list(data), raw] == [1, ["image/jpeg"], True]  # a picture of Pillow would be stored twice
    shown = Image.open(io.BytesIO(base64.b64decode(data["image/jpeg"])))
    assert np.abs(np.asarray(shown).astype(int) - np.asarray(results.plot(pil=True))).mean() < 8
    assert np.array_equal(np.asarray(viewer[0]), np.asarray(results.plot(labels=False, pil=True)))


def test_a_result_in_a_notebook_is_a_table_and_one_jpeg(results: Results) -> None:
    page = results._repr_html_()
    assert "<strong>in/a.jpg: 1 cat, 1 ../dog</strong>" in page
    assert page.count("<tr>") == 3
    assert [page.count("data:image/jpeg;base64,"), page.count("<img")] == [1, 1]
    unread = Results(np.zeros((0, 0, 3), np.uint8), "<b>.jpg", {}, Boxes(torch.zeros(0, 6), (0, 0)), error="is empty")
    assert unread._repr_html_() == "<strong>&lt;b&gt;.jpg: is empty</strong>"


def test_a_result_in_words_is_one_line(results: Results) -> None:
    assert repr(results) == "Results('in/a.jpg', 100 x 200 pixels: 1 cat, 1 ../dog)"
    assert repr(results.boxes) == "Boxes(2 detections in 100 x 200 pixels)"
    assert results[:0].verbose() == "no boxes"
    unread = Results(np.zeros((0, 0, 3), np.uint8), "b.jpg", {}, Boxes(torch.zeros(0, 6), (0, 0)), error="is empty")
    assert "is empty" in repr(unread)
