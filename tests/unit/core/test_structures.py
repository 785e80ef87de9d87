"""The index of a data set, as each worker holds it."""

from __future__ import annotations

import hashlib
import pickle
import sys

import numpy as np
import pytest

from ray_yolo.core.structures import AnnotationIndex, Paths

ODD = ["/a/b/c.jpg", "/a/b/d.jpg", "relative.jpg", "/root.jpg", "/a/ü/日本.png", "/a/\udcff/b\udcfe.jpg", "/a//b.jpg",
       "", "x/"]


def test_paths_are_those_that_were_given() -> None:
    paths = Paths(ODD)
    assert list(paths) == ODD
    assert (len(paths), paths[-1], paths[1:3]) == (len(ODD), "x/", ("/a/b/d.jpg", "relative.jpg"))
    assert paths == tuple(ODD)
    assert paths != [*ODD, "another"]
    assert "/root.jpg" in paths
    with pytest.raises(IndexError):
        paths[len(ODD)]
    assert list(pickle.loads(pickle.dumps(paths))) == ODD
    assert list(Paths([])) == []


def test_paths_move_with_their_folder() -> None:
    moved = Paths(["/old/set/images/a.jpg", "/old/set/b.jpg"]).moved("/old/set", "/new")
    assert list(moved) == ["/new/images/a.jpg", "/new/b.jpg"]
    with pytest.raises(AssertionError):
        Paths(["/old/set/a.jpg", "/old/settle/b.jpg"]).moved("/old/set", "/new")


def index(num_images: int, labels: int = 7) -> AnnotationIndex:
    numbers = np.arange(num_images * labels) % 80
    return AnnotationIndex(
        tuple(f"/data/coco/images/train2017/{number:012d}.jpg" for number in range(num_images)),
        np.full((num_images, 2), 480, np.int32), np.arange(num_images + 1) * labels, numbers,
        np.ones((num_images * labels, 4), np.float32), ("name",) * 80)


def test_an_index_is_arrays_that_workers_of_a_node_share() -> None:
    """Ray maps arrays of the node's memory into each worker. The rest is a copy for each of them: 105 bytes an image
    when the paths were a tuple."""
    whole, arrays = index(10_000), list[pickle.PickleBuffer]()
    own = pickle.dumps(whole, protocol=5, buffer_callback=arrays.append)
    assert len(own) < 3000
    shared = sum(len(buffer.raw()) for buffer in arrays)
    assert shared / len(whole) < 185
    restored = pickle.loads(own, buffers=arrays)
    assert restored.paths == whole.paths
    assert restored.digest == whole.digest
    assert sum(map(sys.getsizeof, vars(restored.paths).values())) < 1000 + shared


def test_the_digest_and_the_types_of_an_annotation_do_not_depend_on_the_storage() -> None:
    small = index(3)
    digest = hashlib.sha256("\0".join(small.names).encode())
    for values in (small.sizes, small.offsets, np.arange(21, dtype=np.int64), small.boxes):
        digest.update(values.tobytes())
    assert small.digest == digest.hexdigest()[:16]
    assert (small.classes.dtype, small[1].classes.dtype, small[1].boxes.dtype) == (np.int32, np.int64, np.float32)
    assert small[1].classes.tolist() == list(range(7, 14))
