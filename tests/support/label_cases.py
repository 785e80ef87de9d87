"""Label files in every format, and what each says: the boxes that come out, worked out by hand, or the finding.

Every case is about `a.png` of 96 x 64 pixels; `b.png` beside it is background. Where nothing else is said, the file
describes one box of class 1 (square) from (24, 16) to (48, 32).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ray_yolo.labels.description import DatasetDescription, describe
from tests.support.pictures import smooth_picture

NAMES = ("circle", "square", "triangle")
WIDTH, HEIGHT = 96, 64
BOX = (1, 24, 16, 48, 32)  # class, x1, y1, x2, y2
WHOLE = [[24, 16, 48, 16, 48, 32, 24, 32]]  # the outline of BOX
Row = tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One data set, and how it has to be read.

    Attributes:
        boxes: rows (class, x1, y1, x2, y2) of a.png; None: the image is left out.
        findings: patterns of "WHERE: WHAT" of all findings, in order.
        refused: a pattern of the error, if the data set is refused.
        outlined: how many of the boxes have an outline.
    """

    form: str
    what: str
    files: Mapping[str, str | bytes]
    boxes: Sequence[Row] | None = (BOX,)
    findings: Sequence[str] = ()
    refused: str = ""
    outlined: int = 0
    yaml: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, bool] = field(default_factory=dict)
    turned: bool = False  # a.png has the EXIF orientation 6: it is stored as 96 x 64 and shown as 64 x 96

    @property
    def name(self) -> str:
        return f"{self.form}: {self.what}"

    def write(self, root: Path) -> DatasetDescription:
        """Write the files; both splits are this one source."""
        folder = {"voc": "JPEGImages", "coco": "."}.get(self.form, "images")
        for stem in ("a", "b"):
            place(root / folder / f"{stem}.png", picture(turned=self.turned and stem == "a"))
        for name, content in self.files.items():
            place(root / name, content.encode() if isinstance(content, str) else content)
        source = "instances.json" if self.form == "coco" else folder
        return describe({"train": source, "val": source, "names": list(NAMES), **self.yaml}, root / "data.yaml")


def place(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def picture(turned: bool = False) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(smooth_picture(HEIGHT, WIDTH)).save(buffer, "PNG", **({"exif": exif} if turned else {}))
    return buffer.getvalue()


# YOLO rows

ROW = "1 0.375 0.375 0.25 0.25"


def yolo(what: str, rows: str | bytes, boxes: Sequence[Row] | None = (BOX,), *findings: str, **rest: Any) -> Case:
    return Case("yolo", what, {"labels/a.txt": rows}, boxes, findings, **rest)


def yolo_cases() -> Iterator[Case]:
    pose = {"yaml": {"kpt_shape": [2, 2]}}
    pose3 = {"yaml": {"kpt_shape": [2, 3]}}
    confident = {"options": {"with_confidence": True}}
    yield yolo("a box", ROW)
    yield yolo("a class as float, exponents, tabs", "1.0\t3.75e-1\t.375\t25E-2\t0.25")
    yield yolo("a mark, Windows' line ends, an empty line", "\ufeff" + ROW + "\r\n\r\n")
    yield yolo("UTF-16 with its mark", ROW.encode("utf-16"))
    yield yolo("a picture that EXIF turns", ROW, ((1, 16, 24, 32, 48),), turned=True)

    # a box on the edge, and other coordinates
    yield yolo(
        "one of three boxes over the edge",
        f"{ROW}\n0 0.5 0.5 0.25 0.25\n2 0.95 0.5 0.2 0.25",
        (BOX, (0, 36, 24, 60, 40), (2, 81.6, 24, 96, 40)),
    )
    yield yolo(
        "corners for centre and size",
        "1 0.25 0.25 0.5 0.75\n0 0.5 0.5 0.75 1",
        ((1, 0, 0, 48, 40), (0, 12, 0, 84, 64)),
        r"a\.txt:1: is the first of 1 of 2 boxes that were clipped .* all boxes would fit as corners.*x1 y1 x2 y2",
    )
    yield yolo(
        "the upper left corner for the centre",
        "1 0 0.2 0.5 0.25\n1 0.7 0.9 0.1 0.4\n0 0.5 0.5 0.25 0.25",
        ((1, 0, 4.8, 24, 20.8), (1, 62.4, 44.8, 72, 64), (0, 36, 24, 60, 40)),
        r"a\.txt:1: is the first of 2 of 3 boxes that were clipped at the edge.*centre, not its corner",
    )
    edge = [f"1 0.05 {0.2 + n / 4:.2f} 0.2 0.25" for n in range(3)]  # clipped at the left side
    clipped = [(1, 0, 64 * (0.075 + n / 4), 14.4, 64 * (0.325 + n / 4)) for n in range(3)]
    middle = [f"0 0.5 {0.2 + n / 20:.2f} 0.25 0.25" for n in range(11)]
    whole = [(0, 36, 64 * (0.075 + n / 20), 60, 64 * (0.325 + n / 20)) for n in range(11)]
    yield yolo(
        "the upper left corner for the centre, and three boxes of fourteen are clipped",
        "\n".join([*edge, *middle]),
        (*clipped, *whole),
        r"a\.txt:1: is the first of 3 of 14 boxes that were clipped .* would fit if x and y were the upper left corner",
    )
    yield yolo("two clipped boxes are a careless hand", "\n".join([*edge[:2], *middle]), (*clipped[:2], *whole))
    yield yolo(
        "three clipped boxes, and another one fits only around its centre",
        "\n".join([*edge, *middle, "2 0.8 0.5 0.25 0.25"]),
        (*clipped, *whole, (2, 64.8, 24, 88.8, 40)),
    )
    turned = [f"1 0.375 {0.375 + n / 64} 0.25 0.25 0.5 0.75" for n in range(10)]
    triangles = [(1, 24, 16, 48, 48)] * 10
    yield yolo(
        "boxes, angles and scores",
        "\n".join(turned),
        triangles,
        r"a\.txt:1: is the first of 10 rows of 7 columns that may be outlines of 3 points, or boxes and two more n",
        outlined=10,
    )
    yield yolo(
        "nine rows that may be triangles, and one that is no box",
        "\n".join([*turned[:9], "1 0 0 0.5 0 0.5 0.5"]),
        (*triangles[:9], (1, 0, 0, 48, 32)),
        outlined=10,
    )
    yield yolo(
        "fractions divided by the size twice",
        "1 0.0039 0.0058 0.0026 0.0039",
        ((1, 0.2496, 0.2464, 0.4992, 0.496),),
        r"a\.txt:1: is the first of 1 of 1 boxes with a side under one pixel.*divided by the image's size twice",
    )
    yield yolo("pixels", "1 36 24 24 16", None, r"a\.txt:1: has values outside 0 to 1.*its image is left out")
    yield yolo("per cent", "1 37.5 37.5 25 25", None, r"a\.txt:1: has values outside 0 to 1.*its image is left out")
    yield yolo("a box without height", f"{ROW}\n0 0.5 0.5 0.2 0", (BOX,), r"a\.txt:2: the box is empty")
    yield yolo("a negative width", f"{ROW}\n0 0.5 0.5 -0.2 0.1", (BOX,), r"a\.txt:2: has values outside 0 to 1")
    yield yolo("not a number", f"{ROW}\n0 nan 0.5 0.2 0.1", (BOX,), r"a\.txt:2: has values outside 0 to 1")

    # classes
    yield yolo(
        "a class beyond the names", f"{ROW}\n3 0.5 0.5 0.2 0.2", (BOX,), r"a\.txt:2: has the class 3, but .* 3 classes"
    )
    yield yolo("a negative class", f"{ROW}\n-1 0.5 0.5 0.2 0.2", (BOX,), r"a\.txt:2: has the class -1, but")
    yield yolo(
        "a class that np.savetxt wrote",
        f"{ROW}\n3.000000000000000000e+00 0.5 0.5 0.2 0.2",
        (BOX,),
        r"a\.txt:2: has the class 3\.0+, but .* 3 classes",
    )
    yield yolo("a class with a sign or a zero in front", "+1 0.375 0.375 0.25 0.25\n01 0.5 0.5 0.25 0.25",
               (BOX, (1, 36, 24, 60, 40)))
    yield yolo(
        "half a class", f"{ROW}\n0.5 0.5 0.5 0.2 0.2", (BOX,), r"a\.txt:2: has the class 0\.5, which is not a whole"
    )
    yield yolo(
        "a name for the class",
        f"{ROW}\ncircle 0.5 0.5 0.2 0.2",
        (BOX,),
        r"a\.txt:2: is not a row of numbers: it begins with 'circle', not with the number of a class",
    )

    # columns
    yield yolo(
        "one bad row, one finding",
        "1 0.375 0.375 0.25",
        None,
        r"a\.txt:1: has 4 columns; a box has 5.*its image is left out",
    )
    yield yolo(
        "two bad rows, two findings",
        "oops\n1 0.375 0.375 0.25",
        None,
        r"a\.txt:1: has 1 columns",
        r"a\.txt:2: has 4 columns; .*its image is left out",
    )
    yield yolo(
        "commas between columns", f"{ROW}\n1,0.375,0.375,0.25,0.25", (BOX,), r"a\.txt:2: has 5 columns between commas"
    )
    yield yolo(
        "commas and blanks", f"{ROW}\n1, 0.375, 0.375, 0.25, 0.25", (BOX,), r"a\.txt:2: has 5 columns between commas"
    )
    yield yolo("semicolons", f"{ROW}\n1;0.375;0.375;0.25;0.25", (BOX,), r"a\.txt:2: has 5 columns between semicolons")
    yield yolo(
        "semicolons, blanks and decimal commas",
        f"{ROW}\n1; 0,375; 0,375; 0,25; 0,25",
        (BOX,),
        r"a\.txt:2: has 5 columns between semicolons",
    )
    yield yolo(
        "decimal commas", f"{ROW}\n1 0,375 0,375 0,25 0,25", (BOX,), r"a\.txt:2: has numbers with a comma; write 0\.5"
    )
    yield yolo(
        "a sixth column",
        f"{ROW}\n{ROW.replace('1 ', '0 ')} 0.93",
        (BOX,),
        r"a\.txt:2: has 6 columns.*confidence \(add --labels-with-confidence",
    )
    yield yolo("a confidence, asked for", f"{ROW} 0.93", **confident)
    yield yolo(
        "a confidence in the second column, asked for", "1 0.93 0.375 0.375 0.25 0.25", None,
        r"a\.txt:1: seems to have the confidence in the second column", **confident,
    )
    yield yolo(
        "asked for, but not in every row", f"{ROW}\n0 0.375 0.375 0.25 0.25 1.0", (BOX, (0, *BOX[1:])), **confident
    )
    yield yolo(
        "a track id for the confidence",
        f"{ROW}\n{ROW} 17",
        (BOX,),
        r"a\.txt:2: has 17 in the sixth column, which is no confidence",
        **confident,
    )
    yield yolo(
        "a confidence and a track id",
        f"{ROW}\n0 0.5 0.5 0.2 0.2 0.93 1",
        (BOX,),
        r"a\.txt:2: seems to be a box with a confidence and the track id 1, not an outline",
    )
    yield yolo(
        "an outline with a confidence, asked for", "1 0.25 0.25 0.5 0.25 0.5 0.5 0.25 0.5 0.9", outlined=1, **confident
    )

    # one object twice
    yield yolo("a repeated row", f"{ROW}\n1 .375 0.3750 25e-2 0.25", (BOX,), r"a\.txt:2: repeats an earlier row")
    yield yolo(
        "boxes that are equal but for rounding",
        f"{ROW}\n1 0.3751 0.375 0.25 0.2501\n2 0.3751 0.375 0.25 0.2501\n1 0.3803 0.375 0.25 0.25",
        (BOX, (1, 24.0096, 15.9968, 48.0096, 32.0032), (2, 24.0096, 15.9968, 48.0096, 32.0032),
         (1, 24.5088, 16, 48.5088, 32)),
        r"a\.txt:2: is the first of 1 boxes that equal another box of their class and image but for rounding",
    )
    yield yolo(
        "a box and its outline",
        f"{ROW}\n1 0.25 0.25 0.5 0.25 0.5 0.5 0.25 0.5",
        (BOX, BOX),
        r"a\.txt:2: is the first of 1 boxes that equal another box",
        outlined=1,
    )
    yield yolo(
        "two outlines in one box",
        "1 0.25 0.25 0.5 0.25 0.25 0.5\n1 0.25 0.25 0.5 0.25 0.5 0.5 0.25 0.5",
        (BOX, BOX),
        outlined=2,
    )

    # outlines
    yield yolo("an outline of three points", "1 0.25 0.25 0.5 0.25 0.25 0.5", outlined=1)
    yield yolo("a rotated box by its corners", "1 0.375 0.25 0.5 0.375 0.375 0.5 0.25 0.375", outlined=1)
    yield yolo("an outline among boxes", f"{ROW}\n0 0.25 0.25 0.5 0.25 0.25 0.5", (BOX, (0, *BOX[1:])), outlined=1)
    yield yolo(
        "a repeated outline",
        "1 0.25 0.25 0.5 0.25 0.25 0.5\n" * 2,
        (BOX,),
        r"a\.txt:2: repeats an earlier row",
        outlined=1,
    )
    yield yolo("a flat outline", f"{ROW}\n0 0.1 0.5 0.5 0.5 0.9 0.5", (BOX,), r"a\.txt:2: the box is empty")

    # keypoints
    yield yolo("kpt_shape", "1 0.375 0.375 0.25 0.25 0.3 0.3 0.4 0.4", **pose)
    yield yolo("kpt_shape with visibility", "1 0.375 0.375 0.25 0.25 0.3 0.3 2 0 0 0", **pose3)
    yield yolo("kpt_shape and a box alone", ROW, **pose3)
    yield yolo("kpt_shape and a keypoint outside the image", "1 0.375 0.375 0.25 0.25 0.3 1.3 2 -0.4 0.4 1", **pose3)
    yield yolo(
        "kpt_shape and a box outside the image",
        f"{ROW}\n1 1.375 0.375 0.25 0.25 0.3 0.3 0.4 0.4",
        (BOX,),
        r"a\.txt:2: has values outside 0 to 1",
        **pose,
    )
    yield yolo(
        "kpt_shape and an outline of the same length",
        "1 0.25 0.25 0.5 0.25 0.5 0.5 0.25 0.5",
        ((1, 0, 8, 48, 24),),
        **pose,
    )
    yield yolo(
        "kpt_shape with a confidence, asked for", "1 0.375 0.375 0.25 0.25 0.3 0.3 0.4 0.4 0.8", **pose, **confident
    )
    yield yolo(
        "kpt_shape that is none",
        ROW,
        refused=r"data\.yaml: kpt_shape: must be \[number of keypoints, 2 or 3\]",
        yaml={"kpt_shape": [2, 4]},
    )
    yield yolo(
        "three boxes on one line",
        f"{ROW}\n1 .5 .5 .2 .2 0 .3 .3 .1 .1 0 .6 .6 .1 .1",
        (BOX,),
        r"a\.txt:2: seems to be 3 boxes on one line, not an outline; give each a line of its own",
    )
    yield yolo(
        "keypoints without kpt_shape",
        "1 0.375 0.375 0.25 0.25 0.3 0.3 0.4 0.42",
        ((1, 24, 16, 38.4, 26.88),),
        r"a\.txt:1: is the first of 1 rows of 9 columns that may be outlines, or boxes with keypoints; they are read "
        r"as outlines of 4 points \(`kpt_shape: \[2, 2\]`",
        outlined=1,
    )
    yield yolo(
        "one keypoint without kpt_shape",
        "1 0.375 0.375 0.25 0.25 0.3 0.42",
        ((1, 24, 16, 36, 26.88),),
        r"a\.txt:1: is the first of 1 rows of 7 columns that may be .*\(`kpt_shape: \[1, 2\]` in",
        outlined=1,
    )
    yield yolo(
        "keypoints with a confidence without kpt_shape",
        "1 0.375 0.375 0.25 0.25 0.3 0.3 0.97 0.42 0.3 0.88",
        ((1, 24, 16, 93.12, 56.32),),
        r"a\.txt:1: is the first of 1 rows of 11 columns .*`kpt_shape: \[3, 2\]` or `kpt_shape: \[2, 3\]`",
        outlined=1,
    )
    yield yolo(
        "keypoints with visibility without kpt_shape",
        f"{ROW}\n0 0.375 0.375 0.25 0.25 0.3 0.3 1 0.4 0.4 0",
        (BOX,),
        r"a\.txt:2: seems to be a box and keypoints with their visibility.*`kpt_shape: \[2, 3\]`",
    )
    yield yolo(
        "one keypoint with visibility",
        f"{ROW}\n0 0.375 0.375 0.25 0.25 0.3 0.3 2",
        (BOX,),
        r"a\.txt:2: seems to be a box and keypoints.*`kpt_shape: \[1, 3\]`",
    )
    yield yolo(
        "a box before its outline",
        f"{ROW}\n0 0.375 0.375 0.25 0.25 0.25 0.25 0.5 0.25 0.25 0.5",
        (BOX,),
        r"a\.txt:2: seems to be a box and the points in it",
    )


# VOC files


def xml(*objects: str, size: tuple[object, object] | None = (WIDTH, HEIGHT), file_name: str = "a.png") -> str:
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>" if size else ""
    return f"<annotation><filename>{file_name}</filename>\n{stated}\n{''.join(objects)}</annotation>"


def item(name: str = "square", sides: Sequence[object] = (25, 17, 48, 32), more: str = "") -> str:
    tags = "".join(f"<{tag}>{side}</{tag}>" for tag, side in zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=True))
    return f"<object><name>{name}</name>{more}<bndbox>{tags}</bndbox></object>"


def voc(what: str, content: str, boxes: Sequence[Row] | None = (BOX,), *findings: str, **rest: Any) -> Case:
    return Case("voc", what, {"Annotations/a.xml": content}, boxes, findings, **rest)


def voc_cases() -> Iterator[Case]:
    other = (0, 0, 0, 8, 8)
    yield voc("a box", xml(item()))
    yield voc("numbers as floats and with blanks", xml(item(sides=("25.0", " 17 ", "4.8e1", "32"))))

    # the size
    yield voc(
        "the size of another picture",
        xml(item(sides=(49, 33, 96, 64)), size=(192, 128)),
        None,
        r"a\.xml:2: its <size> says 192 x 128 \(the picture may have been resized.*, but the image has 96 x 64",
    )
    yield voc("one side of another picture", xml(item(), size=(0, 128)), None, r"a\.xml:2: its <size> says \? x 128")
    for unknown in ("0", "-1", "", "None", "0.0"):
        yield voc(f"an unknown size, {unknown!r}", xml(item(), size=(unknown, unknown)))
    yield voc("no size", xml(item(), size=None))
    yield voc("a size as floats", xml(item(), size=("96.0", "64.0")))
    yield voc(
        "a picture that EXIF turns, as it is shown",
        xml(item(sides=(17, 25, 32, 48)), size=(64, 96)),
        ((1, 16, 24, 32, 48),),
        turned=True,
    )
    yield voc(
        "a picture that EXIF turns, as it is stored",
        xml(item()),
        None,
        r"a\.xml:2: its <size> says 96 x 64 \(the sides are exchanged.*EXIF.*, but the image has 64 x 96",
        turned=True,
    )

    # coordinates
    yield voc(
        "pixels counted from 0",
        xml(item(sides=(0, 0, 8, 8), name="circle"), item()),
        (other, BOX),
        r"a\.xml: object 1: is the first of 1 boxes with xmin or ymin below 1, so its tool counts pixels from 0",
    )
    yield voc(
        "fractions",
        xml(item(sides=(0.25, 0.25, 0.5, 0.5))),
        ((1, 0, 0, 0.5, 0.5),),
        r"a\.xml: object 1: is the first of 1 of 1 boxes with a side under one pixel.*fractions of the image",
        r"counts pixels from 0",
    )
    yield voc(
        "x, y, width, height",
        xml(item(), item("circle", (61, 41, 24, 16))),
        (BOX,),
        r"object 2: has no usable bndbox: a minimum is above its maximum \(xmin 61, ymin 41, xmax 24, ymax 16\)",
    )
    yield voc(
        "exchanged sides",
        xml(item(), item("circle", (48, 17, 25, 32))),
        (BOX,),
        r"a\.xml: object 2: .*a minimum is above its maximum",
    )
    yield voc(
        "boxes of a larger picture without its size",
        xml(item(sides=(81, 49, 144, 96)), item("circle", (1, 1, 120, 8)), size=None),
        ((1, 80, 48, 96, 64), (0, 0, 0, 96, 8)),
        r"a\.xml: object 1: is the first of 2 of 2 boxes that were clipped.*resized",
    )
    yield voc(
        "a box beyond the picture",
        xml(item(), item("circle", (100, 17, 120, 32))),
        (BOX,),
        r"object 2: the box is empty",
    )
    yield voc(
        "a decimal comma", xml(item(), item("circle", ("25,5", 17, 48, 32))), (BOX,), r"object 2: has no usable bndbox"
    )
    yield voc(
        "two bndbox in an object",
        xml(item(), item("circle").replace("</object>", item()[len("<object><name>square</name>") :])),
        (BOX,),
        r"a\.xml: object 2: has more than one xmax",
    )
    yield voc(
        "an object with an outline alone",
        xml(item(), "<object><name>circle</name><polygon><x1>1</x1></polygon></object>"),
        (BOX,),
        r"object 2: has no usable bndbox",
    )

    # names
    yield voc("a name in another case with blanks", xml(item("\n Square ")))
    yield voc(
        "an unknown name",
        xml(item(), item("star")),
        (BOX,),
        r"object 2: has the class 'star', which the data set does not name",
    )
    yield voc("a number for the name", xml(item(), item("1")), (BOX,), r"object 2: has the class '1'")

    # what nothing reads
    turn = "<attributes><attribute><name>rotation</name><value>{}</value></attribute></attributes>"
    yield voc(
        "a turned box of CVAT, and one that is not turned",
        xml(item(more=turn.format("30.0")), item("circle", (1, 1, 8, 8), turn.format("0.0"))),
        (BOX, other),
        r"a\.xml: object 1: is the first of 1 objects with a rotation",
    )
    yield voc(
        "an angle",
        xml(item(more="<angle>0.5</angle>")),
        (BOX,),
        r"a\.xml: object 1: is the first of 1 objects with a rotation",
    )
    yield voc(
        "marked to be ignored",
        xml(item(more="<ignore>1</ignore>")),
        (BOX,),
        r"a\.xml: object 1: is the first of 1 objects marked ignore; they are trained on",
    )
    yield voc(
        "deleted, as LabelMe writes it",
        xml(item(), item("circle", (1, 1, 8, 8), "<deleted>1</deleted>")),
        (BOX,),
        r"a\.xml: object 2: is the first of 1 objects marked deleted; they are left out",
    )
    yield voc(
        "boxes that are equal but for rounding",
        xml(item(), item(sides=(25.2, 17, 48, 32))),
        (BOX, (1, 24.2, 16, 48, 32)),
        r"a\.xml: object 2: is the first of 1 boxes that equal another box",
    )
    yield voc("marked not to be ignored", xml(item(more="<ignore>0</ignore><deleted>0</deleted>")))

    # difficult
    yield voc(
        "a difficult object",
        xml(item(), item("circle", (1, 1, 8, 8), "<difficult>1</difficult>")),
        (BOX,),
        r"a\.xml: object 2: is the first of 1 objects marked difficult; they are left out.*--keep-difficult",
    )
    yield voc(
        "a difficult object, kept",
        xml(item(), item("circle", (1, 1, 8, 8), "<difficult>1</difficult>")),
        (BOX, other),
        options={"keep_difficult": True},
    )
    yield voc(
        "only difficult objects are background",
        xml(item(more="<difficult>1</difficult>")),
        (),
        r"1 objects marked difficult",
    )
    yield voc("an object that is not difficult", xml(item(more="<difficult>0</difficult>")))
    yield voc("difficulty that is not specified", xml(item(more="<difficult>Unspecified</difficult>")))

    # the file
    yield voc(
        "the name of another picture",
        xml(item(), file_name="c.png"),
        (BOX,),
        r"a\.xml: is the first of 1 annotations whose <filename>",
    )
    yield voc("the same picture with folders and another suffix", xml(item(), file_name="D:\\data\\A.JPG"))
    yield voc(
        "another kind of XML",
        "<annotations><image name='a.png'><box xtl='24' ytl='16'/></image></annotations>",
        None,
        r"a\.xml:1: is no VOC annotation: its first tag is <annotations>",
    )
    yield voc(
        "objects in another place",
        f"<annotation><objects>{item()}</objects></annotation>",
        None,
        r"a\.xml:1: has a <bndbox> that is not in",
    )
    yield voc("tags in another case", xml(item()).replace("object>", "Object>").replace("xmin", "Xmin"))
    yield Case(
        "voc",
        "a text file beside it",
        {"Annotations/a.xml": xml(item("circle")), "JPEGImages/a.txt": ROW},
        (BOX,),
        (r"a\.xml: is the first of 1 XML files that are not read, because their image has a \.txt file too",),
    )


# COCO files

CATEGORIES = [{"id": 1, "name": "circle"}, {"id": 2, "name": "square"}, {"id": 3, "name": "triangle"}]
IMAGES = [
    {"id": 1, "file_name": "a.png", "width": WIDTH, "height": HEIGHT},
    {"id": 2, "file_name": "b.png", "width": WIDTH, "height": HEIGHT},
]


def annotation(**changes: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": 1, "category_id": 2, "bbox": [24, 16, 24, 16], **changes}


def coco(
    what: str,
    rows: Sequence[dict[str, Any]],
    boxes: Sequence[Row] | None = (BOX,),
    *findings: str,
    images: Sequence[dict[str, Any]] = IMAGES,
    categories: Sequence[dict[str, Any]] = CATEGORIES,
    **rest: Any,
) -> Case:
    content = {"images": images, "categories": categories, "annotations": rows}
    return Case("coco", what, {"instances.json": json.dumps(content)}, boxes, findings, **rest)


def sized(width: object, height: object) -> list[dict[str, Any]]:
    return [{**IMAGES[0], "width": width, "height": height}, IMAGES[1]]


def named(*names: object) -> list[dict[str, Any]]:
    """Categories 1, 2 ... with these names."""
    return [{"id": number, "name": name} for number, name in enumerate(names, 1)]


def coco_cases() -> Iterator[Case]:
    second = annotation(id=2, bbox=[0, 0, 8, 8], category_id=1)
    other = (0, 0, 0, 8, 8)
    yield coco("a box", [annotation()])
    yield coco("a box with its outline", [annotation(segmentation=WHOLE, area=384)], outlined=1)

    # the size
    yield coco(
        "the size of another picture",
        [annotation(bbox=[48, 32, 48, 32])],
        None,
        r"a\.png: is 96 x 64 pixels, but instances\.json says 192 x 128 \(the picture may have been resized",
        images=sized(192, 128),
    )
    for width, height in ((None, None), (0, 0), (-1, -1), ("", ""), ("96", "64"), (96.0, 64.0), (96, None)):
        yield coco(f"a size of {width!r} and {height!r}", [annotation()], images=sized(width, height))
    yield coco("no size", [annotation()], images=[{"id": 1, "file_name": "a.png"}, IMAGES[1]])
    yield coco(
        "a picture that EXIF turns, as it is stored",
        [annotation()],
        None,
        r"a\.png: is 64 x 96 .*says 96 x 64 \(the sides are exchanged",
        turned=True,
    )
    yield coco(
        "a picture that EXIF turns, as it is shown",
        [annotation(bbox=[16, 24, 16, 24])],
        ((1, 16, 24, 32, 48),),
        images=sized(64, 96),
        turned=True,
    )

    # outline against bbox
    one = r"annotation 1: is the first of 1 annotations "
    yield coco(
        "an outline in fractions",
        [annotation(segmentation=[[0.25, 0.25, 0.5, 0.25, 0.5, 0.5]])],
        (BOX,),
        one + "whose segmentation disagrees",
    )
    yield coco(
        "an outline of the picture before it was resized",
        [annotation(segmentation=[[48, 32, 96, 32, 96, 64, 48, 64]])],
        (BOX,),
        one + "whose segmentation disagrees with their bbox",
    )
    yield coco(
        "two such outlines, one finding",
        [
            annotation(segmentation=[[0, 0, 9, 0, 9, 9]]),
            annotation(id=2, category_id=1, segmentation=[[0, 0, 9, 0, 9, 9]]),
        ],
        (BOX, (0, *BOX[1:])),
        r"annotation 1: is the first of 2 annotations whose segmentation disagrees",
    )
    yield coco(
        "an outline that is 2 px smaller", [annotation(segmentation=[[26, 18, 46, 18, 46, 30, 26, 30]])], outlined=1
    )
    yield coco(
        "an outline that is 3 px smaller",
        [annotation(segmentation=[[27, 16, 48, 16, 48, 32, 27, 32]])],
        (BOX,),
        one + "whose segmentation",
    )
    yield coco(
        "outline and bbox over the same edge",
        [
            annotation(bbox=[80, 16, 40, 16], segmentation=[[80, 16, 120, 16, 120, 32, 80, 32]]),
            annotation(id=2),
            {**second, "id": 3},
        ],
        ((1, 80, 16, 96, 32), BOX, other),
        outlined=1,
    )
    yield coco(
        "several parts that agree", [annotation(segmentation=[[24, 16, 30, 16, 30, 32], [40, 16, 48, 16, 48, 32]])]
    )
    yield coco(
        "several parts that do not",
        [annotation(segmentation=[[0, 0, 9, 0, 9, 9], [1, 1, 5, 1, 5, 5]])],
        (BOX,),
        one + "whose segmentation",
    )
    for what, value in (
        ("none", []),
        ("an empty part", [[]]),
        ("null", None),
        ("run lengths", {"counts": "abc", "size": [64, 96]}),
    ):
        yield coco(f"a segmentation of {what}", [annotation(segmentation=value)])
    yield coco(
        "run lengths of another picture",
        [annotation(segmentation={"counts": [9, 1], "size": [128, 192]})],
        (BOX,),
        one + "whose segm",
    )
    yield coco(
        "two points",
        [annotation(segmentation=[[24, 16, 48, 32]])],
        (BOX,),
        one + "with a segmentation that is no outline",
    )
    yield coco(
        "an odd number of coordinates",
        [annotation(segmentation=[[24, 16, 48, 16, 48, 32, 24]])],
        (BOX,),
        one + "with a segmentation that",
    )
    yield coco("a part that is not in a list", [annotation(segmentation=WHOLE[0])], outlined=1)

    # other coordinates
    yield coco(
        "fractions",
        [annotation(bbox=[0.25, 0.25, 0.25, 0.25])],
        ((1, 0.25, 0.25, 0.5, 0.5),),
        r"annotation 1: is the first of 1 of 1 boxes with a side under one pixel.*fractions of the image",
    )
    yield coco(
        "corners, clipped",
        [annotation(bbox=[24, 16, 48, 32]), annotation(id=2, bbox=[40, 40, 90, 60])],
        ((1, 24, 16, 72, 48), (1, 40, 40, 96, 64)),
        r"annotation 2: is the first of 1 of 2 boxes that were clipped.*\[x1, y1, x2, y2\]",
    )
    yield coco(
        "corners, by their area",
        [annotation(bbox=[24, 16, 48, 32], area=384)],
        ((1, 24, 16, 72, 48),),
        r"annotation 1: is the first of 1 of 1 boxes whose area or outline fits only .*\[x1, y1, x2, y2\]",
    )
    yield coco(
        "corners, by their outline",
        [annotation(bbox=[24, 16, 48, 32], segmentation=WHOLE)],
        ((1, 24, 16, 72, 48),),
        r"fits only if their numbers are corners",
        one + "whose segmentation disagrees",
    )
    yield coco(
        "an area that is larger than the box",
        [annotation(area=4000), second],
        (BOX, other),
        one + "whose area is larger than their bbox",
    )
    yield coco(
        "boxes of a larger picture",
        [annotation(bbox=[70, 16, 60, 16]), annotation(id=2, bbox=[60, 40, 50, 40])],
        ((1, 70, 16, 96, 32), (1, 60, 40, 96, 64)),
        r"2 of 2 boxes that were clipped at the edge.*resized",
    )
    right = [annotation(id=30 + n, bbox=[86, 16 + 9 * n, 18, 16]) for n in range(3)]  # clipped at the right side
    cut = [(1, 86, 16 + 9 * n, 96, 32 + 9 * n) for n in range(3)]
    inside = [annotation(id=2 + n, bbox=[20 + n, 30, 16, 16]) for n in range(7)]
    boxes = [(1, 20 + n, 30, 36 + n, 46) for n in range(7)]
    yield coco(
        "the centre for the upper left corner, and three boxes of ten are clipped",
        [*right, *inside],
        (*cut, *boxes),
        r"annotation 30: is the first of 3 of 10 boxes that were clipped .* would fit if x and y were the centre",
    )
    yield coco(
        "three clipped boxes, and another one fits only from its corner",
        [*right, *inside, annotation(id=50, bbox=[0, 30, 16, 16])],
        (*cut, *boxes, (1, 0, 30, 16, 46)),
    )
    yield coco(
        "a box without width",
        [annotation(), annotation(id=2, bbox=[5, 5, 0, 9])],
        (BOX,),
        r"annotation 2: the box is empty",
    )
    yield coco(
        "a negative width",
        [annotation(), annotation(id=2, bbox=[48, 16, -24, 16])],
        (BOX,),
        r"annotation 2: has no usable bbox",
    )
    yield coco(
        "keypoints alone",
        [annotation(), {"id": 2, "image_id": 1, "category_id": 1, "keypoints": [1, 1, 2]}],
        (BOX,),
        r"annotation 2: has no usable bbox: None",
    )

    # numbers by value
    yield coco("a bbox as text", [annotation(bbox=["24", "16.0", " 24", "1.6e1"])])
    yield coco(
        "a bbox with a decimal comma",
        [annotation(), annotation(id=2, bbox=["24,5", 1, 2, 3])],
        (BOX,),
        r"annotation 2: has no usable bbox",
    )
    yield coco(
        "a bbox as one text",
        [annotation(), annotation(id=2, bbox="24,16,24,16")],
        (BOX,),
        r"annotation 2: has no usable bbox",
    )
    yield coco("an id as float", [annotation(image_id=1)], images=[{**IMAGES[0], "id": 1.0}, IMAGES[1]])
    yield coco("an image_id as text", [annotation(image_id="1")])
    yield coco("a category_id as text", [annotation(category_id="2")])
    yield coco(
        "a category's id as text", [annotation()], categories=[{**row, "id": str(row["id"])} for row in CATEGORIES]
    )
    yield coco(
        "ids that are words", [annotation(image_id="x")], images=[{**IMAGES[0], "id": "x"}, {**IMAGES[1], "id": "y"}]
    )
    for crowd in ("0", 0.0, None, False, ""):
        yield coco(f"no crowd: {crowd!r}", [annotation(iscrowd=crowd)])
    for crowd in ("1", 1.0, True):
        marked = r"annotation 2: is the first of 1 annotations marked iscrowd; crowds are not trained on"
        yield coco(f"a crowd: {crowd!r}", [annotation(), annotation(id=2, iscrowd=crowd)], (BOX,), marked)
    yield coco(
        "a crowd that is neither",
        [annotation(), annotation(id=2, iscrowd="maybe")],
        (BOX,),
        r"annotation 2: has the iscrowd 'maybe'",
    )
    yield coco(
        "an image_id of no image",
        [annotation(), annotation(id=2, image_id=7)],
        (BOX,),
        r"annotation 2: has the image_id 7, which no",
    )
    yield coco(
        "true for an image_id",
        [annotation(), annotation(id=2, image_id=True)],
        (BOX,),
        r"annotation 2: has the image_id True, which no",
    )
    yield coco(
        "a category_id of no category",
        [annotation(), annotation(id=2, category_id=9)],
        (BOX,),
        r"annotation 2: has the category_id 9",
    )
    yield coco(
        "a category_id of null",
        [annotation(), annotation(id=2, category_id=None)],
        (BOX,),
        r"annotation 2: has the category_id None",
    )

    # categories
    yield coco(
        "names in another case with blanks",
        [annotation(category_id=1)],
        categories=named("Square ", "CIRCLE", "triangle"),
    )
    yield coco("names in another order", [annotation(category_id=3)], categories=named("triangle", "circle", "square"))
    yield coco(
        "one name that does not match",
        [annotation()],
        categories=named("circle", "sqare", "triangle"),
        refused="Categories: 1: circle, 2: sqare, 3: triangle.*Classes: circle, square, .*Not a class: 2: sqare",
    )
    yield coco(
        "one name in another case, one unknown",
        [annotation()],
        categories=named("Circle", "star", "box"),
        refused="Not a class: 2: star, 3: box",
    )
    yield coco(
        "no name that matches",
        [annotation()],
        (BOX,),
        r"instances\.json: has categories with other names .* in the order of their ids: "
        r"1: Kreis is circle, 2: Quadrat is square, 3: Dreieck is triangle",
        categories=named("Kreis", "Quadrat", "Dreieck"),
    )
    yield coco(
        "no name that matches, of another number",
        [annotation()],
        categories=named("Kreis", "Quadrat"),
        refused="do not match the 3 classes",
    )
    yield coco(
        "a category without annotations and class", [annotation()], categories=[*CATEGORIES, {"id": 9, "name": "star"}]
    )
    yield coco("an unused category for an unused class", [annotation()], categories=named("disc", "square", "triangle"))
    yield coco(
        "two categories with one id",
        [annotation()],
        categories=[*CATEGORIES, {"id": "2", "name": "star"}],
        refused="categories with the same id",
    )
    yield coco(
        "two categories with one name",
        [annotation()],
        categories=[*CATEGORIES, {"id": 4, "name": "Square"}],
        refused=r"2: square and 4: Square are two categories of the class 'square'",
    )
    yield coco(
        "Roboflow's first category",
        [annotation()],
        categories=[{"id": 0, "name": "square", "supercategory": "none"}, *CATEGORIES],
    )

    # images
    yield coco(
        "two images with one id",
        [annotation()],
        images=[IMAGES[0], {**IMAGES[1], "id": "1"}],
        refused=r"a\.png and .*b\.png have the same id '1'",
    )
    yield coco(
        "one image twice, and one of them has annotations",
        [annotation(image_id=3)],
        (BOX,),
        r"a\.png: is listed 2 times by instances\.json",
        images=[*IMAGES, {**IMAGES[0], "id": 3}],
    )
    yield coco(
        "two merged videos whose frames have the same names",
        [annotation(), annotation(id=2, image_id=3, bbox=[0, 0, 8, 8], category_id=1)],
        refused=r"the images with the ids 1 and 3 have the same file_name, a\.png, and annotations each",
        images=[*IMAGES, {**IMAGES[0], "id": 3}],
    )
    yield coco(
        "an annotation with the names of its category and image",
        [annotation(category_name="Square", file_name="frames\\A.png")],
    )
    yield coco("an annotation with its image's name without suffix", [annotation(category_name=None, file_name="a")])
    yield coco(
        "an annotation with another category's name",
        [annotation(), annotation(id=2, category_name="circle")],
        (BOX,),
        r"annotation 2: has the category_name 'circle', but its category_id 2 is 'square'",
    )
    yield coco(
        "an annotation with another image's name",
        [annotation(), annotation(id=2, file_name="b.png")],
        (BOX,),
        r"annotation 2: has the file_name 'b\.png', but its image_id 1 is 'a\.png'",
    )
    yield coco(
        "two annotations with one id",
        [annotation(), {**second, "id": "1"}],
        (BOX, other),
        r"annotation 1: is the first of 1 annotations with the id of another one",
    )
    yield coco("an annotation twice", [annotation()] * 2, (BOX,), r"annotation 1: repeats an earlier row")
    yield coco(
        "a deleted annotation",
        [annotation(), {**second, "deleted": True}, {**second, "id": 3, "attributes": {"deleted": 1}}],
        (BOX,),
        r"annotation 2: is the first of 2 annotations marked deleted; they are left out",
    )
    yield coco(
        "boxes that are equal but for rounding",
        [annotation(bbox=[24.3, 16.3, 23.6, 15.9]), annotation(id=2)],
        ((1, 24.3, 16.3, 47.9, 32.2), BOX),
        r"annotation 2: is the first of 1 boxes that equal another box",
    )
    yield coco(
        "one image twice with two sizes",
        [annotation()],
        None,
        r"a\.png: is listed 2 times",
        r"a\.png: is 96 x 64 .*says 64 x 96",
        images=[*IMAGES, {**IMAGES[0], "id": 3, "width": 64, "height": 96}],
    )
    yield coco(
        "a path of Windows",
        [annotation()],
        images=[{**IMAGES[0], "file_name": ".\\a.png"}, IMAGES[1]],
    )


# The files of a split


def listed(what: str, content: str | bytes, *, file: str = "list.txt", refused: str = "") -> Case:
    """A list of a.png and b.png, in the form of VOC: `JPEGImages` and `Annotations`."""
    files = {"Annotations/a.xml": xml(item()), file: content}
    return Case("voc", what, files, yaml={"train": file, "val": file}, refused=refused)


def source_cases() -> Iterator[Case]:
    paths = "JPEGImages/a.png\nJPEGImages/b.png\n"
    yield listed("a list", paths)
    yield listed("a list in UTF-16", paths.encode("utf-16"))
    yield listed("a list with a mark and Windows' line ends", ("\ufeff" + paths.replace("\n", "\r\n")).encode())
    yield listed("a list with quotes", '"JPEGImages/a.png"\n\'JPEGImages\\b.png\',\n')
    yield listed("a list without suffixes", "JPEGImages/a\n",
                 refused=r"list\.txt:1: there is no file 'JPEGImages/a'.*; a line is the path of an image, with its s")
    main = "ImageSets/Main/train.txt"
    yield listed("VOC's list of stems", "a\nb\n", file=main)
    yield listed("VOC's list of names", "a.png\nb.png\n", file=main)
    yield listed("VOC's list of stems with another one", "a\nc\n", file=main,
                 refused=r"train\.txt:2: 'c' is no picture in .*JPEGImages")
    yield listed("VOC's list of one class", "a  1\nb -1\n", file="ImageSets/Main/square_train.txt",
                 refused=r"square_train\.txt:1: 'a  1' says whether a picture has objects of one class; use the list")
    for suffix in ("csv", "parquet", "tsv", "jsonl"):
        yield listed(f"a table, .{suffix}", "JPEGImages/a.png,1", file=f"labels.{suffix}",
                     refused=rf"train: .*labels\.{suffix} is a table, which is not read; export YOLO, COCO or Pasc")
    yield listed("records", b"\0", file="train.tfrecord", refused="has records of images, which are not read; unpack")
    yield listed("an annotation for a split", xml(), file="a.xml", refused="is an XML file; a split is a folder of im")
    flat = [{**IMAGES[0], "file_name": "c.png"}, IMAGES[1]]

    def below(what: str, files: dict[str, bytes], refused: str = "", **rest: Any) -> Case:
        case = coco(what, [annotation()], refused=refused, **rest)
        return replace(case, files={**case.files, **files})

    yield below("one name in two folders, different pictures", {"images/a.png": picture(turned=True)},
                r"its image a\.png may be .*images/a\.png or .*/a\.png, which are different pictures")
    yield below("one name in two folders, the same picture", {"images/a.png": picture(), "images/b.png": picture()})
    yield below("a flat name of pictures in two folders", {"cam1/c.png": picture(), "cam2/c.png": picture()},
                r"none of its images is in .*; c\.png is in .*cam1 and in .*cam2: a file_name needs the folder",
                images=flat[:1])
    yield below("a picture in another folder", {"cam1/c.png": picture()},
                r"; c\.png is in .*cam1: write `\{annotations: instances\.json, images: .*cam1\}`", images=flat[:1])


# Situations of public trackers: the address, and what the tool's file says


def tracker_cases() -> Iterator[Case]:
    # https://github.com/HumanSignal/labelImg/issues/376: boxes of the picture that EXIF turns, as it is stored
    yield voc(
        "labelImg 376", xml(item(), size=(WIDTH, HEIGHT)), None, r"a\.xml:2: its <size> says 96 x 64", turned=True
    )
    # https://github.com/ryouchinsa/Rectlabel-support/issues/240: a sixth column after automatic labelling, in some rows
    yield yolo(
        "RectLabel 240",
        f"{ROW}\n0 0.5 0.5 0.25 0.25 0.982",
        (BOX,),
        r"a\.txt:2: has 6 columns.*--labels-with-confidence",
    )
    # https://github.com/CVHub520/X-AnyLabeling/issues/847: a box, keypoints with visibility, zeros for absent ones
    anylabeling = "1 0.375 0.375 0.25 0.25 0.4625 0.3139 2 0.3041 0.3735 2 0 0 0 0 0 0"
    yield yolo(
        "X-AnyLabeling 847",
        f"{ROW}\n{anylabeling.replace('1 ', '0 ', 1)}",
        (BOX,),
        r"a\.txt:2: seems to be a box and keypoints.*\[4, 3\]",
    )
    # https://github.com/cvat-ai/cvat/issues/9756: keypoints far outside the image
    yield yolo(
        "CVAT 9756",
        "1 0.375 0.375 0.25 0.25 0.1378 0.3656 1 -0.1261 0.8811 0 5.8004 1.1717 0",
        yaml={"kpt_shape": [3, 3]},
    )
    # https://github.com/ultralytics/hub/issues/886: kpt_shape of 17 keypoints, rows of four
    yield yolo(
        "Ultralytics HUB 886",
        f"{ROW}\n0 0.5 0.5 0.1 0.1 0.5 0.5 2 0.5 0.5 2 0.5 0.5 2 0.5 0.5 2",
        (BOX,),
        r"a\.txt:2: has 17 columns; with kpt_shape: \[17, 3\] a row has 56",
        yaml={"kpt_shape": [17, 3]},
    )
    # https://github.com/HumanSignal/label-studio/issues/6754: kpt_shape in the YAML, rows of boxes alone
    yield yolo("Label Studio 6754", ROW, yaml={"kpt_shape": [1, 2]})
    # https://github.com/pylabel-project/pylabel/issues/6: category_id as text, iscrowd null
    yield coco("PyLabel 6", [annotation(category_id="2", iscrowd=None)])
    # https://github.com/PaddleCV-SIG/PaddleLabel/issues/172: width and height exchanged
    yield coco(
        "PaddleLabel 172",
        [annotation()],
        None,
        r"a\.png: is 96 x 64 pixels, but .* says 64 x 96 \(the sides are exchanged",
        images=sized(HEIGHT, WIDTH),
    )
    # https://github.com/voxel51/fiftyone/issues/2847: outlines that are not in their bbox
    yield coco(
        "FiftyOne 2847",
        [annotation(segmentation=[[20, 10, 60, 10, 60, 40, 20, 40]])],
        (BOX,),
        r"whose segmentation disagrees with their bbox",
    )
    # https://github.com/cvat-ai/cvat/pull/1195: `segmentation: [[]]` for a box
    yield coco("CVAT 1195", [annotation(segmentation=[[]], area=384)])
    # https://github.com/labelflow/labelflow/pull/309: category_id null
    yield coco(
        "LabelFlow 309",
        [annotation(), annotation(id=2, category_id=None)],
        (BOX,),
        r"annotation 2: has the category_id None",
    )
    # https://github.com/wkentaro/labelme/issues/552: [xmax, ymin, xmin, ymax], for boxes that were drawn from the right
    yield voc(
        "labelme 552",
        xml(item(), item("circle", (48, 17, 25, 32))),
        (BOX,),
        r"object 2: .*a minimum is above its maximum \(xmin 48",
    )


CASES = (*yolo_cases(), *voc_cases(), *coco_cases(), *source_cases(), *tracker_cases())
