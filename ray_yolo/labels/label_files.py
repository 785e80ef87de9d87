"""The files of a split: its images in sorted order, and the label files of each."""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Sequence
from copy import copy
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from ray_yolo.core.errors import DatasetError
from ray_yolo.core.files import read_patiently
from ray_yolo.core.structures import Finding, OtherFiles
from ray_yolo.labels import voc
from ray_yolo.labels.class_files import compare_class_files
from ray_yolo.labels.coco import CocoFile
from ray_yolo.labels.dataset_hints import explain_source
from ray_yolo.labels.description import DatasetDescription
from ray_yolo.labels.files import SUFFIXES, UNREAD_SUFFIXES, files_of, names_in, suffix
from ray_yolo.labels.notes import counted
from ray_yolo.labels.other_files import find_other_files
from ray_yolo.labels.rows import DEFAULT_OPTIONS, ImageLabels, LabelOptions, LabelRules, UnreadableLabelsError
from ray_yolo.labels.rules import Code, Remark
from ray_yolo.labels.yolo_txt import label_path, parse_labels

_BESIDE = {"COCO": Code.BESIDE_COCO, "text": Code.BESIDE_TEXT, "XML": Code.BESIDE_XML}  # files that are read
MAX_BYTES = 16 * 2**20  # A label file has at most so many, for some 400,000 boxes: more than any image has.


class LabelSources:
    """The images of a split and the reader of their labels.

    A `.json` file, or a folder with `instances_<split>*.json` or `_annotations.coco.json`, is a COCO source with the
    listed images. Every other image has a YOLO text file, a VOC file, or no labels.

    Attributes:
        paths: absolute paths in sorted order, each once unless the options keep repeats.
        findings: about whole files.
        other_files: label files and pictures that the split does not use, or only under another spelling.

    Raises:
        DatasetError: if the split is not described, a source cannot be read, or there are no images.
    """

    def __init__(self, description: DatasetDescription, split: str, options: LabelOptions = DEFAULT_OPTIONS) -> None:
        self._rules = LabelRules(description.names, description.keypoints, options)
        self._coco: dict[str, CocoFile] = {}
        self.findings: list[Finding] = []
        images: Counter[str] = Counter()  # how often each image counts
        roots: list[str] = []
        unread: list[str] = []
        for source in description.split(split):
            coco_files = _coco_files(Path(source), split)
            if coco_files:
                folder = description.image_folders.get(source)
                for file in coco_files:
                    self._add_coco(CocoFile(file, description.root, description.names,
                                            Path(folder) if folder else None))
                continue
            if os.path.isfile(source) and (wrong_kind := explain_source(Path(source))):
                raise DatasetError(f"{description.file}: {split}: {source} {wrong_kind}")
            is_list = suffix(source) == ".txt" and os.path.isfile(source)
            files = [os.path.normpath(path) for path in files_of(source, description.root)]
            found = Counter(path for path in files if is_list or suffix(path) in SUFFIXES)
            if os.path.isdir(source):
                roots.append(os.path.normpath(source))
                unread += [path for path in files if suffix(path) in UNREAD_SUFFIXES]
                unread += [path for path in description.not_fetched if path.startswith(f"{source}/")]
            if options.keep_repeats and split == "train":
                images += found
                continue
            if is_list:
                self.findings += _repeated_lines(found, source, split)
            if again := sorted(found.keys() & images.keys()):
                remedy = " (--keep-repeats counts it in each)" if split == "train" else ""
                self.findings.append(Code.EARLIER_SOURCE.finding(source, counted(again, "image"), remedy))
            images |= Counter(found.keys())  # each once
        with_own_labels = sorted(images.keys() - self._coco.keys())
        images |= Counter(self._coco.keys())
        self.paths = sorted(images.elements())
        if not self.paths:
            others = f"; {counted(unread, 'picture')} in formats that are not read: use JPEG or PNG" if unread else ""
            raise DatasetError(f"{description.file}: {split}: no images in {', '.join(description.split(split))} "
                               f"(looked for {', '.join(sorted(SUFFIXES))}{others}); correct the path")
        if description.snapshot:
            top = f"{description.snapshot.folder}/"
            outside = next((path for path in self.paths if not path.startswith(top)), None)
            if outside is not None:
                raise DatasetError(f"{description.file}: {split}: {outside} is not in the store of the data set; write "
                                   "paths in list files and COCO files relative to the data set")
        folders = {os.path.dirname(label_path(path)) for path in with_own_labels}
        folders |= {os.path.dirname(path) for path in with_own_labels}
        self.findings += compare_class_files(description.names, description.file, description.root, sorted(folders))
        self.other_files = find_other_files(with_own_labels, roots, unread)
        self._matched = dict(self.other_files.matched)

    def _add_coco(self, coco: CocoFile) -> None:
        """Add the images of an annotation file, and the findings about it."""
        again = [path for path in coco.paths if path in self._coco]
        if again:
            other = self._coco[again[0]].file
            raise DatasetError(f"{coco.file}: lists {counted(again, 'image')} that {other} lists as well; put all "
                               "annotations of an image into one file")
        self._coco.update(dict.fromkeys(coco.paths, coco))
        self.findings += coco.findings
        if coco.respelled:
            pairs = [f"{name} is {path}" for name, path in coco.respelled.items()]
            self.findings.append(Code.RESPELLED.finding(str(coco.file), counted(pairs, "image")))

    def part(self, paths: list[str]) -> LabelSources:
        """A subset of the images with the data to read them, small enough to send to a process."""
        chosen = copy(self)
        chosen.paths, chosen.findings, chosen.other_files = paths, [], OtherFiles()
        chosen._matched = {path: self._matched[path] for path in paths if path in self._matched}
        paths_of = defaultdict[CocoFile, list[str]](list)
        for path in paths:
            if path in self._coco:
                paths_of[self._coco[path]].append(path)
        chosen._coco = {}
        for file, own_paths in paths_of.items():
            chosen._coco |= dict.fromkeys(own_paths, file.part(own_paths))
        return chosen

    def label_files(self, path: str) -> list[str]:
        """The files that determine an image's labels and the remarks on them, whether or not they exist."""
        if path in self._coco:
            return [str(self._coco[path].file), *_own_files(path)]
        if path in self._matched:
            return [label_path(path), self._matched[path]]
        return _own_files(path)

    @property
    def counted_from_0(self) -> str:
        """A COCO file with an annotation of the id 0; '' if there is none."""
        return next((str(file.file) for file in self._coco.values() if file.counts_from_0), "")

    def own_ids(self, path: str) -> tuple[int | str, dict[int, object]]:
        """A COCO file's ids of an image and its classes. For other images, as in YOLOv5, the stem (as an integer if it
        is one) and no class ids."""
        if path in self._coco:
            return self._coco[path].own_ids(path)
        stem = Path(path).stem
        own_id = int(stem) if stem.isdecimal() else stem
        return own_id, {}

    @property
    def looked_for(self) -> tuple[str, ...]:
        """The searched label paths: COCO files, and patterns for the folders of other labels."""
        # Dicts as sets that keep the order.
        coco = dict.fromkeys(str(file.file) for file in self._coco.values())
        folders = dict.fromkeys(os.path.dirname(path) for path in self.paths if path not in self._coco)
        texts: dict[str, None] = {}
        xmls: dict[str, None] = {}
        for folder in folders:
            image = f"{folder}/any.jpg"
            texts[f"{os.path.dirname(label_path(image))}/*.txt"] = None
            xmls |= dict.fromkeys(f"{xml_folder}/*.xml" for xml_folder in voc.folders(image))
        return (*coco, *texts, *xmls)

    def read_labels(self, path: str, size: tuple[int, int]) -> ImageLabels:
        """The labels of an image of upright `size`.

        Raises:
            UnreadableLabelsError: if its labels cannot be read at all.
            OSError: if storage fails in each of several tries.
        """
        if path in self._coco:
            labels = self._coco[path].read(path, size)
            return _with_unread(labels, "COCO", [file for file in _own_files(path) if os.path.isfile(file)])
        for file in self.label_files(path):
            content = read_patiently(_content, file)
            if content is None:
                continue
            annotations = [str(xml) for xml in voc.annotation_paths(path)]
            if suffix(file) == ".xml":
                labels = voc.parse_voc(content, size, self._rules, file)
                return _with_unread(labels, "XML", [xml for xml in annotations if xml != file])
            labels = parse_labels(content, size, self._rules, file)
            return _with_unread(labels, "text", annotations)
        return ImageLabels(has_file=False)


def _own_files(path: str) -> list[str]:
    """The label files that an image has, or would have, of its own."""
    return [label_path(path), *(str(xml) for xml in voc.annotation_paths(path))]


def _with_unread(labels: ImageLabels, read: Literal["COCO", "text", "XML"], unread: Sequence[str]) -> ImageLabels:
    """The labels with a remark on each file that is not read, because the image has labels of another kind too."""
    if not unread:
        return labels
    return labels._replace(remarks=(*labels.remarks, *(Remark(_BESIDE[read], file) for file in unread)))


def _coco_files(source: Path, split: str) -> list[Path]:
    """The COCO files of a source: itself, or those in its folder."""
    if source.suffix.lower() == ".json":
        return [source]
    if not os.path.isdir(source):
        return []
    files = [source / name for name in names_in(source)
             if fnmatch(name, f"instances_{split}*.json") or name == "_annotations.coco.json"]
    if split == "train":  # instances_trainval.json has the images of both splits
        files = [file for file in files if not file.name.startswith("instances_trainval")]
    return sorted(files)


def _repeated_lines(counts: Counter[str], source: str, split: str) -> list[Finding]:
    """A finding about the images that a list file has more than once."""
    repeated = [path for path, count in counts.items() if count > 1]
    if not repeated:
        return []
    remedy = " (--keep-repeats counts every line)" if split == "train" else ""
    lines = sum(counts.values())
    return [Code.REPEATED_LINES.finding(source, lines - len(counts), lines, len(repeated), repeated[0], remedy)]


def _content(file: str) -> bytes | None:
    """The bytes of a label file; None if there is none."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may block forever
            raise UnreadableLabelsError(Code.NO_PLAIN_FILE, file)
        if status.st_size > MAX_BYTES:
            raise UnreadableLabelsError(Code.TOO_LARGE, file, MAX_BYTES // 2**20)
        return Path(file).read_bytes()
    except FileNotFoundError:
        if os.path.islink(file):  # a set whose label files were not fetched has such links
            raise UnreadableLabelsError(Code.BROKEN_LINK, file) from None
        return None
