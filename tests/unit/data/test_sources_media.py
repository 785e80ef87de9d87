"""Which files a source names, what their results are called, and the frames of a video."""

from __future__ import annotations

import glob
import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ray_yolo.core.errors import DatasetError, InputError
from ray_yolo.data.images import UnreadableImageError
from ray_yolo.data.sources import find_media, frames_per_second, read_source, read_video, unique_stems
from ray_yolo.labels.files import files_of, matching
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
    sources = find_media(str(folder))
    assert [media.name for media in sources] == ["a.PNG", "b.jpg", "clip.mp4", "deep/er/c d.bmp"]
    assert [media.path for media in sources] == [str(folder / media.name) for media in sources]
    assert [media.is_video for media in sources] == [False, False, True, False]
    assert [media.stem for media in sources] == ["a", "b", "clip", "deep/er/c d"]


def test_a_file_and_a_pattern_name_files(folder: Path) -> None:
    assert names(folder / "b.jpg") == ["b.jpg"]
    assert names(folder / "*.*") == ["a.PNG", "b.jpg", "clip.mp4"]
    assert names(folder / "**/*.bmp") == ["c d.bmp"]


def test_a_folder_is_searched_as_one_of_a_data_set_is(folder: Path, tmp_path_factory: pytest.TempPathFactory,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "f.jpg").touch()
    (folder / "linked").symlink_to(elsewhere)
    assert "linked/f.jpg" in names(folder)
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    with pytest.raises(InputError):
        find_media(str(folder))


def test_circular_links_end(folder: Path) -> None:
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


@pytest.mark.parametrize(("source", "name", "stem"), [
    ("0", "0", "0"), ("rtsp://ann:secret@cam:554/door?key=1", "rtsp://***@cam:554/door?key=1", "rtsp_cam_554_door"),
    ("https://host/a.mp4", "https://host/a.mp4", "https_host_a_mp4")])
def test_cameras_and_addresses_are_streams_without_their_passwords(source: str, name: str, stem: str) -> None:
    (stream,) = find_media(source)
    assert stream == (source, name, stem)
    assert stream.is_stream
    assert stream.is_video


def test_a_stream_is_read_frame_by_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_video(tmp_path / "a.avi", [np.full((48, 64, 3), 40 * i, np.uint8) for i in range(5)])
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        frames = list(read_video(f"http://127.0.0.1:{server.server_port}/a.avi"))
        server.shutdown()
    assert [round(frame.mean() / 40) for frame in frames] == [0, 1, 2, 3, 4]


def test_a_file_called_like_a_camera_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "0" / "a.avi", [np.zeros((48, 64, 3), np.uint8)])
    assert names("0") == ["a.avi"]


def test_no_two_files_have_results_of_the_same_name() -> None:
    for names, stems in [
        (["a.jpg", "b.png"], ["a", "b"]),
        (["a.jpg", "a.png", "b.jpg"], ["a.jpg", "a.png", "b"]),
        (["x/a.jpg", "y/a.jpg"], ["x/a", "y/a"]),
        (["a.jpg", "a.jpg.png"], ["a", "a.jpg.png"]),
        (["a.mp4", "a_1.jpg", "b.mp4", "c_x.jpg"], ["a.mp4", "a_1", "b", "c_x"]),
    ]:
        assert unique_stems(names) == stems, names
        assert len(set(stems)) == len(stems), names


def test_a_video_gives_its_frames_in_rgb_and_its_rate(tmp_path: Path) -> None:
    frames = [np.full((48, 64, 3), (200, 40 * number, 10), np.uint8) for number in range(4)]
    path = str(write_video(tmp_path / "clip.avi", frames, rate=12.0))
    read = list(read_video(path))
    assert [frame.shape for frame in read] == [(48, 64, 3)] * 4
    assert all(abs(frame.mean((0, 1)) - (200, 40 * number, 10)).max() < 8 for number, frame in enumerate(read))
    assert frames_per_second(path) == 12.0


def test_a_video_that_was_cut_short_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [np.random.default_rng(number).integers(0, 256, (48, 64, 3), np.uint8) for number in range(20)]
    path = write_video(tmp_path / "a.avi", frames)
    assert len(list(read_video(str(path)))) == 20
    assert not caplog.records
    cut = tmp_path / "cut.avi"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    count = len(list(read_video(str(cut))))
    assert 5 < count < 15
    assert f"cut.avi: only {count} of 20 frames, by its length and rate, can be read" in caplog.text


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.avi").write_bytes(b"no video")
    with pytest.raises(UnreadableImageError):
        next(read_video(str(tmp_path / "x.avi")))
    assert frames_per_second(str(tmp_path / "x.avi")) == 30.0


FILES = ("a.jpg", "b.png", "one/a.jpg", "one/two/c.jpg", "one/two/three/d.png", "other/two/e.jpg", "odd [x]/f.jpg",
         ".hidden.jpg", ".git/g.jpg", "one/.cache/h.jpg")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def below(sources: list[str], root: Path) -> list[str]:
    return sorted({os.path.relpath(path, root) for path in sources})


def test_patterns_match_as_in_python_without_links(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    for pattern in [
        "*", "*.jpg", "**/*.jpg", "**", "**/", "one/**/*.*", "**/two/*", "**/two/**/*.png", "**/**/*.jpg", "o*/**/t*/*",
        "odd [[]x]/*", "odd*/**/*.jpg", "a**", "one/two/c.jpg", "nothing/**/*", "**/nothing",
    ]:
        files = [path for path in glob.glob(str(tree / pattern), recursive=True) if os.path.isfile(path)]
        absolute = [path for path in matching(str(tree / pattern)) if os.path.isfile(path)]
        relative = [path for path in matching(pattern) if os.path.isfile(path)]
        assert below(absolute, tree) == below(files, tree), pattern
        assert below(relative, Path(".")) == below(files, tree), pattern


def test_files_lie_at_any_depth_but_hidden_ones(tree: Path) -> None:
    assert below(files_of(str(tree)), tree) == sorted(name for name in FILES if "/." not in f"/{name}")
    assert files_of(str(tree / "nothing")) == []


@pytest.mark.timeout(60)
def test_each_real_folder_is_visited_once(tree: Path) -> None:
    for number in range(30):  # all orders of thirty links that lead back would be 30^30 paths
        (tree / f"back{number}").symlink_to(tree)
        (tree / "one" / f"up{number}").symlink_to("..")
    assert below(files_of(str(tree)), tree) == sorted(name for name in FILES if "/." not in f"/{name}")
    assert below(matching(str(tree / "**" / "*.png")), tree) == ["b.png", "one/two/three/d.png"]


def test_links_to_folders_elsewhere_are_followed(tree: Path) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "linked").symlink_to(tree / "one")
    assert below(files_of(str(tree / "data")), tree / "data") == [
        "linked/a.jpg", "linked/two/c.jpg", "linked/two/three/d.png"]
    assert below(matching(str(tree / "data" / "**" / "c.jpg")), tree) == ["data/linked/two/c.jpg"]


@pytest.mark.parametrize("link", ["a link", "z link"])
def test_of_two_ways_into_a_folder_the_first_by_name_is_taken(tree: Path, link: str) -> None:
    (tree / link).symlink_to(tree / "one")
    seen = [path for path in below(files_of(str(tree)), tree) if path.endswith("c.jpg")]
    assert seen == [f"{min(link, 'one')}/two/c.jpg"]


def test_an_unreadable_folder_is_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the kernel's answer: root may read everything."""
    locked, scandir = str(next(path for path in tree.iterdir() if path.is_dir())), os.scandir

    def refuse(path: str) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DatasetError):
        files_of(str(tree))
    with pytest.raises(DatasetError):
        matching(f"{tree}/**")


def test_pictures_that_are_not_read_are_no_media(tmp_path: Path) -> None:
    (tmp_path / "b.heic").touch()
    (tmp_path / "a.jpg").touch()
    assert [media.name for media in find_media(str(tmp_path))] == ["a.jpg"]


def test_further_frames_of_an_image_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    [frame] = read_source(str(path)).frames()
    assert frame.read().pixels is not None
    [message] = caplog.messages
    assert message.startswith(f"{path}: has 3 frames")
