from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import density

SOURCE = '''"""A docstring

of two lines."""


def long_one(values):
    """Not counted."""
    # nor is this
    a = 1
    b = 2
    c = 3
    d = 4
    e = 5
    f = 6
    g = 7

    return [value for value in values if value]  # counted once
'''


def test_a_file_worked_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    figures, functions = density.measure("room", [tmp_path / "a.py"])
    assert (figures.lines, figures.functions) == (10, 1)  # def, comment, eight statements
    assert figures.dense_per_100 == pytest.approx(10.0)  # one comprehension
    assert figures.comments_per_100 == pytest.approx(20.0)
    (function,) = functions
    # Seven assignments of four nodes each (Assign, Name, Store, Constant); Return, ListComp, comprehension, and the
    # names of element, target, iterable and condition with their contexts.
    assert (function.lines, function.nodes) == (8, 7 * 4 + 3 + 4 * 2)


def test_every_folder_of_the_package_is_measured() -> None:
    rooms = density.rooms()
    assert {"ray_yolo/engine", "ray_yolo/tune", "all"} <= set(rooms)
    assert len(rooms["all"]) == sum(len(paths) for room, paths in rooms.items() if room != "all")
