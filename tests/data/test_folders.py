import glob
import os
from pathlib import Path
from typing import Any

import pytest

from ray_yolo.data.folders import files_below, matching
from ray_yolo.errors import DatasetError

FILES = ("a.jpg", "b.png", "one/a.jpg", "one/two/c.jpg", "one/two/three/d.png", "other/two/e.jpg", "odd [x]/f.jpg",
         ".hidden.jpg", ".git/g.jpg", "one/.cache/h.jpg")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(found: list[str], root: Path) -> list[str]:
    return sorted({os.path.relpath(path, root) for path in found})


@pytest.mark.parametrize("pattern", [
    "*", "*.jpg", "**/*.jpg", "**", "**/", "one/**/*.*", "**/two/*", "**/two/**/*.png", "**/**/*.jpg", "o*/**/t*/*",
    "odd [[]x]/*", "odd*/**/*.jpg", "a**", "one/two/c.jpg", "nothing/**/*", "**/nothing",
])
def test_patterns_match_what_python_says_where_there_are_no_links(
        tree: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    files = [path for path in glob.glob(str(tree / pattern), recursive=True) if os.path.isfile(path)]
    assert names([path for path in matching(str(tree / pattern)) if os.path.isfile(path)], tree) == names(files, tree)
    monkeypatch.chdir(tree)
    assert names([path for path in matching(pattern) if os.path.isfile(path)], Path(".")) == names(files, tree)


def test_files_lie_at_any_depth_but_hidden_ones(tree: Path) -> None:
    assert names(files_below(str(tree)), tree) == sorted(name for name in FILES if "/." not in f"/{name}")
    assert files_below(str(tree / "nothing")) == []


@pytest.mark.timeout(60)
def test_each_real_folder_is_looked_into_once(tree: Path) -> None:
    for number in range(30):  # all orders of thirty links that lead back would be 30^30 paths
        (tree / f"back{number}").symlink_to(tree)
        (tree / "one" / f"up{number}").symlink_to("..")
    assert names(files_below(str(tree)), tree) == sorted(name for name in FILES if "/." not in f"/{name}")
    assert names(matching(str(tree / "**" / "*.png")), tree) == ["b.png", "one/two/three/d.png"]


def test_links_to_folders_elsewhere_are_followed(tree: Path) -> None:
    (tree / "data").mkdir()
    (tree / "data" / "linked").symlink_to(tree / "one")
    assert names(files_below(str(tree / "data")), tree / "data") == [
        "linked/a.jpg", "linked/two/c.jpg", "linked/two/three/d.png"]
    assert names(matching(str(tree / "data" / "**" / "c.jpg")), tree) == ["data/linked/two/c.jpg"]


@pytest.mark.parametrize("link", ["a link", "z link"])
def test_of_two_ways_into_a_folder_the_first_by_name_is_taken(tree: Path, link: str) -> None:
    (tree / link).symlink_to(tree / "one")
    seen = [path for path in names(files_below(str(tree)), tree) if path.endswith("c.jpg")]
    assert seen == [f"{min(link, 'one')}/two/c.jpg"]


def test_a_folder_that_may_not_be_read_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the kernel's answer: root may read everything."""
    locked, scandir = str(next(path for path in tree.iterdir() if path.is_dir())), os.scandir

    def refuse(path: str) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DatasetError, match=f"{locked}: may not be read"):
        files_below(str(tree))
    with pytest.raises(DatasetError, match="may not be read"):
        matching(f"{tree}/**")
