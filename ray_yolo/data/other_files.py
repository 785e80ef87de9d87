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
from ray_yolo.data import voc
from ray_yolo.data.exports import tool_of_file
from ray_yolo.data.images import SUFFIXES
from ray_yolo.data.sources import suffix, walk
from ray_yolo.data.yolo_txt import label_path

_LABEL_SUFFIXES = (".txt", ".xml")
_LABEL_FOLDERS = ("labels", "Labels", "LABELS", "annotations", "Annotations", "annots")
# Text files that tools write beside labels.
_COMPANIONS = re.compile(
    r"_.*|(classes|labels?|label_?map|licen[cs]e|names|notes|obj|predefined_classes|readme|test|train|trainval|val|valid)"
    r"([._-].*)?", re.IGNORECASE | re.DOTALL)


class _Folder(NamedTuple):
    """A folder of images, with the folders of their label files."""

    path: str
    texts: str  # by the layout's rule
    xmls: Sequence[str]  # the same
    mirrors: Sequence[str]  # others for the images of this folder alone
    common: Sequence[str]  # others that may hold labels of more images


class _Listing(dict[str, Sequence[str]]):
    """The visible names in each folder, read once; empty for a missing folder."""

    def __missing__(self, folder: str) -> Sequence[str]:
        try:
            names = [name for name in os.listdir(folder) if not name.startswith(".")]
        except OSError:  # there is none, or the scan of images has reported it
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
    listing, images = _Listing(), defaultdict[str, list[str]](list)
    for path in paths:
        images[os.path.dirname(path)].append(os.path.basename(path))
    folders = [_folder(path) for path in images]
    without, shared = [], []
    taken, found = set[str](), set[str]()
    for folder in folders:
        names = images[folder.path]
        labelled = _labelled(folder, listing)
        stems = Counter(os.path.splitext(name)[0] for name in names)
        without += [f"{folder.path}/{name}" for name in names if os.path.splitext(name)[0] not in labelled]
        if len(stems) < len(names):
            shared += [f"{folder.path}/{name}" for name in names
                       if stems[os.path.splitext(name)[0]] > 1 and os.path.splitext(name)[0] in labelled]
        on_disk = {os.path.splitext(name)[0] for name in listing[folder.path] if suffix(name) in SUFFIXES}
        taken |= {file for stem in on_disk | set(stems) for file in labelled.get(stem, ())}
        for each in {folder.texts, *folder.xmls, *folder.mirrors}:
            found |= _label_files(each, listing)
    for root in roots:
        found |= _labels_below(root, listing)
    orphans = found - taken
    matched = _match(without, {folder.path: folder for folder in folders}, orphans, taken, listing) if without else {}
    orphans -= set(matched.values())
    exports = _exports(folders, listing) if without else ()
    return OtherFiles(tuple(sorted(orphans)), tuple(sorted(unread)), tuple(sorted(matched.items())),
                      tuple(sorted(shared)), exports)


def _folder(path: str) -> _Folder:
    image = f"{path}/any.jpg"
    mirrors, common = label_folders(path)
    return _Folder(path, os.path.dirname(label_path(image)), voc.folders(image), mirrors, common)


def _labelled(folder: _Folder, listing: _Listing) -> dict[str, list[str]]:
    """The label files by the layout's rule, by stem."""
    files = defaultdict[str, list[str]](list)
    for name in listing[folder.texts]:
        if name.endswith(".txt"):
            files[name[:-4]].append(f"{folder.texts}/{name}")
    for xmls in folder.xmls:
        for name in listing[xmls]:
            if name.endswith(".xml"):
                files[name[:-4]].append(f"{xmls}/{name}")
    return files


def _label_files(folder: str, listing: _Listing) -> set[str]:
    """The files of a folder that may be label files."""
    return {f"{folder}/{name}" for name in listing[folder]
            if suffix(name) in _LABEL_SUFFIXES and not _COMPANIONS.fullmatch(os.path.splitext(name)[0])}


def _labels_below(root: str, listing: _Listing) -> set[str]:
    """Label files in the mirror of a source folder, also in subfolders without images."""
    top = os.path.dirname(label_path(f"{root}/any.jpg"))
    if top == root:
        return set()
    return {file for folder, _ in walk(top) for file in _label_files(folder, listing)}


def _match(without: Sequence[str], folders: Mapping[str, _Folder], orphans: set[str], taken: set[str],
           listing: _Listing) -> dict[str, str]:
    """The label file of each image that has none by the rule, where both fit only each other."""
    files = set(orphans)
    for folder in folders.values():
        for each in folder.common:
            files |= _label_files(each, listing) - taken
    places = {path: dict.fromkeys((folder.texts, *folder.xmls, *folder.mirrors, *folder.common))
              for path, folder in folders.items()}
    same_stem, open_images = _pair(without, places, sorted(files), lambda image: [Path(image).stem], lambda stem: stem)
    # Some tools write a.jpg.txt: the label file's stem is the image's name.
    files -= set(same_stem.values())
    same_spelling, _ = _pair(open_images, places, sorted(files),
                             lambda image: [_spelling(Path(image).stem), _spelling(Path(image).name)], _spelling)
    return same_stem | same_spelling


def _pair(images: Sequence[str], places: Mapping[str, Iterable[str]], files: Sequence[str],
          keys_of_image: Callable[[str], Iterable[str]], key_of_stem: Callable[[str], str]
          ) -> tuple[dict[str, str], list[str]]:
    """The file of each image where an image fits one file and the file fits one image, and the images that fit none.

    An image fits a file in one of the places of its folder whose stem has one of the image's keys.
    """
    by_key = defaultdict[tuple[str, str], list[str]](list)
    for file in files:
        by_key[os.path.dirname(file), key_of_stem(Path(file).stem)].append(file)
    fits = {image: [file for place in places[os.path.dirname(image)] for key in dict.fromkeys(keys_of_image(image))
                    for file in by_key.get((place, key), ())] for image in images}
    claims = Counter(file for some in fits.values() for file in some)
    pairs = {image: some[0] for image, some in fits.items() if len(some) == 1 and claims[some[0]] == 1}
    return pairs, [image for image, some in fits.items() if not some]


def _spelling(name: str) -> str:
    """A name without differences of case, percent encoding, Unicode normal form and outer blanks."""
    return unicodedata.normalize("NFC", unquote(name)).casefold().strip()


def _exports(folders: Sequence[_Folder], listing: _Listing) -> tuple[str, ...]:
    """The first JSON file of an annotation tool beside each folder of images without labels, with the tool's name."""
    found = []
    for folder in folders:
        for place in (folder.path, folder.texts, f"{os.path.dirname(folder.path)}/ann"):
            first = next((name for name in sorted(listing[place]) if suffix(name) == ".json"), None)
            tool = tool_of_file(f"{place}/{first}") if first else ""
            if tool:
                found.append(f"{place}/{first} is a file of {tool}")
                break
    return tuple(found)


def resolve_names(folder: str, names: Sequence[str]) -> dict[str, str]:
    """The existing file of each name that an annotation file spells otherwise, where both fit only each other."""
    missing = [name for name in names if not os.path.isfile(f"{folder}/{name}")]
    listing = _Listing()
    claims = defaultdict[str, list[str]](list)
    used = {os.path.normpath(f"{folder}/{name}") for name in names}
    for name in missing:
        plain = unquote(name).replace("\\", "/")
        for place in dict.fromkeys((os.path.dirname(os.path.normpath(f"{folder}/{plain}")), folder)):
            fits = [file for other in listing[place] if suffix(other) in SUFFIXES
                    and _spelling(other) == _spelling(os.path.basename(plain))
                    and (file := f"{place}/{other}") not in used]
            if len(fits) == 1:
                claims[fits[0]].append(name)
            if fits:
                break
    return {wanted[0]: file for file, wanted in claims.items() if len(wanted) == 1}
