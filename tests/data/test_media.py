"""Which files a source names, what their results are called, and the frames of a video."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ray_yolo.data.images import UnreadableImageError
from ray_yolo.data.media import find_media, frames_per_second, read_video, unique_stems
from ray_yolo.errors import InputError
from tests.support.videos import write_video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jpg", "a.PNG", "deep/er/c d.bmp", "clip.mp4", "notes.txt", "x.pdf", ".hidden.jpg", ".git/e.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(source: Path | str) -> list[str]:
    return [media.name for media in find_media(str(source))]


def test_a_folder_is_its_pictures_and_videos_at_any_depth(folder: Path) -> None:
    found = find_media(str(folder))
    assert [media.name for media in found] == ["a.PNG", "b.jpg", "clip.mp4", "deep/er/c d.bmp"]
    assert [media.path for media in found] == [str(folder / media.name) for media in found]
    assert [media.is_video for media in found] == [False, False, True, False]
    assert [media.stem for media in found] == ["a", "b", "clip", "deep/er/c d"]


def test_a_file_and_a_pattern_name_files(folder: Path) -> None:
    assert names(folder / "b.jpg") == ["b.jpg"]
    assert names(folder / "*.*") == ["a.PNG", "b.jpg", "clip.mp4"]
    assert names(folder / "**/*.bmp") == ["c d.bmp"]


def test_links_that_run_in_circles_end(folder: Path) -> None:
    for name in ("one", "two", "three"):
        (folder / name).symlink_to(folder)
    assert names(folder / "**" / "*.jpg") == ["b.jpg"]
    assert names(folder) == ["a.PNG", "b.jpg", "clip.mp4", "deep/er/c d.bmp"]


def test_names_are_relative_to_what_all_files_have_in_common(folder: Path) -> None:
    assert names(folder / "**" / "[bc]*.*") == ["b.jpg", "clip.mp4", "deep/er/c d.bmp"]


def test_a_relative_source_gives_absolute_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert find_media("b.jpg") == find_media(str(folder / "b.jpg"))
    assert find_media(".") == find_media(str(folder))


def test_a_list_file_names_files_below_its_folder(folder: Path) -> None:
    (folder / "list.txt").write_text("b.jpg\n\ndeep/er/c d.bmp\nb.jpg\n")
    assert names(folder / "list.txt") == ["b.jpg", "deep/er/c d.bmp"]


def test_a_missing_file_of_a_list_is_named_with_its_line(folder: Path) -> None:
    (folder / "list.txt").write_text("b.jpg\nno.jpg\n")
    with pytest.raises(InputError, match=r"list\.txt:2: there is no file .*no\.jpg"):
        find_media(str(folder / "list.txt"))


@pytest.mark.parametrize("source", ["nowhere", "x.pdf", "*.gif", "rtsp://host/stream", "0"])
def test_a_source_without_files_is_refused(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=r"^source: "):
        find_media(source)


@pytest.mark.parametrize(("given", "stems"), [
    (["a.jpg", "b.png"], ["a", "b"]),
    (["a.jpg", "a.png", "b.jpg"], ["a.jpg", "a.png", "b"]),
    (["x/a.jpg", "y/a.jpg"], ["x/a", "y/a"]),
    (["a.jpg", "a.jpg.png"], ["a", "a.jpg.png"]),
    (["a.mp4", "a_1.jpg", "b.mp4", "c_x.jpg"], ["a.mp4", "a_1", "b", "c_x"]),
])
def test_no_two_files_have_results_of_the_same_name(given: list[str], stems: list[str]) -> None:
    assert unique_stems(given) == stems
    assert len(set(stems)) == len(stems)


def test_a_video_gives_its_frames_in_rgb_and_its_rate(tmp_path: Path) -> None:
    frames = [np.full((48, 64, 3), (200, 40 * number, 10), np.uint8) for number in range(4)]
    path = str(write_video(tmp_path / "clip.avi", frames, rate=12.0))
    read = list(read_video(path))
    assert [frame.shape for frame in read] == [(48, 64, 3)] * 4
    assert all(abs(frame.mean((0, 1)) - (200, 40 * number, 10)).max() < 8 for number, frame in enumerate(read))
    assert frames_per_second(path) == 12.0


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.avi").write_bytes(b"no video")
    with pytest.raises(UnreadableImageError, match="is not a video"):
        next(read_video(str(tmp_path / "x.avi")))
    assert frames_per_second(str(tmp_path / "x.avi")) == 30.0
