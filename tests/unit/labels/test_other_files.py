"""Absence is not a statement: label files that no image takes, pictures that are not read, and twins."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ray_yolo.config.recipe import Recipe
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data.index import read_index, survey
from ray_yolo.labels import label_files, twins
from ray_yolo.labels.description import describe
from ray_yolo.labels.twins import find_twins
from ray_yolo.runtime.preflight import read_dataset
from ray_yolo.sinks.report import dataset_table
from ray_yolo.sinks.run_logger import write_findings
from tests.support.pictures import smooth_picture, write_image

ROW = "1 0.5 0.5 0.5 0.5\n"  # of a picture 64 x 48: 16, 12, 48, 36
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
BOX = [16.0, 12.0, 48.0, 36.0]
XML = ("<annotation><object><name>dog</name><bndbox><xmin>17</xmin><ymin>13</ymin><xmax>48</xmax><ymax>36</ymax>"
       "</bndbox></object></annotation>")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", str(tmp_path / "user-cache"))


def picture(root: Path, *names: str) -> None:
    """Write pictures with contents of their own."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = sum(name.encode())
        Image.fromarray(smooth_picture(48, 64, seed)).save(path, "PNG")


def text(root: Path, *names: str, content: str = ROW) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(XML if name.lower().endswith(".xml") and content == ROW else content)


def scan(root: Path, train: object = "images", **more: object) -> AnnotationIndex:
    return read_index(describe({"train": train, "names": ["cat", "dog"], **more}, root / "data.yaml"), "train")


def boxes(index: AnnotationIndex) -> dict[str, list[list[float]]]:
    return {Path(index.paths[number]).name: index[number].boxes.tolist() for number in range(len(index))}


SPELLINGS = {
    "suffix in upper case": ("images/a.png", "labels/a.TXT"),
    "suffix of XML in upper case": ("images/a.png", "annotations/a.XML"),
    "stem in another case": ("images/IMG_1.png", "labels/img_1.txt"),
    "percent encoding": ("images/écran 1.png", "labels/%C3%A9cran%201.txt"),
    "percent encoding of the picture": ("images/a%20b.png", "labels/a b.txt"),
    "composed": (f"images/{COMPOSED}.png", f"labels/{DECOMPOSED}.txt"),
    "decomposed": (f"images/{DECOMPOSED}.png", f"labels/{COMPOSED}.txt"),
    "with the picture's suffix": ("images/a.png", "labels/a.png.txt"),
    "beside a picture in images": ("images/a.png", "images/a.txt"),
    "beside, in upper case": ("images/sub/a.png", "images/sub/a.TXT"),
    "folder in another case": ("images/a.png", "Labels/a.txt"),
    "both folders in another case": ("Images/a.png", "Labels/a.txt"),
    "the first of two folders called images": ("images/images/a.png", "labels/images/a.txt"),
    "no subfolder in labels": ("images/sub/a.png", "labels/a.txt"),
    "labels below the pictures": ("images/a.png", "images/labels/a.txt"),
    "labels next to a folder of any name": ("pics/a.png", "labels/a.txt"),
    "RectLabel's annotations": ("images/a.png", "images/annotations/a.xml"),
    "dots in the stem": ("images/a.b.c.png", "labels/a.b.c.TXT"),
    "Label Studio's prefix": ("images/a.png", "labels/1a2b3c4d-a.txt"),
    "the stem's first part": ("images/a.webp.png", "labels/a.txt"),
    "blanks": ("images/a  b .png", "labels/a  b.txt"),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_a_label_file_under_another_spelling_is_read_and_reported(tmp_path: Path, case: str) -> None:
    image, label = SPELLINGS[case]
    picture(tmp_path, image)
    text(tmp_path, label)
    for _ in range(2):  # from the files, and from the cache
        index = scan(tmp_path, image.split("/")[0])
        assert boxes(index) == {Path(image).name: [BOX]}
        assert len(index.without_file) == 0
        assert index.other_files.matched == ((str(tmp_path / image), str(tmp_path / label)),)
        assert index.other_files.labels == ()
        note, = survey(index).notes
        assert note.startswith("1 label file found under another spelling or folder: ")
        assert note.endswith(f"{Path(image).name} has {os.path.relpath(tmp_path / label, (tmp_path / image).parent)}")
    cat = XML.replace("dog", "cat") if label.lower().endswith(".xml") else ROW.replace("1 ", "0 ")
    text(tmp_path, label, content=cat)
    assert scan(tmp_path, image.split("/")[0]).classes.tolist() == [0]  # the cache follows the file


AMBIGUOUS = {
    "two files": (["images/a.png"], ["labels/A.txt", "labels/A.TXT"]),
    "two folders": (["images/a.png"], ["images/a.txt", "Labels/a.txt"]),
    "two pictures": (["images/a.png", "images/A.png"], ["labels/a.TXT"]),
    "two pictures of a sequence": (["images/a.1.png", "images/a.2.png"], ["labels/a.txt"]),
    "two pictures, and a third by a less strict key": (["images/a.png", "images/a.jpg", "images/a.webp.png"],
                                                       ["images/a.txt"]),
    "two pictures in subfolders": (["images/x/a.png", "images/y/a.png"], ["labels/a.txt"]),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_ambiguous_label_file_is_not_read_but_reported(tmp_path: Path, case: str) -> None:
    images, labels = AMBIGUOUS[case]
    picture(tmp_path, *images)
    text(tmp_path, *labels)
    index = scan(tmp_path)
    if case == "two pictures":
        assert boxes(index) == {"a.png": [BOX], "A.png": []}  # by the exact stem
        return
    assert not index.other_files.matched
    assert len(index.classes) == 0
    if case != "two pictures in subfolders":  # there, the folder may hold other splits' labels
        assert set(index.other_files.labels) == {str(tmp_path / label) for label in labels}


def test_an_empty_label_file_is_a_statement(tmp_path: Path) -> None:
    """It makes a background; a file of another spelling beside it is an orphan."""
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt", content="")
    text(tmp_path, "labels/a.TXT", "images/a.txt")
    index = scan(tmp_path)
    assert boxes(index) == {"a.png": []}
    assert survey(index).empty_file == 1
    assert index.other_files.labels == (f"{tmp_path}/images/a.txt", f"{tmp_path}/labels/a.TXT")


def test_orphans_are_counted_with_three_examples(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt", *(f"labels/x{number}.txt" for number in range(5)), "labels/deep/y.txt")
    index = scan(tmp_path)
    counts = survey(index)
    assert (counts.images, counts.boxes, counts.orphans) == (1, 1, 6)
    note, = counts.notes
    assert note == (f"6 label files ({tmp_path}/labels/deep/y.txt, {tmp_path}/labels/x0.txt, "
                    f"{tmp_path}/labels/x1.txt, ...) without an image")
    table = dataset_table({"train": counts}, index.names)
    assert table[0].split()[-1] == "orphans"
    assert table[1].split() == ["train", "1", "1", "0", "0", "0", "0", "6"]
    assert f"train: {note}" in table
    assert write_findings({"train": index}, tmp_path) == ""
    assert (tmp_path / "findings.txt").read_text().count("belongs to no image") == 6
    with pytest.raises(DatasetError):
        read_index(describe({"train": "images", "names": ["cat", "dog"]}, tmp_path / "data.yaml"), "train", strict=True)


def test_hidden_files_and_files_of_tools_are_no_labels(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt")
    for name in ("._a.txt", "Thumbs.db", "classes.txt", "notes.json", "README.dataset.txt", "README.roboflow.txt",
                 ".DS_Store", "predefined_classes.txt", "labels.txt", "train.txt", "obj.names", "_darknet.labels"):
        text(tmp_path, f"labels/{name}", f"images/{name}", content="cat\ndog\n")
    index = scan(tmp_path)
    assert index.other_files == label_files.OtherFiles()
    assert survey(index).notes == ()


def test_labels_of_images_outside_a_list_are_no_orphans(tmp_path: Path) -> None:
    """train.txt and val.txt often share their folders."""
    picture(tmp_path, "images/a.png", "images/b.png")
    text(tmp_path, "labels/a.txt", "labels/b.txt", "labels/c.txt")
    (tmp_path / "train.txt").write_text("images/a.png\n")
    index = scan(tmp_path, "train.txt")
    assert boxes(index) == {"a.png": [BOX]}
    assert index.other_files.labels == (f"{tmp_path}/labels/c.txt",)


def test_a_label_file_of_another_splits_image_is_not_matched(tmp_path: Path) -> None:
    """images/sub/a.png has no label file: labels/a.txt is that of images/a.png."""
    picture(tmp_path, "images/a.png", "images/sub/a.png")
    text(tmp_path, "labels/a.txt")
    index = scan(tmp_path, "images/sub")
    assert boxes(index) == {"a.png": []}
    assert index.other_files == label_files.OtherFiles()


def test_images_of_one_stem_share_their_label_file_with_a_word(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png", "images/a.bmp", "images/b.png")
    text(tmp_path, "labels/a.txt", "labels/b.txt")
    index = scan(tmp_path)
    assert boxes(index) == {"a.png": [BOX], "a.bmp": [BOX], "b.png": [BOX]}
    assert index.other_files.shared == (f"{tmp_path}/images/a.bmp", f"{tmp_path}/images/a.png")
    assert survey(index).notes[0].startswith("2 images (")
    assert "that share a label file" in survey(index).notes[0]


def test_pictures_that_are_not_read_are_counted(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt", "labels/b.txt", "labels/c.txt")
    for name in ("b.heic", "c.DCM", "d.exr", "._e.heic", "movie.mp4"):
        (tmp_path / "images" / name).write_bytes(b"some picture")
    counts = survey(scan(tmp_path))
    assert (counts.unread, counts.orphans) == (3, 2)
    assert any(note.startswith("3 pictures (") and "b.heic" in note and note.endswith("formats that are not read")
               for note in counts.notes)


@pytest.mark.parametrize("suffix", ["gif", "jp2", "avif", "ppm", "JPE", "jfif"])
def test_pictures_that_the_libraries_read_are_images(tmp_path: Path, suffix: str) -> None:
    kinds = {"jp2": "JPEG2000", "jpe": "JPEG", "jfif": "JPEG"}
    path = tmp_path / "images" / f"a.{suffix}"
    path.parent.mkdir()
    Image.fromarray(smooth_picture(48, 64)).save(path, kinds.get(suffix.lower(), suffix.upper()))
    text(tmp_path, "labels/a.txt")
    assert boxes(scan(tmp_path)) == {path.name: [BOX]}


def test_an_animation_says_which_of_its_pictures_is_read(tmp_path: Path) -> None:
    path = tmp_path / "images" / "a.gif"
    path.parent.mkdir()
    first, second = (Image.fromarray(smooth_picture(48, 64, seed)) for seed in (0, 1))
    first.save(path, save_all=True, append_images=[second])
    text(tmp_path, "labels/a.txt")
    finding, = scan(tmp_path).findings
    assert finding.where == str(path)
    assert "2 frames" in finding.what
    assert not finding.dropped


def test_a_link_to_a_picture_has_the_label_file_of_its_own_name(tmp_path: Path) -> None:
    picture(tmp_path, "store/x.png")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").symlink_to(tmp_path / "store" / "x.png")
    text(tmp_path, "labels/a.txt")
    index = scan(tmp_path)
    assert boxes(index) == {"a.png": [BOX]}
    assert survey(index).notes == ()


def test_names_with_line_ends_are_matched_and_printed_on_one_line(tmp_path: Path) -> None:
    picture(tmp_path, "images/a\nb.png")
    text(tmp_path, "labels/a\nb.TXT", "labels/c\nd.txt")
    index = scan(tmp_path)
    assert boxes(index) == {"a\nb.png": [BOX]}
    assert not any("\n" in line for line in dataset_table({"train": survey(index)}, index.names))


def test_each_folder_is_listed_once_by_each_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path, *(f"images/{number}.png" for number in range(20)))
    text(tmp_path, *(f"labels/{number}.TXT" for number in range(20)))
    listed: list[str] = []
    real = os.listdir

    def listdir(folder: str) -> list[str]:
        listed.append(str(folder))
        return real(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    index = scan(tmp_path)
    assert len(index.classes) == 20
    assert max(Counter(listed).values()) == 2  # for lists of classes, and for label files


def test_validation_images_with_the_content_of_training_images_are_twins(tmp_path: Path) -> None:
    picture(tmp_path, *(f"images/train/{number}.png" for number in range(4)), "images/val/v.png")
    shutil.copy(tmp_path / "images/train/1.png", tmp_path / "images/val/w.png")
    os.utime(tmp_path / "images/val/w.png", (1, 1))
    text(tmp_path, *(f"labels/train/{number}.txt" for number in range(4)), "labels/val/v.txt", "labels/val/w.txt")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")
    _, train, val = read_dataset(Recipe(data=str(tmp_path / "data.yaml")))
    assert val.twins == ((f"{tmp_path}/images/val/w.png", f"{tmp_path}/images/train/1.png"),)
    assert not train.twins
    assert survey(val).twins == 1
    assert "1 of 2 images are training images" in survey(val).notes[0]


def test_only_files_of_equal_size_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"a": b"1" * 9000, "b": b"2" * 9000, "c": b"3" * 9001, "d": b"1" * 9000, "e": b"4" * 10}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    path = {name: str(tmp_path / name) for name in "abcde"}
    opened: list[str] = []

    def record(file: str) -> str:
        opened.append(Path(file).name)
        return Path(file).read_bytes().hex()

    monkeypatch.setattr(twins, "_digest", record)
    assert find_twins([path["a"], path["b"], path["c"]], [path["d"], path["e"]]) == ((path["d"], path["a"]),)
    assert sorted(opened) == ["a", "d"]
    assert find_twins([path["a"]], [path["a"], str(tmp_path / "missing")]) == ((path["a"], path["a"]),)


def test_many_files_of_one_size_cost_one_look_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    paths = []
    for number in range(300):
        write_image(tmp_path / f"{number}.bmp", rng.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        paths.append(str(tmp_path / f"{number}.bmp"))
    assert find_twins(paths[:200], paths[200:]) == ()


@pytest.mark.parametrize(("image", "label"), [
    ("images/Train_0001.png", "labels/train_0001.txt"),
    ("images/train/val_0001.png", "labels/val_0001.txt"),
    ("images/obj_3.png", "labels/OBJ_3.txt"),
    ("images/Classes.png", "labels/classes.txt"),
])
def test_a_label_file_with_the_name_of_a_companion_is_matched(tmp_path: Path, image: str, label: str) -> None:
    picture(tmp_path, image)
    text(tmp_path, label)
    index = scan(tmp_path)
    assert boxes(index) == {Path(image).name: [BOX]}
    assert [Path(file).name for _, file in index.other_files.matched] == [Path(label).name]


def test_numbered_label_files_without_images_are_reported_and_companions_are_not(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt", "labels/test_7.txt", "labels/obj_3.txt")
    text(tmp_path, "labels/train.txt", "labels/labels.txt", "labels/README.dataset.txt", content="")
    orphans = scan(tmp_path).other_files.labels
    assert [Path(file).name for file in orphans] == ["obj_3.txt", "test_7.txt"]


@pytest.mark.parametrize("label", ["labels/b.txt", "images/b.xml"])
def test_a_label_file_that_is_a_broken_link_is_no_statement(tmp_path: Path, label: str) -> None:
    """As of a set whose label files were not fetched from their store."""
    picture(tmp_path, "images/a.png", "images/b.png")
    text(tmp_path, "labels/a.txt")
    (tmp_path / label).symlink_to(tmp_path / "annex" / "xx")
    index = scan(tmp_path)
    assert boxes(index) == {"a.png": [BOX]}
    [finding] = [finding for finding in index.findings if finding.dropped]
    assert finding.where == str(tmp_path / label)
    assert finding.what.startswith("is a link to a file that does not exist")


def test_of_two_xml_files_the_other_is_reported(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "images/a.xml", "Annotations/a.xml")
    [finding] = scan(tmp_path).findings
    assert (finding.where, finding.dropped) == (str(tmp_path / "Annotations" / "a.xml"), False)
    assert "XML files that are not read, because their image has another one" in finding.what


def test_a_label_file_that_replaces_another_with_its_time_is_read(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    text(tmp_path, "labels/a.txt")
    file = tmp_path / "labels" / "a.txt"
    assert scan(tmp_path).classes.tolist() == [1]
    status = file.stat()
    file.write_text(f"0{ROW[1:]}")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert scan(tmp_path).classes.tolist() == [0]


def test_a_stray_outline_does_not_hide_rows_with_keypoints(tmp_path: Path) -> None:
    picture(tmp_path, "images/a.png")
    poses = "1 .375 .375 .25 .25 .3 .3 .4 .42\n0 .5 .5 .25 .25 .45 .45 .5 .52\n"
    triangle = "1 .1 .1 .3 .1 .2 .3\n"
    text(tmp_path, "labels/a.txt", content=poses + triangle)
    [finding] = scan(tmp_path).findings
    assert finding.what.startswith("is the first of 2 rows of 9 columns that may be outlines, or boxes with keypoints")
    text(tmp_path, "labels/a.txt", content=poses.splitlines(keepends=True)[0] + triangle)
    assert scan(tmp_path).findings == ()
