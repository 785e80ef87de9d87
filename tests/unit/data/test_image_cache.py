import fcntl
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest

from ray_yolo.core.structures import AnnotationIndex
from ray_yolo.data import image_cache
from ray_yolo.data.image_cache import ImageStore, loaded_sizes
from ray_yolo.data.images import UnreadableImageError, read_image
from ray_yolo.data.index import read_index
from tests.support.pictures import smooth_picture, write_dataset, write_image


@pytest.fixture
def index(tmp_path: Path) -> AnnotationIndex:
    description = write_dataset(tmp_path, dict.fromkeys("abcde"))
    write_image(tmp_path / "images" / "b.png", smooth_picture(200, 150))
    write_image(tmp_path / "images" / "c.png", smooth_picture(20, 30))
    return read_index(description, "train")


def test_the_long_side_becomes_the_image_size() -> None:
    for size, imgsz, loaded in [
        ((480, 640), 320, (240, 320)), ((640, 480), 320, (320, 240)), ((100, 300), 64, (21, 64)),
        ((10, 5000), 64, (1, 64)), ((30, 20), 64, (64, 43)),
    ]:
        assert loaded_sizes(np.array([size]), imgsz).tolist() == [list(loaded)], (size, imgsz)


@pytest.mark.parametrize("smooth", [False, True])
def test_all_modes_load_the_same_pixels(index: AnnotationIndex, smooth: bool) -> None:
    stores = [ImageStore(index, 64, mode, smooth=smooth) for mode in ("none", "ram", "disk")]
    for image in range(len(index)):
        first, *others = (store.load(image) for store in stores)
        assert first.shape == (*stores[0].sizes[image], 3)
        assert all(np.array_equal(first, other) for other in others)


def test_training_resamples_linearly_and_validation_shrinks_by_area(index: AnnotationIndex) -> None:
    large, small = read_image(index.paths[1]), read_image(index.paths[2])
    assert np.array_equal(ImageStore(index, 64).load(1), cv2.resize(large, (48, 64), interpolation=cv2.INTER_LINEAR))
    assert np.array_equal(ImageStore(index, 64, smooth=True).load(1),
                          cv2.resize(large, (48, 64), interpolation=cv2.INTER_AREA))
    for smooth in (False, True):
        assert np.array_equal(ImageStore(index, 64, smooth=smooth).load(2),
                              cv2.resize(small, (64, 43), interpolation=cv2.INTER_LINEAR))


@pytest.mark.parametrize(("size", "reduction"), [
    ((480, 640), 4), ((256, 128), 2), ((254, 254), 1), ((256, 256), 2), ((512, 512), 4), ((1920, 2560), 8),
    ((482, 642), 2),  # a quarter of it would have to be rounded
    ((481, 640), 1), ((4000, 24), 8),
])
def test_training_decodes_a_jpeg_at_reduced_size_if_large_enough(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], reduction: int) -> None:
    """It then looks as it does decoded in full, the same in every mode, and labels stay where they were. Validation
    decodes it in full, as prediction does."""
    description = write_dataset(tmp_path, {"a": None})
    (tmp_path / "images" / "a.png").unlink()
    write_image(tmp_path / "images" / "a.jpg", smooth_picture(*size))
    index, reductions = read_index(description, "train"), []

    def read(path: str, part: int, *rest: object) -> np.ndarray:
        reductions.append(part)
        return read_image(path, part, *rest)

    monkeypatch.setattr(image_cache, "read_image", read)
    none, ram, smooth = (ImageStore(index, 128), ImageStore(index, 128, "ram"), ImageStore(index, 128, smooth=True))
    shown = none.load(0)
    assert reductions == [reduction] * 2
    assert np.array_equal(shown, ram.load(0))
    assert shown.shape[:2] == tuple(loaded_sizes(index.sizes, 128)[0])
    full = cv2.resize(read_image(index.paths[0]), shown.shape[1::-1], interpolation=cv2.INTER_AREA).astype(int)
    if min(size) > 100:
        assert np.abs(shown - full).mean() < 2
    assert np.array_equal(smooth.load(0), full)
    assert reductions == [reduction] * 2 + [1]


def test_ram_uses_shared_memory_and_disk_the_users_cache(index: AnnotationIndex, own_cache: Path,
                                                        tmp_path: Path) -> None:
    ram, disk, own = (ImageStore(index, 64, "ram").file, ImageStore(index, 64, "disk").file,
                      ImageStore(index, 64, "disk", tmp_path / "own").file)
    assert ram is not None
    assert ram.is_relative_to(image_cache.SHARED_MEMORY)
    assert disk is not None
    assert disk.is_relative_to(own_cache)
    assert own is not None
    assert own.parent == tmp_path / "own"


@pytest.mark.parametrize("trap", ["link", "writable", "other owner"])
def test_shared_memory_that_another_user_prepared_is_not_used(
        index: AnnotationIndex, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture,
        trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private, aim = image_cache.SHARED_MEMORY / f"ray_yolo-{os.getuid()}", tmp_path / "aim"
    aim.mkdir(mode=0o700)
    if trap == "link":
        private.symlink_to(aim)
    else:
        private.mkdir()
        private.chmod(0o777 if trap == "writable" else 0o700)
        owner = os.getuid()
        if trap == "other owner":
            monkeypatch.setattr(os, "getuid", lambda: owner + 1)
            private.rename(image_cache.SHARED_MEMORY / f"ray_yolo-{owner + 1}")
    file = ImageStore(index, 64, "ram").file
    assert file is not None
    assert file.is_relative_to(own_cache)
    assert not list(aim.iterdir())
    assert "is not private" in caplog.text


def test_a_link_instead_of_a_cache_file_is_not_followed(index: AnnotationIndex, tmp_path: Path) -> None:
    folder, mine = tmp_path / "kept", tmp_path / "mine.txt"
    named = ImageStore(index, 64, "ram", folder).file
    assert named is not None
    for path in folder.iterdir():
        path.unlink()
    mine.write_text("precious")
    named.with_suffix(".part").symlink_to(mine)
    ImageStore(index, 64, "ram", folder)
    named.unlink()
    for aim in (mine, tmp_path / "missing"):
        named.with_name(".lock").unlink(missing_ok=True)
        named.with_name(".lock").symlink_to(aim)
        with pytest.raises(OSError, match=r"symbolic links: .*\.lock"):
            ImageStore(index, 64, "ram", folder)
    assert mine.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


def test_kept_images_are_read_only_and_shared(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, "ram")
    image = store.load(0)
    assert not image.flags.writeable
    assert np.shares_memory(image, store.load(0))


def test_a_second_store_does_not_decode_again(index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ImageStore(index, 64, "disk").load(3).copy()
    monkeypatch.setattr(image_cache, "read_image", None)
    assert np.array_equal(ImageStore(index, 64, "disk").load(3), expected)


def test_another_size_method_or_content_has_another_file(index: AnnotationIndex) -> None:
    files = {ImageStore(index, 64, "disk").file, ImageStore(index, 96, "disk").file,
             ImageStore(index, 64, "disk", smooth=True).file}
    write_image(Path(index.paths[0]), smooth_picture(48, 64, seed=77))
    files.add(ImageStore(index, 64, "disk").file)
    assert len(files) == 4


def test_a_pickled_store_is_small_and_maps_the_same_file(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, "disk")
    store.load(0)
    copy = pickle.loads(pickle.dumps(store))
    assert len(pickle.dumps(store)) < 4000
    assert np.array_equal(copy.load(4), store.load(4))


def test_a_killed_builder_does_not_block_the_next(index: AnnotationIndex, own_cache: Path) -> None:
    store = ImageStore(index, 64, "disk")
    assert store.file is not None
    store.file.rename(store.file.with_suffix(".part"))
    store.file.with_suffix(".part").write_bytes(b"half")
    assert np.array_equal(ImageStore(index, 64, "disk").load(0), ImageStore(index, 64).load(0))


@pytest.mark.parametrize("mode", ["none", "ram", "disk"])
def test_an_image_damaged_after_the_check_is_missing_on_access(index: AnnotationIndex,
                                                              mode: image_cache.Mode) -> None:
    Path(index.paths[1]).write_bytes(b"broken")
    store = ImageStore(index, 64, mode)
    store.load(0)
    with pytest.raises(UnreadableImageError):
        store.load(1)


def test_an_image_of_another_size_is_refused(index: AnnotationIndex) -> None:
    write_image(Path(index.paths[0]), smooth_picture(50, 70))
    with pytest.raises(UnreadableImageError):
        ImageStore(index, 64).load(0)


def fits_only(*names: str) -> Callable[[Path], object]:
    class Usage:
        def __init__(self, free: int) -> None:
            self.free = free

    return lambda place: Usage(10**12 if any(name in str(place) for name in names) else 0)


def test_without_memory_images_are_cached_on_disk_or_not_at_all(
        index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(image_cache.shutil, "disk_usage", fits_only("user-cache"))
    file = ImageStore(index, 64, "ram").file
    assert file is not None
    assert "user-cache" in str(file)
    assert "more than the free memory" in caplog.text
    monkeypatch.setattr(image_cache.shutil, "disk_usage", fits_only())
    store = ImageStore(index, 64, "ram")
    assert store.file is None
    assert "they are not cached" in caplog.text
    assert store.load(0).shape == (48, 64, 3)


def test_closing_removes_unused_files_from_memory(index: AnnotationIndex) -> None:
    first, second = ImageStore(index, 64, "ram"), ImageStore(index, 64, "ram")
    assert first.file is not None
    first.load(0)
    second.load(0)
    first.close()
    assert first.file.exists()
    second.close()
    assert not first.file.exists()


def test_disk_outlives_closing_and_others(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, "disk")
    store.close()
    ImageStore(index, 96, "disk")
    assert store.file is not None
    assert store.file.exists()


def test_building_in_memory_removes_unused_files_of_others(index: AnnotationIndex) -> None:
    left = ImageStore(index, 64, "ram").file  # the store itself is gone at once
    assert left is not None
    assert left.exists()
    used = ImageStore(index, 96, "ram")
    assert not left.exists()
    ImageStore(index, 128, "ram")
    assert used.file is not None
    assert used.file.exists()


def test_a_lock_held_by_another_builder_is_waited_for(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, "disk")
    assert store.file is not None
    store.file.unlink()
    with store.file.with_name(".lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(ImageStore, index, 64, "disk")
        assert not waiting.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waiting.result().load(0).shape == (48, 64, 3)


def test_many_builders_of_one_file_decode_it_once(index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, filled = ImageStore._fill, []

    def note(store: ImageStore, temporary: Path) -> None:
        filled.append(temporary)
        fill(store, temporary)

    monkeypatch.setattr(ImageStore, "_fill", note)
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: ImageStore(index, 64, "disk"), range(24)))
    assert len(filled) == 1
    assert {store.load(0).tobytes() for store in stores} == {ImageStore(index, 64).load(0).tobytes()}


def test_waiting_for_a_lock_is_limited(index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(index, 64, "disk")
    assert store.file is not None
    store.file.unlink()
    monkeypatch.setattr(image_cache, "_LOCK_SECONDS", 0.1)
    with store.file.with_name(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            ImageStore(index, 64, "disk")


def test_a_cache_that_its_last_user_removes_meanwhile_is_built_again(
        index: AnnotationIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the folder and the opening of the file."""
    folder = tmp_path / "cache"
    folder.mkdir()
    first = ImageStore(index, 64, "disk", directory=folder)
    assert first.file is not None
    opened = image_cache._map

    def removed(path: Path) -> np.ndarray:
        monkeypatch.setattr(image_cache, "_map", opened)
        path.unlink()
        return opened(path)

    monkeypatch.setattr(image_cache, "_map", removed)
    assert np.array_equal(ImageStore(index, 64, "disk", directory=folder).load(1), first.load(1))
