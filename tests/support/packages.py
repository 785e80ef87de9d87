"""Installed packages that offer entry points, without an installer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


def write_package(folder: Path, name: str, group: str, entry: str) -> None:
    """Write what an installer leaves in a folder of sys.path, beside the modules of the package."""
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")


@contextmanager
def installed(group: str, code: str, *entries: str) -> Iterator[None]:
    """Meanwhile, packages ours0, ours1, ... in ./site offer an entry point each, and the module `own` has this code."""
    site = Path("site").absolute()
    site.mkdir()
    (site / "own.py").write_text(code)
    for number, entry in enumerate(entries):
        write_package(site, f"ours{number}", group, entry)
    with mock.patch.object(sys, "path", [str(site), *sys.path]), mock.patch.dict(sys.modules):
        yield
