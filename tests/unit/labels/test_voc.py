import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_yolo.data.index import read_index
from ray_yolo.labels.description import describe
from ray_yolo.labels.rows import LabelRules, UnreadableLabelsError
from ray_yolo.labels.voc import parse_voc
from tests.support.pictures import smooth_picture, write_dataset, write_image

NAMES = ("cat", "dog")


def item(name: str, *sides: object) -> str:
    tags = "".join(f"<{tag}>{side}</{tag}>" for tag, side in zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=False))
    return f"<object><name>{name}</name><part><name>head</name></part><bndbox>{tags}</bndbox></object>"


def parse(*items: str) -> tuple[list[int], list[list[float]], list[bool]]:
    text = f"<annotation><size><width>64</width></size>{''.join(items)}</annotation>"
    read = parse_voc(text.encode(), (48, 64), LabelRules(NAMES), "a.xml")
    labels, findings = read.labels, read.findings
    return labels.classes.tolist(), labels.boxes.tolist(), [finding.dropped for finding in findings]


def test_pixels_count_from_one_and_include_the_last() -> None:
    assert parse(item("dog", 1, 1, 64, 48), item("cat", 17, 13, "48.0", 36)) == (
        [1, 0], [[0, 0, 64, 48], [16, 12, 48, 36]], [])


def test_names_may_need_escapes_and_stand_on_lines_of_their_own() -> None:
    content = f"<annotation>{item('a &amp; b &lt;1&gt;', 1, 1, 5, 5)}{item(' c ', 1, 1, 5, 5)}</annotation>"
    labels = parse_voc(content.encode(), (48, 64), LabelRules(("c", "a & b <1>")), "a.xml").labels
    assert labels.classes.tolist() == [1, 0]


def test_a_box_without_area_in_single_precision_is_empty() -> None:
    assert parse(item("cat", "64.9999999", 1, 65, 9)) == ([], [], [True])


def test_an_annotation_without_objects_is_background() -> None:
    assert parse() == ([], [], [])


def test_boxes_are_clipped_empty_ones_dropped_and_duplicates_counted_once() -> None:
    double = item("dog", 5, 5, 9, 9)
    assert parse(item("cat", -5, 1, 10, 99), item("cat", 90, 1, 95, 9), double, double) == (
        [0, 1], [[0, 0, 10, 48], [4, 4, 9, 9]], [True, False])


def test_an_object_without_a_valid_box_is_left_out() -> None:
    for sides in ((), (1, 2, 3), (1, 2, 3, "x"), (1, 2, "nan", 4), (9, 9, 1, 1), (1, 1, "inf", 5)):
        assert parse(item("dog", 1, 1, 5, 5), item("cat", *sides)) == ([1], [[0, 0, 5, 5]], [True]), sides


def test_an_object_of_which_it_is_not_clear_whether_it_is_difficult_is_left_out() -> None:
    unclear = item("cat", 1, 1, 5, 5).replace("</object>", "<difficult>maybe</difficult></object>")
    content = f"<annotation>{unclear}{item('dog', 1, 1, 5, 5)}</annotation>"
    read = parse_voc(content.encode(), (48, 64), LabelRules(NAMES), "a.xml")
    assert read.labels.classes.tolist() == [1]
    [finding] = read.findings
    assert (finding.where, finding.dropped) == ("a.xml: object 1", True)
    assert "has the difficult 'maybe', which is neither 0 nor 1" in finding.what


def test_objects_of_unnamed_classes_are_left_out_and_all_reported() -> None:
    content = f"<annotation>{item('Katze', 1, 1, 5, 5)}{item('dog', 1, 1, 5, 5)}{item('owl', 1, 1, 5, 5)}</annotation>"
    read = parse_voc(content.encode(), (48, 64), LabelRules(NAMES), "a.xml")
    labels, findings = read.labels, read.findings
    assert labels.classes.tolist() == [1]
    assert [finding.where for finding in findings if finding.dropped] == ["a.xml: object 1", "a.xml: object 3"]
    assert "has the class 'Katze'" in findings[0].what


@pytest.mark.parametrize("content", [
    b"", b"<a>", b"<a></b>", b"not xml", b"\xff\xfe\x00",
    b'<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>',
    b'<!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><annotation>&b;</annotation>',
    b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>',
    b'<!DOCTYPE annotation SYSTEM "http://example.com/a.dtd"><annotation/>',
    b'<?xml version="1.0" encoding="gbk"?><annotation/>', b'<?xml version="1.0" encoding="base64"?><annotation/>',
    b'<?xml version="1.0" encoding="no such"?><annotation/>', b'<?xml version="1.0" encoding="nosuch"?><annotation/>',
    b"<a>" * 100_000, b"<a>" * 40 + b"</a>" * 40,
])
def test_entities_and_broken_files_are_refused(content: bytes) -> None:
    with pytest.raises(UnreadableLabelsError):
        parse_voc(content, (48, 64), LabelRules(NAMES), "a.xml")


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    for wrapped in (content, b"<annotation><object>" + content + b"</object></annotation>"):
        try:
            parse_voc(wrapped, (48, 64), LabelRules(NAMES), "a.xml")
        except UnreadableLabelsError:
            continue


@pytest.mark.parametrize("folder", ["pictures", "VOC2012/JPEGImages"])
def test_xml_beside_images_or_in_annotations_equals_text_files(tmp_path: Path, folder: str) -> None:
    write_image(tmp_path / folder / "a.png", smooth_picture(48, 64))
    place = tmp_path / folder.replace("JPEGImages", "Annotations")
    place.mkdir(exist_ok=True)
    (place / "a.xml").write_text(f"<annotation>{item('dog', 17, 13, 48, 36)}</annotation>")
    read = read_index(describe({"train": folder, "names": list(NAMES)}, tmp_path / "data.yaml"), "train")
    text = read_index(write_dataset(tmp_path / "text", {"a": "1 0.5 0.5 0.5 0.5\n"}), "train")
    assert read.digest == text.digest
    (place / "a.xml").write_text("<annotation></annotation>")
    again = read_index(describe({"train": folder, "names": list(NAMES)}, tmp_path / "data.yaml"), "train")
    assert len(again.classes) == 0


def test_a_second_file_of_an_image_is_reported_at_every_start(tmp_path: Path) -> None:
    """Also if the labels were cached before it was there."""
    write_image(tmp_path / "images" / "train" / "a.png", smooth_picture(48, 64))
    description = describe({"train": "images/train", "names": list(NAMES)}, tmp_path / "data.yaml")
    content = f"<annotation>{item('dog', 17, 13, 48, 36)}</annotation>"
    reported = []
    for place in ("annotations", "annots", "Annotations"):
        (tmp_path / place / "train").mkdir(parents=True)
        (tmp_path / place / "train" / "a.xml").write_text(content)
        reported.append([finding.where for finding in read_index(description, "train").findings])
    others = [f"{tmp_path}/{place}/train/a.xml" for place in ("annots", "Annotations")]
    assert [len(places) for places in reported] == [0, 1, 1]
    assert reported[1] == others[:1]
    shutil.rmtree(tmp_path / "annots")
    [finding] = read_index(description, "train").findings
    assert finding.where == others[1]
