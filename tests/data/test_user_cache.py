from pathlib import Path

import pytest

from ray_yolo.data.user_cache import cache_folder, publish_file, publish_folder


def test_own_variable_beats_xdg_beats_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_YOLO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("RAY_YOLO_CACHE")
    assert cache_folder() == Path("/b/ray_yolo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/ray_yolo")


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(place: Path) -> None:
        (place / "half" if place.is_dir() else place).write_text("half")
        raise ValueError("broken")

    for publish in (publish_folder, publish_file):
        with pytest.raises(ValueError, match="broken"):
            publish(tmp_path / "here" / "target", fail)
        assert list((tmp_path / "here").iterdir()) == []


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    publish_folder(tmp_path / "target", lambda folder: (folder / "first").touch())
    publish_folder(tmp_path / "target", lambda folder: (folder / "second").touch())
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["first"]


def test_the_race_that_another_maker_wins_is_no_error(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        (folder / "mine").touch()
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "theirs").touch()

    publish_folder(tmp_path / "target", slow)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
