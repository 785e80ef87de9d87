"""The other side of a scan: label files that no image takes, and pictures that are not read.

A missing label file states that an image is background. If a label file without an image lies nearby, and its name
differs only in spelling (case, percent encoding, Unicode normal form, folder), the statement would be wrong. Such a
file is matched if it fits exactly one image, and exactly one file fits the image. Everything else is reported.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from ray_yolo.core.structures import OtherFiles
from ray_yolo.labels import voc
from ray_yolo.labels.exports import tool_of_file
from ray_yolo.labels.files import SUFFIXES, suffix, walk
from ray_yolo.labels.yolo_txt import label_path

_LABEL_SUFFIXES = (".txt", ".xml")
_LABEL_FOLDERS = ("labels", "Labels", "LABELS", "annotations", "Annotations", "annots")
_OWNERS = (("labels", "images"), ("Annotations", "JPEGImages"), *((name, "images") for name in voc.USUAL))
# Stems of text files that tools write beside labels. With a number at its end, as train_0001, a file is no companion.
_COMPANIONS = re.compile(
    r"_.*|(classes|licen[cs]e|names|notes|readme)([._-].*)?|"
    r"labels?|label_?map|obj|predefined_classes|test|train|trainval|val|valid", re.IGNORECASE | re.DOTALL)

_UPLOAD = re.compile(r"^[0-9a-f]{8}-(?=.)")  # Label Studio's prefix of uploaded files


class _Folder(NamedTuple):
    """A folder of images, with the folders of their label files."""

    path: str
    texts: str
    """The folder of the text files by the layout's rule."""
    xmls: Sequence[str]
    """The folders of the XML files by the layout's rule."""
    mirrors: Sequence[str]
    """Other folders that may hold label files of this folder's images alone."""
    common: Sequence[str]
    """Other folders that may hold label files of more images."""


class _Listing(dict[str, Sequence[str]]):
    """The visible names in each folder, read once; empty for a missing folder."""

    def __missing__(self, folder: str) -> Sequence[str]:
        try:
            names = [name for name in os.listdir(folder) if not name.startswith(".")]
        except OSError:  # The folder does not exist, or the scan of images has reported that it cannot be read.
            names = []
        self[folder] = names
        return names


def label_folders(folder: str) -> tuple[list[str], list[str]]:
    """The folders that may hold label files of a folder of images under another name than the layout's rule: those for
    this folder alone, and those for more folders."""
    parts = folder.split("/")
    mirrors, common = [folder], []
    for place, part in enumerate(parts):
        if part.lower() != "images":
            continue
        for name in _LABEL_FOLDERS:
            mirrors.append("/".join([*parts[:place], name, *parts[place + 1:]]))
            common.append("/".join([*parts[:place], name]))
    for name in _LABEL_FOLDERS:
        mirrors.append(f"{folder}/{name}")
        common.append(f"{os.path.dirname(folder)}/{name}")
    return mirrors, common


def find_other_files(paths: Sequence[str], roots: Iterable[str], unread: Sequence[str]) -> OtherFiles:
    """Compare the images of a split with the label files in its folders.

    Args:
        paths: of the images whose labels are YOLO or VOC files.
        roots: folders that the description names as sources.
        unread: pictures in these folders in formats that are not read.
    """
    listing = _Listing()
    stems, rules = _Stems(listing), _Rules()
    names_in = defaultdict[str, list[str]](list)
    for path in dict.fromkeys(paths):
        names_in[os.path.dirname(path)].append(os.path.basename(path))
    folders = {path: _Folder(path, *rules[path], *label_folders(path)) for path in names_in}

    # The images without a label file by the rule, and those that share one: a.jpg and a.png have a.txt.
    without: list[str] = []
    shared: list[str] = []
    for folder in folders.values():
        labelled = {name.removesuffix(".txt") for name in listing[folder.texts] if name.endswith(".txt")}
        for xmls in folder.xmls:
            labelled |= {name.removesuffix(".xml") for name in listing[xmls] if name.endswith(".xml")}
        images = [(name, os.path.splitext(name)[0]) for name in names_in[folder.path]]
        uses = Counter(stem for _, stem in images)
        without += [f"{folder.path}/{name}" for name, stem in images if stem not in labelled]
        shared += [f"{folder.path}/{name}" for name, stem in images if uses[stem] > 1 and stem in labelled]
        stems[folder.path] |= uses.keys()  # a list file may name images with other suffixes

    # The label files that no image takes, in the folders for these images alone and in the label folders of each
    # source, also those of its subfolders without images.
    own: set[str] = set()
    for folder in folders.values():
        own |= {folder.texts, *folder.xmls, *folder.mirrors}
    for root in roots:
        top = os.path.dirname(label_path(f"{root}/any.jpg"))
        if top != root:
            own.update(below for below, _ in walk(top))
    found = _label_files(own, listing)
    for folder in folders.values():  # this takes most files away without a look at each
        found -= {f"{folder.texts}/{stem}.txt" for stem in stems[folder.path]}
    unowned = {file for file in found if _is_unowned(file, stems, rules)}
    orphans = {file for file in unowned if not _is_companion(file)}
    if not without:
        return OtherFiles(tuple(sorted(orphans)), tuple(sorted(unread)), shared=tuple(sorted(shared)))

    # Images without a label file may fit one under another spelling, also in folders with label files of other images.
    common: set[str] = set()
    for folder in folders.values():
        common.update(folder.common)
    fitting = {file for file in _label_files(common, listing) if _is_unowned(file, stems, rules)}
    matched = _match(without, folders, unowned | fitting)  # a companion's name may be that of an image as well
    return OtherFiles(
        labels=tuple(sorted(orphans - set(matched.values()))),
        images=tuple(sorted(unread)),
        matched=tuple(sorted(matched.items())),
        shared=tuple(sorted(shared)),
        exports=_exports(folders.values(), listing))


def _label_files(folders: Iterable[str], listing: _Listing) -> set[str]:
    """The files of some folders that may be label files."""
    files = set()
    for folder in folders:
        files |= {f"{folder}/{name}" for name in listing[folder] if name[-4:].lower() in _LABEL_SUFFIXES}
    return files


class _Stems(dict[str, set[str]]):
    """The stems of the images in each folder."""

    def __init__(self, listing: _Listing) -> None:
        super().__init__()
        self._listing = listing

    def __missing__(self, folder: str) -> set[str]:
        self[folder] = {os.path.splitext(name)[0] for name in self._listing[folder] if suffix(name) in SUFFIXES}
        return self[folder]


class _Rules(dict[str, tuple[str, Sequence[str]]]):
    """The folders of the text and XML files of each folder of images, by the layout's rule."""

    def __missing__(self, folder: str) -> tuple[str, Sequence[str]]:
        image = f"{folder}/any.jpg"
        self[folder] = os.path.dirname(label_path(image)), voc.folders(image)
        return self[folder]


def _is_unowned(file: str, stems: _Stems, rules: _Rules) -> bool:
    """Whether no image, also of another split, takes a label file by the layout's rule."""
    folder, name = os.path.split(file)
    stem, kind = os.path.splitext(name)
    candidates = [folder]
    for labels, images in _OWNERS:
        head, found, tail = f"{folder}/".rpartition(f"/{labels}/")
        if found:
            candidates.append(os.path.normpath(f"{head}/{images}/{tail}"))
    for candidate in candidates:
        if stem not in stems[candidate]:
            continue
        text_folder, xml_folders = rules[candidate]
        if (kind == ".txt" and folder == text_folder) or (kind == ".xml" and folder in xml_folders):  # not .TXT
            return False
    return True


def _is_companion(file: str) -> bool:
    """Whether a file may be one that tools write beside label files."""
    stem = os.path.splitext(os.path.basename(file))[0]
    return not stem[-1].isdigit() and _COMPANIONS.fullmatch(stem) is not None


def _match(without: Sequence[str], folders: Mapping[str, _Folder], files: set[str]) -> dict[str, str]:
    """The label file of each image that has none by the rule, where both fit only each other."""
    places = {}  # the folders of label files for each folder of images, each once
    for path, folder in folders.items():
        places[path] = dict.fromkeys((folder.texts, *folder.xmls, *folder.mirrors, *folder.common))
    matched: dict[str, str] = {}
    images = list(without)
    for key_of_image, key_of_stem in _KEYS:
        pairs, images, claimed = _pair(images, places, sorted(files), key_of_image, key_of_stem)
        files = files - claimed  # an ambiguous file is not tried with less strict keys, either
        matched |= pairs
    return matched


def _pair(images: Sequence[str], places: Mapping[str, Iterable[str]], files: Sequence[str],
          key_of_image: Callable[[str], str], key_of_stem: Callable[[str], str]
          ) -> tuple[dict[str, str], list[str], set[str]]:
    """The file of each image where an image fits one file and the file fits one image; the images that fit none; and
    the files that fit any image.

    An image fits a file in one of the places of its folder, if the file's stem has the key of the image's name.
    """
    by_key = defaultdict[tuple[str, str], list[str]](list)  # files by (place, key)
    for file in files:
        by_key[os.path.dirname(file), key_of_stem(Path(file).stem)].append(file)

    candidates: dict[str, list[str]] = {}  # the files that each image fits
    claims: Counter[str] = Counter()  # how many images fit each file
    for image in images:
        folder, name = os.path.split(image)
        key = key_of_image(name)
        candidates[image] = []
        for place in places[folder]:
            candidates[image] += by_key.get((place, key), ())
        claims.update(candidates[image])

    pairs = {}
    unmatched = []
    for image, fitting in candidates.items():
        if len(fitting) == 1 and claims[fitting[0]] == 1:
            pairs[image] = fitting[0]
        elif not fitting:  # an ambiguous image is not tried with less strict keys
            unmatched.append(image)
    return pairs, unmatched, set(claims)


def _spelling(name: str) -> str:
    """A name without differences of case, percent encoding, Unicode normal form and outer blanks."""
    return unicodedata.normalize("NFC", unquote(name)).casefold().strip()


# Keys of an image's name and of a label file's stem, the strictest first.
_KEYS: tuple[tuple[Callable[[str], str], Callable[[str], str]], ...] = (
    (lambda name: Path(name).stem, lambda stem: stem),
    (lambda name: _spelling(Path(name).stem), _spelling),
    (_spelling, _spelling),  # a.jpg.txt
    (lambda name: _spelling(Path(name).stem), lambda stem: _spelling(_UPLOAD.sub("", stem))),
    (lambda name: _spelling(name.partition(".")[0]), _spelling),  # a.txt of a.webp.jpg
)


def _exports(folders: Iterable[_Folder], listing: _Listing) -> tuple[str, ...]:
    """The first JSON file of an annotation tool beside each folder of images without labels, with the tool's name."""
    found = []
    for folder in folders:
        for place in (folder.path, folder.texts, f"{os.path.dirname(folder.path)}/ann"):
            names = sorted(name for name in listing[place] if suffix(name) == ".json")
            tool = tool_of_file(f"{place}/{names[0]}") if names else ""
            if tool:
                found.append(f"{place}/{names[0]} is a file of {tool}")
                break
    return tuple(found)


def resolve_names(folder: str, paths: Mapping[str, str]) -> dict[str, str]:
    """The file of each name that an annotation file spells otherwise, where both fit only each other.

    Args:
        folder: of the images.
        paths: by name, also of names that are no files.
    """
    listing = _Listing()
    visible: dict[str, set[str]] = {}  # sets, because the names of a folder are searched once for each image
    missing = []
    for name, path in paths.items():
        place, base = os.path.split(path)
        if place not in visible:
            visible[place] = set(listing[place])
        if base not in visible[place]:
            missing.append(name)

    used = set(paths.values())
    by_spelling: dict[str, dict[str, list[str]]] = {}  # unused images of each place
    claims = defaultdict[str, list[str]](list)  # names that fit each file
    for name in missing:
        plain = unquote(name).replace("\\", "/")
        own_place = os.path.dirname(os.path.normpath(f"{folder}/{plain}"))
        for place in dict.fromkeys((own_place, folder)):
            if place not in by_spelling:
                by_spelling[place] = _unused_images(place, listing, used)
            fitting = by_spelling[place].get(_spelling(os.path.basename(plain)), [])
            if len(fitting) == 1:
                claims[fitting[0]].append(name)
            if fitting:  # also where it is not clear which: another place would be a guess
                break
    return {names[0]: file for file, names in claims.items() if len(names) == 1}


def _unused_images(folder: str, listing: _Listing, used: set[str]) -> dict[str, list[str]]:
    """The images of a folder that no name has, by their spelling."""
    found = defaultdict[str, list[str]](list)
    for name in listing[folder]:
        if suffix(name) in SUFFIXES and f"{folder}/{name}" not in used:
            found[_spelling(name)].append(f"{folder}/{name}")
    return found
