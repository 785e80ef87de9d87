"""COCO annotation files (`instances_*.json`, Roboflow's `_annotations.coco.json`). Equal boxes give the same labels as
in YOLO text files. Numbers count by their value, in whatever JSON type they are written.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import Finding
from ray_yolo.labels.exports import ADVICE, tool_of
from ray_yolo.labels.files import content_of, read_or_refuse, walk
from ray_yolo.labels.other_files import resolve_names
from ray_yolo.labels.remarks import CLIPPED_PX, combine
from ray_yolo.labels.rows import (
    NO_OUTLINE,
    Box,
    ImageLabels,
    LabelRow,
    UnreadableLabelsError,
    box_around,
    cut_box,
    edge_remarks,
    labels_of,
    read_rows,
)
from ray_yolo.labels.rules import Code, Remark
from ray_yolo.labels.values import find_class, folded, identity, number, size_conflict, truth

# A bbox and the box around its outline may differ by so many pixels, or by this share of the side if that is more.
_TOLERANCE_PX = 2.0
_TOLERANCE = 0.1
_SAME_AREA = 0.02  # Two areas with at most this relative difference count as equal.
_XYWH = 1  # Detectron2's number for COCO's order of a bbox: x, y, width, height
_LISTED = 200  # A list of names in a message has at most so many characters.
_Id = int | str


class CocoFile:
    """One annotation file: the paths of its images, and the labels of each.

    Categories map to the description's classes by name. If none of the names matches, they map in the order of their
    ids, with a finding. A category without annotations (Roboflow's supercategory) may be unknown. Images are in
    `folder`, by default in one of the usual ones. `findings` has the annotations of unknown images, which are left out.
    `respelled` has the path of each image whose `file_name` is spelled otherwise; `counts_from_0` whether an annotation
    has the id 0.

    Raises:
        DatasetError: if the file is not a COCO annotation file, or its categories do not match the description.
    """

    def __init__(self, file: Path, root: Path, names: tuple[str, ...], folder: Path | None = None) -> None:
        self.file = file
        content = _read(file)
        self._classes, self.findings = _match(content, names, file)
        written = {identity(row.get("id")): row.get("id") for row in content["categories"]}
        self._category_ids = {kind: written[own_id] for own_id, kind in self._classes.items()}  # those of the file
        file_names = [_file_name(image, file) for image in content["images"]]
        folder = folder or _image_folder(file, root, file_names)
        path_of_name = {name: _path_of(folder, name) for name in file_names}
        self.respelled = resolve_names(str(folder), path_of_name)
        path_of_name |= self.respelled

        self._images: dict[str, list[dict[str, Any]]] = defaultdict(list)  # the entries of each path, mostly one
        for name, image in zip(file_names, content["images"], strict=True):
            self._images[path_of_name[name]].append(image)
        self.paths = list(self._images)  # every listed image, whether or not it exists on disk
        path_of_id = self._paths_of_ids()
        names_and_images = zip(file_names, content["images"], strict=True)
        self._file_names: dict[_Id | None, str] = {_id(image, file): name for name, image in names_and_images}
        for path, images in self._images.items():
            if len(images) > 1:
                self.findings.append(Code.LISTED_AGAIN.finding(path, len(images), file.name))

        self._category_names = {identity(row.get("id")): row.get("name") for row in content["categories"]}
        self._rows: dict[str, list[dict[str, Any]]] = {path: [] for path in self.paths}
        for row in content["annotations"]:
            owner = path_of_id.get(identity(row.get("image_id")))
            if owner is not None:
                self._rows[owner].append(row)
            else:
                self.findings.append(Code.IMAGE_ID_UNKNOWN.finding(self._place(row), short(row.get("image_id"))))
        self._refuse_joined()
        self.findings += self._same_ids(content["annotations"])
        self.counts_from_0 = any(identity(row.get("id")) == 0 for row in content["annotations"])

    def _paths_of_ids(self) -> dict[_Id | None, str]:
        """The path of each image id."""
        found: dict[_Id | None, str] = {}
        for path, images in self._images.items():
            for image in images:
                own_id = _id(image, self.file)
                if found.setdefault(own_id, path) != path:
                    raise DatasetError(f"{self.file}: {found[own_id]} and {path} have the same id "
                                       f"{short(image['id'])}; give each image its own id")
        return found

    def _refuse_joined(self) -> None:
        """Refuse a picture that several images with annotations name, as two merged videos whose frames have the same
        names: all their boxes would be on one of the pictures."""
        for path, images in self._images.items():
            if len(images) == 1:
                continue
            annotated = dict.fromkeys(identity(row.get("image_id")) for row in self._rows[path])
            if len(annotated) > 1:
                first, second = list(annotated)[:2]
                raise DatasetError(f"{self.file}: the images with the ids {short(first)} and {short(second)} have the "
                                   f"same file_name, {images[0]['file_name']}, and annotations each; give each picture "
                                   "a file_name of its own, or the annotations of one picture the same image_id")

    def _same_ids(self, rows: Iterable[dict[str, Any]]) -> Iterator[Finding]:
        """A finding about different annotations with the same id, as of files that were merged."""
        first_of_id: dict[_Id, dict[str, Any]] = {}
        again = []
        for row in rows:
            own_id = identity(row.get("id"))
            if own_id is not None and first_of_id.setdefault(own_id, row) != row:
                again.append(row)
        if again:
            yield Code.SAME_ID.finding(self._place(again[0]), len(again))

    def part(self, paths: list[str]) -> CocoFile:
        """The same file with a subset of its images."""
        chosen = copy(self)
        chosen.paths, chosen.findings = paths, []
        chosen._images = {path: self._images[path] for path in paths}
        chosen._rows = {path: self._rows[path] for path in paths}
        return chosen

    def own_ids(self, path: str) -> tuple[int | str, dict[int, object]]:
        """The file's own ids of one of `paths` and of each class."""
        return self._images[path][0]["id"], self._category_ids

    def read(self, path: str, size: tuple[int, int]) -> ImageLabels:
        """The labels of one of `paths`, an image of upright `size`. Crowds are not training labels.

        Raises:
            UnreadableLabelsError: if the size differs from the one in the file.
        """
        for image in self._images[path]:
            stated = size_conflict(size, image.get("width"), image.get("height"))
            if stated:
                raise UnreadableLabelsError(Code.COCO_OTHER_SIZE, path, size[1], size[0], self.file.name, stated)
        single, crowded, deleted = [], [], []
        for row in self._rows[path]:
            if _is_marked(row, "deleted"):
                deleted.append(row)
            elif truth(row.get("iscrowd")):
                crowded.append(row)
            else:  # also a value that is neither: `_row` reports it
                single.append(row)
        rows, findings = read_rows(single, lambda row: self._row(row, size))
        crowds, crowd_findings = read_rows(crowded, lambda row: self._row(row, size))
        labels = labels_of(rows, [*findings, *crowd_findings], "COCO")
        areas = np.array([row.area for row in rows])
        regions = np.array([(row.kind, *row.box, row.area) for row in crowds]).reshape(-1, 6)
        remarks = [Remark(Code.CROWD, self._place(row)) for row in crowded]
        remarks += [Remark(Code.COCO_DELETED, self._place(row)) for row in deleted]
        return labels._replace(areas=areas, crowds=regions, remarks=combine([*labels.remarks, *remarks]))

    def _row(self, row: dict[str, Any], size: tuple[int, int]) -> LabelRow:
        place = self._place(row)
        category = identity(row.get("category_id"))
        if category is None or category not in self._classes:
            raise UnreadableLabelsError(Code.CATEGORY_UNKNOWN, place, short(row.get("category_id")))
        self._refuse_contradiction(row, category, place)
        if truth(row.get("iscrowd")) is None:
            raise UnreadableLabelsError(Code.ISCROWD_UNCLEAR, place, short(row.get("iscrowd")))
        mode = row.get("bbox_mode")
        if mode is not None and number(mode) != _XYWH:
            raise UnreadableLabelsError(Code.BBOX_MODE, place, short(mode), _XYWH)
        kind = self._classes[category]
        bbox = _bbox(row, place)
        try:
            box = cut_box(bbox.corners, size)
        except ValueError:
            raise UnreadableLabelsError(Code.COCO_NO_BOX, place, str(row.get("bbox"))[:80]) from None
        outline, outline_remarks = _outline(row, bbox, box, size)
        area = number(row.get("area"))
        remarks = {*outline_remarks, *edge_remarks(bbox.corners, size)}  # a set: outline and area may say the same
        remarks |= set(_contradictions(bbox, area))
        remarks |= set(_unused_marks(row))
        if not bbox.fits_around_centre(size):
            remarks.add(Code.ONE_READING)
        if area is None or area < 0:
            area = (box[2] - box[0]) * (box[3] - box[1])
        return LabelRow(place, (kind, *box), kind, box, outline, area, tuple(remarks))

    def _refuse_contradiction(self, row: dict[str, Any], category: _Id, place: str) -> None:
        """Refuse an annotation whose ids name another category or image than its own `category_name` and `file_name`,
        which some tools repeat there."""
        name, of_id = row.get("category_name"), self._category_names[category]
        if isinstance(name, str) and folded(name) != folded(str(of_id)):
            own_id = short(row["category_id"])
            raise UnreadableLabelsError(Code.OTHER_CATEGORY, place, short(name), own_id, short(of_id))
        file_name = row.get("file_name")
        if not isinstance(file_name, str) or not file_name.strip():
            return
        of_id = self._file_names[identity(row.get("image_id"))]
        if not _same_file(file_name, of_id):
            raise UnreadableLabelsError(Code.OTHER_IMAGE, place, short(file_name), short(row["image_id"]), short(of_id))

    def _place(self, row: dict[str, Any]) -> str:
        return f"{self.file}: annotation {str(row.get('id'))[:80]}"


def _unused_marks(row: Mapping[str, Any]) -> Iterator[Code]:
    """Remarks about what an annotation says and nothing here reads: that it is to be ignored, and a turned box."""
    if _is_marked(row, "ignore", "difficult"):
        yield Code.COCO_IGNORED
    turns = [number(each.get(name)) for each in _marks(row) for name in ("rotation", "angle")]
    if any(turn is not None and turn % 360 for turn in turns):
        yield Code.COCO_ROTATION


def _is_marked(row: Mapping[str, Any], *names: str) -> bool:
    """Whether an annotation, or its attributes, have one of these flags set."""
    return any(truth(each.get(name)) for each in _marks(row) for name in names)


def _marks(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    attributes = row.get("attributes")
    return [row, attributes] if isinstance(attributes, dict) else [row]


class _Bbox(NamedTuple):
    """The four numbers of a bbox."""

    x: float
    y: float
    width: float
    height: float

    @property
    def corners(self) -> Box:
        return self.x, self.y, self.x + self.width, self.y + self.height

    @property
    def area(self) -> float:
        return self.width * self.height

    def fits_around_centre(self, size: tuple[int, int]) -> bool:
        """Whether x and y could be the centre of a box in an image of this size."""
        half_width, half_height = self.width / 2, self.height / 2
        fits_across = half_width <= self.x + CLIPPED_PX and self.x + half_width <= size[1] + CLIPPED_PX
        fits_down = half_height <= self.y + CLIPPED_PX and self.y + half_height <= size[0] + CLIPPED_PX
        return fits_across and fits_down

    @property
    def has_corner_order(self) -> bool:
        """Whether the numbers could be corners: x1, y1, x2, y2."""
        return self.width > self.x and self.height > self.y


def _read(file: Path) -> dict[str, Any]:
    text = read_or_refuse(content_of, file)
    if text is None:
        raise DatasetError(f"{file}: is not a file; expected COCO's annotations")
    try:
        content = json.loads(text, object_pairs_hook=_mapping)
    except DatasetError as error:
        raise DatasetError(f"{file}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file}: is not a JSON file: {error}; write or download it again") from None
    if tool := tool_of(content):
        raise DatasetError(f"{file}: is a file of {tool}, which is not read; {ADVICE}")
    for key in ("images", "annotations", "categories"):
        rows = content.get(key) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DatasetError(f"{file}: has no list of {key}; expected COCO's images, annotations and categories")
    return content


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A key with two values is refused: of merged files, only the last `annotations` would be read."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        for key, value in pairs:
            if mapping[key] != value:
                raise DatasetError(f"the key {short(key)} has two values in an object, and only the last one would be "
                                   "read; merge them")
    return mapping


def _id(row: dict[str, Any], file: Path) -> _Id:
    found = identity(row.get("id"))
    if found is None:
        raise DatasetError(f"{file}: an entry has no id: {str(row)[:80]}")
    return found


def _file_name(image: dict[str, Any], file: Path) -> str:
    name = image.get("file_name")
    if isinstance(name, bool) or not isinstance(name, (int, str)):
        raise DatasetError(f"{file}: an entry has no file_name: {str(image)[:80]}")
    with suppress(UnicodeEncodeError):  # half a surrogate pair
        if b"\0" not in os.fsencode(str(name)):
            return str(name)
    raise DatasetError(f"{file}: an entry has the file_name {str(name)[:80]!r}, which no file can have")


def _path_of(folder: Path, name: str) -> str:
    """The path of an image. Backslashes are Windows' slashes if there is no file with such a name."""
    path = os.path.normpath(folder / name)
    if "\\" in name and not os.path.isfile(path):
        return os.path.normpath(folder / name.replace("\\", "/"))
    return path


def _same_file(one: str, other: str) -> bool:
    """Whether two names may be those of one file. Either may lack leading folders or the suffix."""
    parts, others = (folded(name).replace("\\", "/").split("/") for name in (one, other))
    common = min(len(parts), len(others)) - 1
    last, other_last = parts[-1], others[-1]
    same_last = last == other_last or last == os.path.splitext(other_last)[0] or os.path.splitext(last)[0] == other_last
    return same_last and parts[-1 - common:-1] == others[-1 - common:-1]


def _match(content: dict[str, Any], names: tuple[str, ...], file: Path) -> tuple[dict[_Id, int], list[Finding]]:
    """The class of each category id, and a finding if no name matches.

    Categories that are neither a class nor used by an annotation have none.
    """
    used = {identity(row.get("category_id")) for row in content["annotations"]}
    rows = _categories(content, used, file)
    classes: dict[_Id, int] = {}
    unknown = []  # ids of the categories that have no class's name
    for own_id, row in rows.items():
        kind = find_class(row.get("name"), names)
        if kind is None:
            unknown.append(own_id)
        else:
            classes[own_id] = kind
    # Two categories of one class would both be labels of it.
    first: dict[int, _Id] = {}
    for own_id, kind in classes.items():
        if first.setdefault(kind, own_id) != own_id:
            raise DatasetError(f"{file}: {_text(rows[first[kind]])} and {_text(rows[own_id])} are two categories of "
                               f"the class {names[kind]!r}; give each category its own name")
    all_used_known = not any(own_id in used for own_id in unknown)
    if all_used_known and (classes or len(rows) > len(names)):
        return classes, []

    # If no name matches and there are as many categories as classes, they map by the order of ids.
    candidates = list(rows) if len(rows) <= len(names) else [own_id for own_id in rows if own_id in used]
    if classes or len(candidates) != len(names):
        strange = [_text(rows[own_id]) for own_id in unknown if own_id in candidates]
        raise DatasetError(f"{file}: its {len(rows)} categories do not match the {len(names)} classes of the "
                           f"description. Categories: {_listed(_text(row) for row in rows.values())}. Classes: "
                           f"{_listed(names)}. Not a class: {_listed(strange)}; correct `names` or the file")
    by_order = {own_id: kind for kind, own_id in enumerate(sorted(candidates, key=_order))}
    _refuse_same_names([rows[own_id] for own_id in candidates], file)
    mapping = [f"{_text(rows[own_id])} is {names[kind]}" for own_id, kind in by_order.items()]
    return by_order, [Code.OTHER_NAMES.finding(str(file), _listed(mapping))]


def _categories(content: dict[str, Any], used: set[_Id | None], file: Path) -> dict[_Id, dict[str, Any]]:
    """The categories by id, without Roboflow's root: it has the data set's name and no annotations. It is the
    supercategory of the others, or one of them has its name, too."""
    rows: dict[_Id, dict[str, Any]] = {}
    for row in content["categories"]:
        own_id = _id(row, file)
        if own_id in rows:
            raise DatasetError(f"{file}: {_text(rows[own_id])} and {_text(row)} are categories with the same id; give "
                               "each category its own id")
        rows[own_id] = row
    names = Counter(folded(str(row.get("name"))) for row in rows.values())
    parents = {folded(str(row.get("supercategory"))) for row in rows.values()} - {"none"}
    kept = {}
    for own_id, row in rows.items():
        name = folded(str(row.get("name")))
        is_unused_top = row.get("supercategory") == "none" and own_id not in used
        if not (is_unused_top and (name in parents or names[name] > 1)):
            kept[own_id] = row
    return kept


def _refuse_same_names(rows: Sequence[dict[str, Any]], file: Path) -> None:
    seen: set[str] = set()
    for row in rows:
        name = row.get("name")
        if isinstance(name, str) and name in seen:
            raise DatasetError(f"{file}: two categories have the name {short(name)}; give each category its own name")
        if isinstance(name, str):
            seen.add(name)


def _order(own_id: _Id) -> tuple[bool, _Id]:
    return isinstance(own_id, str), own_id


def _text(category: dict[str, Any]) -> str:
    return f"{str(category.get('id'))[:20]}: {str(category.get('name', '(no name)'))[:40]}"


def _listed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return text if len(text) <= _LISTED else f"{text[:_LISTED]}..."


def _image_folder(file: Path, root: Path, file_names: list[str]) -> Path:
    """The folder of the images: beside the annotations or one of COCO's usual folders."""
    split = file.stem.removeprefix("instances_")
    folders: list[Path] = []
    for base in (file.parent, file.parent.parent, root):
        folders += [base / "images" / split, base / split, base / "images", base]
    first_names = file_names[:100]  # some files of a partial copy may be missing
    folders = list(dict.fromkeys(folders))
    holding = [folder for folder in folders if any(os.path.isfile(_path_of(folder, name)) for name in first_names)]
    if holding:
        _refuse_other_pictures(holding, first_names, file)
        return holding[0]
    for folder in folders:  # The pictures may be there in another spelling.
        if resolve_names(str(folder), {name: _path_of(folder, name) for name in first_names}):
            return folder
    raise DatasetError(f"{file}: none of its images is in {', '.join(map(str, folders))}"
                       f"{_elsewhere(root, first_names, file)}")


def _refuse_other_pictures(folders: Sequence[Path], names: Sequence[str], file: Path) -> None:
    """Refuse names that are different pictures in the usual folders: one of them has the labels of the other."""
    for name in names:
        paths = [path for path in (_path_of(folder, name) for folder in folders) if os.path.isfile(path)]
        for first, other in pairwise(paths):
            if not os.path.samefile(first, other) and not filecmp.cmp(first, other, shallow=False):
                raise DatasetError(f"{file}: its image {name} may be {first} or {other}, which are different pictures; "
                                   f"say which folder is meant: `{{annotations: {file.name}, images: FOLDER}}`")


def _elsewhere(root: Path, names: Sequence[str], file: Path) -> str:
    """Where below the data set's root the first of some images that is there lies; '' if none is."""
    wanted = {os.path.basename(name.replace("\\", "/")) for name in names}
    places = defaultdict[str, list[str]](list)
    for folder, files in walk(str(root)):
        for name in wanted.intersection(files):
            places[name].append(folder)
    if not places:
        return ""
    name = next((name for name, folders in places.items() if len(folders) > 1), next(iter(places)))
    found = places[name]
    if len(found) > 1:
        return (f"; {name} is in {' and in '.join(sorted(found)[:3])}: a file_name needs the folder of its picture, "
                f"such as {os.path.basename(found[0])}/{name}")
    return f"; {name} is in {found[0]}: write `{{annotations: {file.name}, images: {found[0]}}}`"


def _bbox(row: dict[str, Any], place: str) -> _Bbox:
    bbox = row.get("bbox")
    sides = [number(side) for side in bbox] if isinstance(bbox, list) else []
    known = [side for side in sides if side is not None]
    if len(sides) != 4 or len(known) != 4:
        raise UnreadableLabelsError(Code.COCO_NO_BOX, place, str(bbox)[:80])
    return _Bbox(*known)


def _outline(row: dict[str, Any], bbox: _Bbox, box: Box, size: tuple[int, int]) -> tuple[np.ndarray, tuple[Code, ...]]:
    """The outline of an object in one part, with remarks on the segmentation.

    Empty for several parts, run lengths, or none, and if the segmentation disagrees with the bbox.
    """
    segmentation = row.get("segmentation")
    if isinstance(segmentation, dict):  # Run lengths are not used, but their size is a statement about the image.
        sides = segmentation.get("size")
        is_other_size = isinstance(sides, list) and len(sides) == 2 and size_conflict(size, sides[1], sides[0])
        return NO_OUTLINE, (Code.OTHER_OUTLINE,) if is_other_size else ()
    parts = _parts(segmentation)
    rings = [ring for ring in map(_ring, parts) if ring is not None]
    if not rings:
        return NO_OUTLINE, (Code.BAD_OUTLINE,) if parts else ()
    around = box_around(np.concatenate(rings))
    if not _agree(cut_box(around, size), box):
        as_corners: Box = (bbox.x, bbox.y, bbox.width, bbox.height)
        if bbox.has_corner_order and _agree(around, as_corners):
            return NO_OUTLINE, (Code.OTHER_OUTLINE, Code.CORNERS)
        return NO_OUTLINE, (Code.OTHER_OUTLINE,)
    if len(parts) > 1:  # such as those of a partly hidden object: there is no single outline
        return NO_OUTLINE, ()
    return rings[0].clip(0, (size[1], size[0])).astype(np.float32), ()


def _parts(segmentation: object) -> list[Any]:
    """The parts of a segmentation that are not empty. A list of numbers is one part."""
    if not isinstance(segmentation, list):
        return []
    if segmentation and not any(isinstance(part, (list, dict)) for part in segmentation):
        return [segmentation]
    return [part for part in segmentation if part != []]


def _ring(part: object) -> np.ndarray | None:
    """The points (k, 2) of a part, k >= 3; None if it is no outline."""
    if not isinstance(part, list) or len(part) < 6 or len(part) % 2:
        return None
    try:
        ring = np.array(part, np.float64)  # much faster than `number` of each
    except (TypeError, ValueError, OverflowError):
        return None
    return ring.reshape(-1, 2) if ring.ndim == 1 and np.isfinite(ring).all() else None


def _agree(one: Box, other: Box) -> bool:
    """Whether two boxes are equal, but for two pixels or a tenth of the second one's side."""
    across = max(_TOLERANCE_PX, _TOLERANCE * (other[2] - other[0]))
    down = max(_TOLERANCE_PX, _TOLERANCE * (other[3] - other[1]))
    tolerances = (across, down, across, down)
    return all(abs(a - b) <= tolerance for a, b, tolerance in zip(one, other, tolerances, strict=True))


def _contradictions(bbox: _Bbox, area: float | None) -> tuple[Code, ...]:
    """Remarks on the order of a bbox's numbers, and on an area that disagrees with them."""
    remarks = [Code.CORNER_ORDER] if bbox.has_corner_order else []
    if area is None or area <= 0:
        return tuple(remarks)
    area_as_corners = (bbox.width - bbox.x) * (bbox.height - bbox.y)
    if bbox.has_corner_order and _same_area(area_as_corners, area) and not _same_area(bbox.area, area):
        remarks.append(Code.CORNERS)
    largest = (bbox.width + _TOLERANCE_PX) * (bbox.height + _TOLERANCE_PX) * (1 + _TOLERANCE)
    if area > largest:
        remarks.append(Code.LARGE_AREA)
    return tuple(remarks)


def _same_area(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_AREA * other

