"""The description of a data set by its name: built in, a YAML file, or the address of one in a store."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ray_yolo.config.addresses import corrected_store
from ray_yolo.config.synonyms import did_you_mean
from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.data.remote import address_parts, snapshot, unread_pictures
from ray_yolo.data.synthetic import BUILT_IN, ensure_shapes
from ray_yolo.labels.dataset_hints import explain_file
from ray_yolo.labels.description import DatasetDescription, describe
from ray_yolo.storage.store import is_address


def read_description(source: str | Path) -> DatasetDescription:
    """Read the description of a data set: built-in (drawn on first use), a YAML file, or the address of one in a store.
    A data set in a store is downloaded to this machine.

    Raises:
        DatasetError: if there is no such data set or its description cannot be used.
    """
    if is_address(str(source)):
        local = snapshot(str(source))
        folder, name = address_parts(local.address)
        try:
            description = _read(Path(local.folder, name), confined=True)
        except InputError as error:
            raise DatasetError(str(error).replace(local.folder, folder)) from None
        return replace(description, file=local.address, snapshot=local, not_fetched=tuple(unread_pictures(local)))
    path = ensure_shapes(str(source)) if str(source) in BUILT_IN else Path(os.path.expanduser(source))
    if str(source) and os.path.isdir(path):  # Path("") would be the current folder
        path = _description_in(path)
    if not os.path.isfile(path):
        address = corrected_store(str(source))
        if address:
            raise DatasetError(f"{source}: no such file; for an object store, write {address}")
        near = did_you_mean(str(source), {name: name for name in BUILT_IN})
        raise DatasetError(f"{source}: no such file, and no built-in data set has this name "
                           f"({', '.join(BUILT_IN)}){near or '; give the path of a data-set YAML'}")
    return _read(path)


def _read(path: Path, *, confined: bool = False) -> DatasetDescription:
    """The description in a file. confined: as in `describe`."""
    from ray_yolo.config.yaml import load_text_yaml  # as text: names may look like numbers or booleans

    wrong_kind = explain_file(path)
    if wrong_kind:
        raise DatasetError(f"{path}: {wrong_kind}")
    content = load_text_yaml(path)
    return describe(content.data, path, content.where, confined=confined)


def _description_in(folder: Path) -> Path:
    """The YAML file of a data set's folder: data.yaml, else the only one."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())
    usual = folder / "data.yaml"
    if usual in files:
        return usual
    if not files:
        raise DatasetError(f"{folder}: holds no YAML file; give the path of a data-set YAML")
    if len(files) > 1:
        first = ", ".join(file.name for file in files[:4])
        raise DatasetError(f"{folder}: holds several YAML files ({first}); give the path of one")
    return files[0]
