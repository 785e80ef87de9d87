from collections.abc import Callable
from pathlib import Path

import pytest

from ray_yolo.core.cache_folder import build_in_place, cache_folder


def test_own_variable_beats_xdg_beats_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("RAY_YOLO_CACHE")
    assert cache_folder() == Path("/b/ray_yolo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/ray_yolo")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_failed_build_leaves_nothing(tmp_path: Path, kind: str) -> None:
    def fail(place: Path) -> None:
        if kind == "folder":
            place.mkdir()
        (place / "half" if kind == "folder" else place).write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build_in_place(tmp_path / "here" / "target", fail)
    assert list((tmp_path / "here").iterdir()) == []


def make_with(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        for name in names:
            (folder / name).touch()

    return make


def test_an_existing_folder_is_not_built_again(tmp_path: Path) -> None:
    build_in_place(tmp_path / "here" / "target", make_with("first"))
    build_in_place(tmp_path / "here" / "target", make_with("second"))
    assert [path.name for path in (tmp_path / "here" / "target").iterdir()] == ["first"]


def test_a_file_replaces_what_was_there(tmp_path: Path) -> None:
    for text in ("first", "second"):
        target = build_in_place(tmp_path / "here" / "target", lambda file, text=text: file.write_text(text))
        assert target.read_text() == text
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["target"]


def test_a_lost_race_is_no_error(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        make_with("mine")(folder)
        make_with("theirs")(tmp_path / "here" / "target")

    build_in_place(tmp_path / "here" / "target", slow)
    assert [path.name for path in (tmp_path / "here" / "target").iterdir()] == ["theirs"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["target"]
