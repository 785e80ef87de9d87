"""What can be said about the files of a data set, and what follows: one table of rules.

A remark is a code with a place and values. The formats make remarks; the table says what each leads to and how it
reads. Decisions use codes and values, never a text.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from ray_yolo.core.structures import Finding

Then = Literal["leave out", "try again", "report", "count", "compare"]
"""What a rule leads to.

- leave out: the row is not read, or the image where the remark is about all of its labels; `--strict` refuses it.
- try again: it is left out now, but a read failed, which is no fact about the file: the next start reads it again.
- report: it is read as the text says.
- count: the same, in one finding for all of a split, with the first place.
- compare: nothing by itself; `judge` compares the counts of a split.
"""
RemarkValue = str | int | float


class Code(Enum):
    """The rules. A text is formatted with the values of the remark, and with their number `n` where it is counted."""

    def __init__(self, then: Then, text: str) -> None:
        self.then = then
        self.text = text

    # Rows of every format
    REPEATED = "report", "repeats an earlier row; counted once"
    EMPTY_BOX = "leave out", "the box is empty; the row is left out"

    # Label files
    NO_PLAIN_FILE = "leave out", "is not a plain file"
    TOO_LARGE = "leave out", "is larger than {0} MiB: not a label file"
    BROKEN_LINK = "leave out", "is a link to a file that does not exist"
    UNREACHABLE = "try again", "cannot be read: {0}"
    NO_TEXT = "leave out", "is not a text file"

    # YOLO
    DECIMAL_COMMAS = "leave out", "has numbers with a comma; write 0.5, not 0,5"
    SEPARATORS = "leave out", "has {0} columns between {1}; YOLO separates columns by blanks"
    COLUMNS = "leave out", (
        "has {0} columns; a box has 5, an outline of k points 1 + 2k with k from 3 up, and a box with keypoints needs"
        " `kpt_shape` in the data set's YAML file")
    NAME_FOR_CLASS = "leave out", "is not a row of numbers: it begins with {0!r}, not with the number of a class"
    NO_NUMBERS = "leave out", "is not a row of numbers"
    OTHER_KEYPOINTS = "leave out", "has {0} columns; with kpt_shape: [{1}, {2}] a row has {3}, or 5 without keypoints"
    CONFIDENCE_SECOND = "leave out", (
        "seems to have the confidence in the second column: the last four numbers are a box in the image, and the "
        "four after the class are none; make it the last column")
    NO_CONFIDENCE = "leave out", (
        "has {0:g} in the sixth column, which is no confidence from 0 to 1 but may be a track id or an angle; remove "
        "the column")
    SIXTH_COLUMN = "leave out", (
        "has 6 columns, and a box has 5: the last may be a confidence (add --labels-with-confidence to use the box), "
        "a track id or an angle (remove it)")
    BOXES_IN_LINE = "leave out", "seems to be {0} boxes on one line, not an outline; give each a line of its own"
    VISIBLE_KEYPOINTS = "leave out", (
        "seems to be a box and keypoints with their visibility (0, 1 or 2); add `kpt_shape: [{0}, 3]` to the data "
        "set's YAML file")
    TRACK = "leave out", (
        "seems to be a box with a confidence and the track id {0}, not an outline of 3 points; remove the last two "
        "columns")
    BOX_AND_POINTS = "leave out", (
        "seems to be a box and the points in it, not an outline: the box of the other points is its first four "
        "numbers; remove one of the two, or add `kpt_shape: [{0}, 2]` to the data set's YAML file")
    OUTSIDE = "leave out", "has values outside 0 to 1; they must be shares of the image's width and height"
    CLASS_NOT_WHOLE = "leave out", "has the class {0}, which is not a whole number"
    CLASS_UNKNOWN = "leave out", (
        "has the class {1}, but the data set names {2} classes (0-{3}); correct it or add the name")
    """Values: the class as a number and as it is written, the number of classes, the last class."""

    # Pascal VOC
    VOC_OTHER_SIZE = "leave out", "its <size> says {0}, but the image has {1} x {2} pixels"
    VOC_REPEATED_TAG = "leave out", "has more than one {0}"
    VOC_DIFFICULT_UNCLEAR = "leave out", "has the difficult {0}, which is neither 0 nor 1"
    VOC_NO_BOX = "leave out", "has no usable bndbox with xmin, ymin, xmax and ymax"
    VOC_EXCHANGED_SIDES = "leave out", "has no usable bndbox: a minimum is above its maximum ({0})"
    VOC_CLASS_UNKNOWN = "leave out", "has the class {0}, which the data set does not name; correct it or add the name"
    XML_ENTITIES = "leave out", "declares a document type or entities, which no annotation needs"
    NO_XML = "leave out", "is not XML that can be read: {0}"
    XML_TOO_DEEP = "leave out", "is nested deeper than {0}"
    OTHER_XML = "leave out", "is no VOC annotation: its first tag is <{0}>"
    STRAY_BNDBOX = "leave out", "has a <bndbox> that is not in an <object> of the annotation"

    # COCO
    COCO_OTHER_SIZE = "leave out", "is {0} x {1} pixels, but {2} says {3}"
    IMAGE_ID_UNKNOWN = "leave out", "has the image_id {0}, which no image of the file has; the row is left out"
    CATEGORY_UNKNOWN = "leave out", "has the category_id {0}, which the file's categories do not list"
    OTHER_CATEGORY = "leave out", "has the category_name {0}, but its category_id {1} is {2}; correct one of them"
    OTHER_IMAGE = "leave out", "has the file_name {0}, but its image_id {1} is {2}; correct one of them"
    ISCROWD_UNCLEAR = "leave out", "has the iscrowd {0}, which is neither 0 nor 1"
    BBOX_MODE = "leave out", (
        "has the bbox_mode {0} (of Detectron2), and here a bbox is read as x, y, width and height, which is mode {1};"
        " convert it")
    COCO_NO_BOX = "leave out", "has no usable bbox: {0}"
    LISTED_AGAIN = "report", "is listed {0} times by {1}; its annotations are joined"
    SAME_ID = "report", (
        "is the first of {0} annotations with the id of another one; each is read as one of its own (pycocotools "
        "reads only the last one of an id)")
    OTHER_NAMES = "report", (
        "has categories with other names than the description, which are mapped in the order of their ids: {0}")
    RESPELLED = "report", "has images whose files are spelled otherwise: {0}"

    # The description, its lists, and files of class names
    DOWNLOAD_CODE = "report", "download: contains code, which is never run; the data exist already"
    OTHER_KEY = "report", "{0}: is not read, and says something else than `{1}`, which is"
    CHANNELS = "report", "channels: {0} is not used; every image is read as RGB, also a grey one"
    KEY_ABOUT_LABELS = "report", "{0}: is not read; labels are those beside the images, of all images and classes"
    SAME_NAMES = "report", "names: {0} is the name of {1} classes ({2}); labels with this name belong to the first"
    REPEATED_LINES = "report", (
        "has {0} of {1} lines that repeat an earlier one, of {2} images, the first {3}; each image counts once{4}")
    EARLIER_SOURCE = "report", "has {0} of an earlier source of the split; an image counts once{1}"
    NAMES_NOT_UTF8 = "report", "is not text in UTF-8, so its class names are not compared with those of {0}"
    OTHER_NUMBER = "report", "gives class {0!r} the number {1}, but {2} {3}; the latter is used"
    OTHER_NAME = "report", "names class {0} {1!r}, but {2} {3}; the latter is used"

    # Images
    BAD_IMAGE = "leave out", "{0}"
    UNREACHABLE_IMAGE = "try again", "{0}"
    ABOUT_IMAGE = "report", "{0}"

    # Counted over a split
    COUNTED_FROM_0 = "count", (
        "is the first of {n} boxes with xmin or ymin below 1, so its tool counts pixels from 0; VOC counts from 1, "
        "and the boxes are read so, one pixel further left and up")
    DIFFICULT = "count", (
        "is the first of {n} objects marked difficult; they are left out, as YOLOv5's converter does "
        "(--keep-difficult keeps them)")
    OTHER_FILE_NAME = "count", (
        "is the first of {n} annotations whose <filename> is another one; they are used for the image with the name "
        "of the XML file")
    BESIDE_TEXT = "count", "is the first of {n} XML files that are not read, because their image has a .txt file too"
    BESIDE_XML = "count", "is the first of {n} XML files that are not read, because their image has another one that is"
    BESIDE_COCO = "count", "is the first of {n} label files that are not read, because a COCO file lists their image"
    CROWD = "count", (
        "is the first of {n} annotations marked iscrowd; crowds are not trained on (some tools mark single objects "
        "so, as CVAT does with masks: then set iscrowd to 0)")
    COCO_IGNORED = "count", (
        "is the first of {n} annotations marked ignore or difficult; they are trained on like others")
    COCO_DELETED = "count", "is the first of {n} annotations marked deleted; they are left out"
    VOC_DELETED = "count", "is the first of {n} objects marked deleted; they are left out"
    COCO_ROTATION = "count", (
        "is the first of {n} boxes with a rotation, which is not used: the upright box of its bbox is read")
    VOC_ROTATION = "count", (
        "is the first of {n} objects with a rotation, which is not used: the upright box of their bndbox is read")
    VOC_IGNORED = "count", "is the first of {n} objects marked ignore; they are trained on like others"
    LARGE_AREA = "count", (
        "is the first of {n} annotations whose area is larger than their bbox; `val --coco` uses the area")
    BAD_OUTLINE = "count", (
        "is the first of {n} annotations with a segmentation that is no outline (three or more pairs of numbers); "
        "their bbox is used alone")
    OTHER_OUTLINE = "count", (
        "is the first of {n} annotations whose segmentation disagrees with their bbox by more than 2 pixels and a "
        "tenth of a side; it is not used, their bbox is")
    NEAR_REPEAT = "count", (
        "is the first of {n} boxes that equal another box of their class and image but for rounding; each is trained "
        "on (remove one if both are one object)")

    # Compared with others of a split; the detail is the format, or the number of columns
    BOX = "compare", "is a box"
    SPECK = "compare", "has a side under one pixel"
    CLIPPED = "compare", "reaches out of its image"
    CORNER_ORDER = "compare", "could be corners by the order of its numbers"
    CORNERS = "compare", "fits its area or outline only as corners"
    ONE_READING = "compare", "fits into its image only as its format reads x and y, centre or corner"
    OUTLINE = "compare", "is an outline"
    MAY_BE_KEYPOINTS = "compare", "is an outline, or a box with keypoints"
    MAY_BE_MORE = "compare", "is a triangle, or a box and two numbers"

    def finding(self, place: str, *values: RemarkValue) -> Finding:
        """The finding about one place."""
        return Finding(place, self.text.format(*values), dropped=self.then in ("leave out", "try again"),
                       is_transient=self.then == "try again", code=self.name, values=values)


class Remark(NamedTuple):
    """How often a code holds that is counted or compared over a split, and the first place."""

    code: Code
    place: str
    detail: str = ""
    times: int = 1
