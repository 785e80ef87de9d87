"""Training samples and validation batches.

A training sample depends only on its key, the recipe and the files. It does not depend on the process, order, machine,
position in a batch or number of workers. Validation batches depend only on the data set, so the metrics are
bit-identical for any number of workers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ray_yolo.config.recipe import QUAD
from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.structures import AnnotationIndex, MicrobatchPart, SampleKey
from ray_yolo.core.system import end_with_parent, keep_freed_memory
from ray_yolo.data import augment as effects
from ray_yolo.data.geometry import join, mirror, move, stretch
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.images import UnreadableImageError
from ray_yolo.data.mosaic import Tile, corner, enclosing_range, render, snap
from ray_yolo.labels.rows import Labels
from ray_yolo.ops.seeding import Stream, generator

Sample = dict[str, Any]
Batch = dict[str, Tensor]
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal, its end, or `timeout` sends them to the whole process group; only the training process handles them."""
_QUADRANTS = ((True, True), (False, True), (True, False), (False, False))
_log = logging.getLogger(__name__)


class TrainDataset(Dataset[Sample]):
    """Augmented samples of an index.

    Args:
        epochs: length of the training; its last `augment.close_mosaic` epochs have no mosaic and mixup.
        shapes: (images, 2) output (height, width) of each image for rectangular training without mosaic; None: squares.
            Images of one batch must share a shape.
        quad: merge groups of four samples of a batch.
        leaves_colours: do not change colours; the batch has what `ops.recolour` needs to change them on the device.
    """

    def __init__(self, index: AnnotationIndex, store: ImageStore, augment: AugmentConfig, imgsz: int, seed: int,
                 epochs: int, shapes: np.ndarray | None = None, *, quad: bool = False, leaves_colours: bool = False
                 ) -> None:
        # Outlines matter only if images are cut or moved, and are the largest part of a pickled index.
        moves = (augment.mosaic, augment.translate, augment.scale, augment.degrees, augment.shear, augment.perspective)
        polygons = index.polygons if any(moves) else {}
        self.index = replace(index, polygons=polygons, findings=())
        self.pictures = store
        self.augment, self.imgsz, self.seed, self.epochs = augment, imgsz, seed, epochs
        self.shapes, self.quad, self.leaves_colours = shapes, quad, leaves_colours
        self._decoded: dict[int, np.ndarray] = {}
        """Images of the sample in progress, or of the batch in progress if its mosaics share them."""

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: SampleKey) -> Sample:
        """The sample of a key: image (3, H, W) uint8 RGB, boxes (n, 4) float32 xyxy pixels, classes (n,) int64."""
        return self._samples([key], self._empty([key]))[0]

    def __getitems__(self, keys: Sequence[SampleKey]) -> Batch:
        """The batch of several keys' samples (see `collate`), each written directly into the batch."""
        images = self._empty(keys)
        samples = self._samples(keys, images)
        return quad_collate(samples) if self.quad else collate(samples, images)

    def load(self, part: MicrobatchPart) -> Batch:
        """The batch of a part's samples. `place` (2,): its first image in the microbatch, by which the targets count
        their images, and the images of the microbatch.
        """
        batch = self.__getitems__(part.keys)
        merged = QUAD if self.quad else 1
        first, size = part.first // merged, -(-part.size // merged)
        batch["targets"][:, 0] += first
        return {**batch, "place": torch.tensor([first, size])}

    def _size(self, image: int) -> tuple[int, int]:
        """(height, width) of the samples of an image."""
        if self.shapes is None:
            return self.imgsz, self.imgsz
        height, width = self.shapes[image].tolist()
        return height, width

    def _empty(self, keys: Sequence[SampleKey]) -> Tensor:
        """Memory for what the samples show, (B, H, W, 3) uint8."""
        return torch.empty((len(keys), *self._size(keys[0].image), 3), dtype=torch.uint8)

    def _samples(self, keys: Sequence[SampleKey], outs: Tensor) -> list[Sample]:
        """The samples of several keys, each written into its entry of `outs`."""
        samples = []
        for key, out in zip(keys, outs.numpy(), strict=True):
            samples.append(self._sample(key, out))
            if not key.block:  # the mosaics of others share no images
                self._decoded = {}
        self._decoded = {}
        return samples

    def _sample(self, key: SampleKey, out: np.ndarray) -> Sample:
        """The sample of a key; its pixels are written into `out` (H, W, 3). The order of the draws is part of it."""
        size = self._size(key.image)
        rng = generator(Stream.SAMPLE, self.seed, key.epoch, key.position)
        open_mosaic = self.shapes is None and key.epoch < self.epochs - self.augment.close_mosaic
        if rng.random() < self.augment.mosaic and open_mosaic:  # drawn also where mosaics are closed
            labels, rows = self._mosaic(rng, key, key.image, out)
            if rng.random() < self.augment.mixup:
                second = np.empty_like(out)
                (partner,) = self._partners(rng, key, 1)
                second_labels, second_rows = self._mosaic(rng, key, partner, second)
                out[:] = effects.blend(out, second, rng.beta(32, 32))
                labels = join([labels, second_labels])
                rows = enclosing_range([rows, second_rows])
        else:
            labels, rows = self._single(rng, key.image, size, out)
        gains = effects.draw_colour_gains(rng, self.augment)
        if not self.leaves_colours:
            effects.recolour(out, gains, rows)
        up_down, left_right = (rng.random(2) < (self.augment.flipud, self.augment.fliplr)).tolist()
        if up_down or left_right:
            self._flip(out, (left_right, up_down))
            labels = mirror(labels, (left_right, up_down), size)
        sample = {
            **self._shown(out),
            "boxes": torch.from_numpy(labels.boxes),
            "classes": torch.from_numpy(labels.classes),
            "index": key.image,
            "draw": rng.random(),  # `quad_collate` reads it.
        }
        if self.leaves_colours:
            sample["colours"] = torch.from_numpy(effects.scaled_hsv(gains))
        return sample

    def _shown(self, out: np.ndarray) -> dict[str, Tensor]:
        """What `out` (H, W, 3) gives to a sample."""
        return {"image": torch.from_numpy(out).permute(2, 0, 1)}

    def _flip(self, out: np.ndarray, mirrored: tuple[bool, bool]) -> None:
        """Mirror what was written along (x, y)."""
        cv2.flip(out, effects.FLIPS[mirrored], dst=out)

    def _render(self, out: np.ndarray, tiles: list[Tile[int]], seam: tuple[int, int], canvas: tuple[int, int],
                size: tuple[int, int], matrix: np.ndarray) -> range:
        """Write the canvas with its images through the matrix, as a picture of `size`. Returns the rows outside of
        which it is grey."""
        return render(out, [Tile(self._load(image), before) for image, before in tiles], seam, canvas, matrix)

    def _picture(self, number: int) -> tuple[int, Labels, tuple[float, float]]:
        """An image, its labels in original pixels, and the factors (x, y) from these to the network's size. A damaged
        image is replaced by the next readable one."""
        image = self._readable(number)
        annotation, (height, width) = self.index[image], self._loaded_size(image)
        factors = (width / annotation.size[1], height / annotation.size[0])
        return image, Labels(annotation.classes, annotation.boxes, annotation.polygons), factors

    def _readable(self, number: int) -> int:
        """An image, or the next one that can be read."""
        image = number
        while True:  # the store raises another error before all images are damaged
            try:
                self._load(image)
                return image
            except UnreadableImageError as error:
                _log.warning("%s: %s; replaced by the next image", self.index.paths[image], error)
                image = (image + 1) % len(self)

    def _load(self, image: int) -> np.ndarray:
        """The pixels of an image at the network's size. A sample decodes each once, and so does a batch whose mosaics
        share images."""
        if image not in self._decoded:
            self._decoded[image] = self.pictures.load(image)
        return self._decoded[image]

    def _partners(self, rng: np.random.Generator, key: SampleKey, count: int) -> list[int]:
        """Other images for the mosaics of a sample."""
        if not key.block:
            return rng.integers(0, len(self), count).tolist()
        places = rng.integers(0, len(key.block), count).tolist()
        return [key.block[place] for place in places]

    def _mosaic(self, rng: np.random.Generator, key: SampleKey, number: int, out: np.ndarray) -> tuple[Labels, range]:
        """Write a mosaic of an image and three others. Returns its labels and the rows that images cover."""
        size = self.imgsz
        seam = tuple(rng.integers(size // 2, size + size // 2 + 1, 2).tolist())
        partners = self._partners(rng, key, 3)
        shuffled = rng.permutation([number, *partners]).tolist()
        tiles = []
        parts = []  # labels of each image on the canvas
        for image, quadrant in zip(shuffled, _QUADRANTS, strict=True):
            shown, labels, factors = self._picture(image)
            tiles.append(Tile(shown, quadrant))
            parts.append(stretch(labels, factors, corner(self._loaded_size(shown), quadrant, seam)))
        labels, rows = self._view(rng, tiles, join(parts), seam, (2 * size, 2 * size), (size, size), out)
        if self.augment.copy_paste and labels.polygons:
            out[:], labels = effects.copy_paste(rng, out, labels, self.augment.copy_paste)
        return labels, rows

    def _single(self, rng: np.random.Generator, number: int, size: tuple[int, int], out: np.ndarray
                ) -> tuple[Labels, range]:
        """Write one image, centred: a mosaic of one tile on a canvas of the output's size."""
        image, labels, factors = self._picture(number)
        height, width = self._loaded_size(image)
        seam = ((size[1] - width) // 2, (size[0] - height) // 2)  # the tile's upper left corner
        tiles = [Tile(image, (False, False))]
        return self._view(rng, tiles, stretch(labels, factors, seam), seam, size, size, out)

    def _loaded_size(self, image: int) -> tuple[int, int]:
        """(height, width) of an image at the network's size."""
        height, width = self.pictures.sizes[image].tolist()
        return height, width

    def _view(self, rng: np.random.Generator, tiles: list[Tile[int]], labels: Labels, seam: tuple[int, int],
              canvas: tuple[int, int], size: tuple[int, int], out: np.ndarray) -> tuple[Labels, range]:
        """Write a random view of the canvas, of `size` (height, width). Returns its labels and the rows outside of
        which it is grey."""
        matrix, zoom = effects.draw_affine(rng, self.augment, canvas, size)
        matrix = snap(matrix, seam)
        rows = self._render(out, tiles, seam, canvas, size, matrix)
        return move(labels, matrix, zoom, canvas, size), rows


def collate(samples: Sequence[Sample], images: Tensor | None = None) -> Batch:
    """A batch: images (B, 3, H, W) uint8 in channels-last memory, targets (N, 6) float32, indices (B,).

    The rows of targets are [image in batch, class, x1, y1, x2, y2]. Where the samples leave colours to the device, it
    also has `colours` (B, 3, 256) uint8, as `ops.recolour` takes them.

    images: (B, H, W, 3), if it already has the samples' pixels.
    """
    if images is None:
        images = torch.stack([sample["image"].permute(1, 2, 0) for sample in samples])
    return {"images": images.permute(0, 3, 1, 2), **without_pixels(samples)}  # a view: its memory is channels-last


def without_pixels(samples: Sequence[Sample]) -> Batch:
    """The batch of `collate` without its images."""
    targets = []
    for image, sample in enumerate(samples):
        classes = sample["classes"][:, None].float()
        image_column = torch.full((len(classes), 1), float(image))
        targets.append(torch.cat([image_column, classes, sample["boxes"]], dim=1))
    indices = [sample["index"] for sample in samples]
    batch = {"targets": torch.cat(targets), "indices": torch.tensor(indices, dtype=torch.int64)}
    if "colours" in samples[0]:
        batch["colours"] = torch.stack([sample["colours"] for sample in samples])
    return batch


def identity(batch: Any) -> Any:
    """The identity, as `collate_fn` of loaders whose data set makes batches."""
    return batch


def quad_collate(samples: Sequence[Sample]) -> Batch:
    """A batch of ceil(B / 4) images of twice the height and width, each from four neighbouring samples.

    The first sample's draw decides between this sample alone, enlarged, and all four in a grid. The missing parts of an
    incomplete last group are grey.
    """
    return collate([_quad(samples[first:first + 4]) for first in range(0, len(samples), 4)])


def _quad(group: Sequence[Sample]) -> Sample:
    """One sample of twice the height and width from up to four."""
    head = group[0]
    _, height, width = head["image"].shape
    if head["draw"] < 0.5:
        image = cv2.resize(head["image"].permute(1, 2, 0).numpy(), (2 * width, 2 * height))
        return {**head, "image": torch.from_numpy(image).permute(2, 0, 1), "boxes": head["boxes"] * 2}
    grid = torch.full((2 * height, 2 * width, 3), effects.GREY, dtype=torch.uint8).permute(2, 0, 1)
    boxes = []
    for number, sample in enumerate(group):
        row, column = divmod(number, 2)
        top, left = row * height, column * width
        grid[:, top:top + height, left:left + width] = sample["image"]
        boxes.append(sample["boxes"] + torch.tensor([left, top, left, top]))
    classes = torch.cat([sample["classes"] for sample in group])
    return {**head, "image": grid, "boxes": torch.cat(boxes), "classes": classes}


def start_forkserver() -> None:
    """Start the fork server of loader processes, unless it runs. The server and its children block `GROUP_SIGNALS`."""
    multiprocessing.set_forkserver_preload([__name__])  # torch is imported once, not by each child
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # which unblocks all of them but SIGHUP; it ignores those itself
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_init(_: int) -> None:
    """Set up a loader process. It gets its own process group, which signals to the training's group do not reach. It
    uses one thread, because parallelism comes from the processes. It ends with the process that trains.
    """
    end_with_parent()
    os.setpgid(0, 0)
    while signal.sigtimedwait(GROUP_SIGNALS, 0):  # drop those that arrived before
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # torch ends a loader that hangs with SIGTERM
    keep_freed_memory()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


class ValBatch(NamedTuple):
    """Images of one padded shape."""

    indices: tuple[int, ...]
    shape: tuple[int, int]  # (height, width)


def padded_shapes(sizes: np.ndarray, imgsz: int, grid: int, pad: float = 0.5) -> np.ndarray:
    """Network input (height, width) of each image, (n, 2) int64, from its size.

    ceil(side x imgsz / long side / grid + pad) x grid.
    """
    ratios = imgsz / sizes.max(axis=1, keepdims=True)
    cells = np.round(sizes * ratios / grid + pad, 9)  # 20.000000000000004 cells are 20, not 21
    return (np.ceil(cells) * grid).astype(np.int64)


def cut_batches(index: AnnotationIndex, imgsz: int, batch_size: int, grid: int) -> tuple[ValBatch, ...]:
    """All images in batches of equal padded shape and at most `batch_size`; shapes and images in ascending order."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for image, (height, width) in enumerate(padded_shapes(index.sizes, imgsz, grid).tolist()):
        groups[height, width].append(image)
    batches = []
    for shape, images in sorted(groups.items()):
        for first in range(0, len(images), batch_size):
            batches.append(ValBatch(tuple(images[first:first + batch_size]), shape))
    return tuple(batches)


class ValDataset(Dataset[dict[str, Tensor]]):
    """Whole validation batches; item i is batch i."""

    def __init__(self, index: AnnotationIndex, store: ImageStore, batches: tuple[ValBatch, ...]) -> None:
        self.index, self.store, self.batches = index, store, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """A batch as in `collate`, with the mapping of its boxes to original pixels.

        ratios, pads (B, 2) float32, (y, x): input = original x ratio + pad. sizes (B, 2) int64: original
        (height, width).
        """
        batch = self.batches[number]
        samples, ratios, pads = [], [], []
        for image in batch.indices:
            pixels = self.store.load_or_grey(image)
            annotation = self.index[image]
            padded, (top, left) = effects.letterbox(pixels, batch.shape)
            ratio = np.array(pixels.shape[:2]) / np.array(annotation.size)  # (y, x)
            boxes = annotation.boxes * ratio[[1, 0, 1, 0]] + np.array([left, top, left, top])
            samples.append({"image": torch.from_numpy(padded).permute(2, 0, 1),
                            "boxes": torch.from_numpy(boxes.astype(np.float32)),
                            "classes": torch.tensor(annotation.classes),  # a copy: the index may be read-only
                            "index": image})
            ratios.append(ratio)
            pads.append((top, left))
        sizes = self.index.sizes[list(batch.indices)].astype(np.int64)
        return {**collate(samples),
                "ratios": torch.tensor(np.array(ratios), dtype=torch.float32),
                "pads": torch.tensor(pads, dtype=torch.float32),
                "sizes": torch.from_numpy(sizes)}
