import multiprocessing
import pickle
import signal
from dataclasses import replace
from multiprocessing.forkserver import ForkServer
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from ray_yolo.config.sections import AugmentConfig
from ray_yolo.core.errors import DatasetError
from ray_yolo.core.structures import AnnotationIndex, SampleKey
from ray_yolo.data import dataset as dataset_module
from ray_yolo.data.augment import colour_tables
from ray_yolo.data.dataset import (
    GROUP_SIGNALS,
    Sample,
    TrainDataset,
    collate,
    quad_collate,
    start_forkserver,
)
from ray_yolo.data.image_cache import ImageStore
from ray_yolo.data.index import read_index
from ray_yolo.ops.recolour import recolour
from tests.support.pictures import write_dataset, write_image

STILL = AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0)
DEFAULT = AugmentConfig()
WILD = AugmentConfig(degrees=10, shear=2, perspective=1e-4, flipud=0.5, mixup=0.5, copy_paste=0.5, mosaic=0.7)


@pytest.fixture
def index(tmp_path: Path) -> AnnotationIndex:
    rows = "0 0.25 0.25 0.5 0.5\n1 0.6 0.2 0.9 0.2 0.9 0.9 0.6 0.8\n"
    return read_index(write_dataset(tmp_path, {f"{n}": rows if n % 3 else None for n in range(7)}), "train")


def dataset(index: AnnotationIndex, augment: AugmentConfig = DEFAULT, imgsz: int = 64, seed: int = 0,
            epochs: int = 10, shapes: np.ndarray | None = None) -> TrainDataset:
    return TrainDataset(index, ImageStore(index, imgsz), augment, imgsz, seed, epochs, shapes)


KEYS = [SampleKey(epoch, position, (3 * position) % 7) for epoch in (0, 1) for position in range(7)]


@pytest.mark.parametrize("augment", [DEFAULT, WILD], ids=["default", "wild"])
def test_a_sample_has_the_agreed_shapes(index: AnnotationIndex, augment: AugmentConfig) -> None:
    for key in KEYS:
        sample = dataset(index, augment)[key]
        assert (sample["image"].shape, sample["image"].dtype) == ((3, 64, 64), torch.uint8)
        assert (sample["boxes"].shape, sample["boxes"].dtype) == ((len(sample["classes"]), 4), torch.float32)
        assert sample["classes"].dtype == torch.int64
        assert sample["index"] == key.image
        boxes = sample["boxes"]
        assert ((boxes >= 0) & (boxes <= 64)).all()
        assert (boxes[:, 2:] - boxes[:, :2] > 2).all()


@pytest.mark.parametrize("augment", [DEFAULT, WILD], ids=["default", "wild"])
def test_colours_that_are_left_to_the_device_are_the_same(index: AnnotationIndex, augment: AugmentConfig) -> None:
    keys = [key for key in KEYS if key.epoch == 0]
    whole = dataset(index, augment).__getitems__(keys)
    data = TrainDataset(index, ImageStore(index, 64), augment, 64, 0, 10, leaves_colours=True)
    batch = data.__getitems__(keys)
    assert not torch.equal(batch["images"], whole["images"])
    batch["images"] = recolour(batch["images"], batch.pop("colours"), colour_tables())
    assert batch.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(batch[name], value), name


@pytest.mark.parametrize("augment", [STILL, DEFAULT, AugmentConfig(mosaic=0)], ids=["still", "default", "single"])
def test_a_sample_owns_its_memory_with_a_read_only_index(
        index: AnnotationIndex, augment: AugmentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers of Ray have it: torch warns of tensors in such memory, once."""
    def own(array: np.ndarray) -> torch.Tensor:
        assert array.flags.writeable
        return from_numpy(array)

    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", own)
    for array in (index.sizes, index.offsets, index.classes, index.boxes):
        array.flags.writeable = False
    data = dataset(index, augment)
    assert {len(data[key]["classes"]) > 0 for key in KEYS} == {True, False} or augment.mosaic


def test_the_server_of_loader_processes_starts_with_the_signals_of_a_terminal_blocked(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the processes that it starts, until they have left the group. This process goes on to receive them."""
    before, server = signal.pthread_sigmask(signal.SIG_BLOCK, ()), ForkServer()
    monkeypatch.setattr(dataset_module, "forkserver", server)
    monkeypatch.setattr(multiprocessing, "set_forkserver_preload", lambda modules: None)  # torch: it takes seconds
    start_forkserver()
    try:
        status = Path(f"/proc/{server._forkserver_pid}/status").read_text()
    finally:
        server._stop()
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert [number for number in GROUP_SIGNALS if not blocked >> (number - 1) & 1] == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_every_part_of_the_key_and_the_seed_matters(index: AnnotationIndex) -> None:
    first = dataset(index)[SampleKey(1, 2, 3)]
    for key in (SampleKey(2, 2, 3), SampleKey(1, 3, 3), SampleKey(2, 1, 3)):
        assert not torch.equal(dataset(index)[key]["image"], first["image"])
    assert not torch.equal(dataset(index, STILL)[SampleKey(1, 2, 3)]["image"],
                           dataset(index, STILL)[SampleKey(1, 2, 4)]["image"])
    assert not torch.equal(dataset(index, seed=1)[SampleKey(1, 2, 3)]["image"], first["image"])


def test_without_augmentation_a_sample_is_the_centred_picture(index: AnnotationIndex) -> None:
    """48 x 64 in a square of 64: 8 rows of grey above and below."""
    sample = dataset(index, STILL)[SampleKey(0, 0, 1)]
    image = sample["image"].permute(1, 2, 0).numpy()
    assert np.array_equal(image[8:56], ImageStore(index, 64).load(1))
    assert (image[:8] == 114).all()
    assert (image[56:] == 114).all()
    assert np.allclose(sample["boxes"], [[0, 8, 32, 32], [38.4, 17.6, 57.6, 51.2]], atol=1e-4)


def test_flips_mirror_picture_and_boxes(index: AnnotationIndex) -> None:
    plain = dataset(index, STILL)[SampleKey(0, 0, 1)]
    left_right = dataset(index, STILL.model_copy(update={"fliplr": 1.0}))[SampleKey(0, 0, 1)]
    up_down = dataset(index, STILL.model_copy(update={"flipud": 1.0}))[SampleKey(0, 0, 1)]
    assert torch.equal(left_right["image"], plain["image"].flip(2))
    assert torch.equal(up_down["image"], plain["image"].flip(1))
    assert torch.allclose(left_right["boxes"][0], torch.tensor([32.0, 8, 64, 32]))
    assert torch.allclose(up_down["boxes"][0], torch.tensor([0.0, 32, 32, 56]))


def test_boxes_follow_the_picture(tmp_path: Path) -> None:
    """A white square on black: whatever the augmentation, its box is where the white is."""
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[16:48, 24:40] = 255
    description = write_dataset(tmp_path, {"a": "0 0.5 0.5 0.25 0.5\n"}, size=(64, 64))
    write_image(tmp_path / "images" / "a.png", picture)
    data = dataset(read_index(description, "train"), AugmentConfig(mosaic=0, flipud=0.5, hsv_v=0), imgsz=128)
    seen = 0
    for position in range(40):
        sample = data[SampleKey(0, position, 0)]
        white = (sample["image"].float().mean(0) > 180).numpy()
        for box in sample["boxes"].numpy():
            ys, xs = np.where(white)
            assert np.abs(box - [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).max() <= 1.5
            seen += 1
    assert seen > 35


def triangle(tmp_path: Path) -> AnnotationIndex:
    """A picture of 64 x 64, black with one white triangle: its right angle in the upper left, its legs 56 long."""
    row = f"0 {4 / 64} {4 / 64} {60 / 64} {4 / 64} {4 / 64} {60 / 64}\n"
    description = write_dataset(tmp_path, {"a": row}, size=(64, 64))
    picture = np.zeros((64, 64, 3), np.uint8)
    cv2.fillPoly(picture, [np.array([[4, 4], [59, 4], [4, 59]])], (255, 255, 255))
    write_image(tmp_path / "images" / "a.png", picture)
    return read_index(description, "train")


@pytest.mark.parametrize("augment", [
    STILL.model_copy(update={"mosaic": 1.0}), STILL.model_copy(update={"translate": 0.4}),
    AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0)], ids=["mosaic", "translate", "default"])
def test_boxes_enclose_the_visible_part_of_an_outline(tmp_path: Path, augment: AugmentConfig) -> None:
    """Each triangle that the border cuts is white just inside of all four sides of its box."""
    data, cut = dataset(triangle(tmp_path), augment), 0
    for position in range(40):
        sample = data[SampleKey(0, position, 0)]
        white = (sample["image"].float().mean(0) > 128).numpy()
        for left, above, right, below in np.rint(sample["boxes"].numpy()).astype(int).tolist():
            inside = white[above:below, left:right]
            if min(inside.shape) < 4:
                continue
            sides = (inside[:3], inside[-3:], inside[:, :3], inside[:, -3:])
            assert all(side.any() for side in sides), (position, (left, above, right, below))
            cut += abs((right - left) - (below - above)) > 4
    assert cut > 10


def test_outlines_change_the_boxes_of_a_mosaic_and_nothing_else(tmp_path: Path) -> None:
    index = triangle(tmp_path)
    mosaic, bare = STILL.model_copy(update={"mosaic": 1.0}), replace(index, polygons={})
    pairs = [(dataset(index, mosaic)[key], dataset(bare, mosaic)[key]) for key in
             (SampleKey(0, position, 0) for position in range(20))]
    assert all(torch.equal(one["image"], other["image"]) for one, other in pairs)
    assert any(len(one["boxes"]) != len(other["boxes"]) or not torch.allclose(one["boxes"], other["boxes"])
               for one, other in pairs)


COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))  # of the rectangle in each picture
RECTANGLES = ((10, 10, 40, 30), (30, 20, 44, 60), (20, 8, 60, 36), (48, 40, 68, 64))  # x1, y1, x2, y2


@pytest.fixture
def coloured(tmp_path: Path) -> AnnotationIndex:
    """Black pictures of 64 rows and 80 columns, each with one rectangle of its own class and colour."""
    shares = [[x1 / 80, y1 / 64, x2 / 80, y1 / 64, x2 / 80, y2 / 64, x1 / 80, y2 / 64]
              for x1, y1, x2, y2 in RECTANGLES]  # outlined, so that boxes of turned ones are tight too
    labels = {str(kind): " ".join(map(str, [kind, *shares[kind]])) for kind in range(4)}
    description = write_dataset(tmp_path, labels, names=("red", "green", "blue", "yellow"))
    for kind, (x1, y1, x2, y2) in enumerate(RECTANGLES):
        picture = np.zeros((64, 80, 3), np.uint8)
        picture[y1:y2, x1:x2] = COLOURS[kind]
        write_image(tmp_path / "images" / f"{kind}.png", picture)
    return read_index(description, "train")


def seen_boxes(image: np.ndarray, colour: tuple[int, int, int]) -> list[list[int]]:
    """Boxes around the connected regions of a colour; they are over where half of the colour is left."""
    mask = ((image > 127) == (np.array(colour) > 127)).all(axis=2).astype(np.uint8)
    _, _, regions, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    return [[x, y, x + width, y + height] for x, y, width, height, _ in regions[1:].tolist()]


@pytest.mark.parametrize(("settings", "apart_px"), [
    ({"flipud": 0.5}, 1), ({"scale": 0, "translate": 0}, 1),
    ({"degrees": 30, "shear": 5}, 3),  # the tip of a turned corner fills no pixel by half
], ids=["default", "still", "turned"])
def test_boxes_of_a_mosaic_follow_its_images(coloured: AnnotationIndex, settings: dict[str, float],
                                             apart_px: int) -> None:
    """Every box is where the pixels of its class end, and every region of pixels has its box."""
    data = dataset(coloured, AugmentConfig(mosaic=1, hsv_h=0, hsv_s=0, hsv_v=0, **settings), imgsz=80)
    num_boxes = num_regions = 0
    for position in range(60):
        sample = data[SampleKey(0, position, position % 4)]
        image = sample["image"].permute(1, 2, 0).numpy()
        for kind, colour in enumerate(COLOURS):
            labelled = sample["boxes"][sample["classes"] == kind].numpy()
            seen = np.array(seen_boxes(image, colour)).reshape(-1, 4)
            apart = np.abs(labelled[:, None] - seen[None]).max(axis=2, initial=0)
            large = (seen[:, 2:] - seen[:, :2]).min(axis=1, initial=99) > 9  # smaller ones may be cut off too far
            assert (apart.min(axis=1, initial=99) <= apart_px).all(), (position, kind, labelled, seen)
            assert (apart.min(axis=0, initial=99)[large] <= apart_px).all(), (position, kind, labelled, seen)
            num_boxes, num_regions = num_boxes + len(labelled), num_regions + int(large.sum())
    assert num_boxes > 90
    assert num_regions > 60


def test_every_sample_has_its_own_colours(tmp_path: Path) -> None:
    """The brightness of a plain picture is multiplied by 1 - 0.4 to 1 + 0.4, its saturation by 1 - 0.7 to 1 + 0.7."""
    description = write_dataset(tmp_path, {"a": None, "b": "0 0.5 0.5 0.5 0.5\n"}, size=(64, 64))
    for name in "ab":
        write_image(tmp_path / "images" / f"{name}.png", np.full((64, 64, 3), (120, 84, 60), np.uint8))
    augment = STILL.model_copy(update={"hsv_s": 0.7, "hsv_v": 0.4})
    keys = [SampleKey(epoch, position, position % 2) for epoch in (0, 1) for position in range(40)]
    pixels = np.array([dataset(read_index(description, "train"), augment)[key]["image"][:, 32, 32].numpy()
                       for key in keys]).astype(float)
    value = pixels.max(axis=1) / 120
    saturation = (1 - pixels.min(axis=1) / pixels.max(axis=1)) / 0.5
    for gains, most in ((value, 0.4), (saturation, 0.7)):
        assert 1 - most - 0.02 <= gains.min() < 1 - 0.8 * most
        assert 1 + 0.8 * most < gains.max() <= 1 + most + 0.02
        assert abs(gains.mean() - 1) < 0.15
    assert len({tuple(pixel) for pixel in pixels.tolist()}) > 70
    assert abs(np.corrcoef(value, saturation)[0, 1]) < 0.4  # drawn apart


def test_a_mosaic_shows_four_pictures_around_its_seam(index: AnnotationIndex) -> None:
    data = dataset(index, STILL.model_copy(update={"mosaic": 1.0}))
    for position in range(10):
        image = data[SampleKey(0, position, 0)]["image"]
        assert (image == 114).all(dim=0).float().mean() < 0.6


def test_the_last_epochs_have_no_mosaic(index: AnnotationIndex) -> None:
    augment = STILL.model_copy(update={"mosaic": 1.0, "close_mosaic": 3})
    data, plain = dataset(index, augment), dataset(index, STILL)
    is_plain = [torch.equal(data[SampleKey(epoch, 1, 1)]["image"], plain[SampleKey(epoch, 1, 1)]["image"])
                for epoch in range(10)]
    assert is_plain == [False] * 7 + [True] * 3


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_a_mosaic_shows_its_own_picture_and_others_of_the_whole_data_set(index: AnnotationIndex, mixup: float) -> None:
    augment, shown = STILL.model_copy(update={"mosaic": 1.0, "mixup": mixup}), []
    for position in range(30):
        data, loaded = dataset(index, augment), []
        data._picture = lambda number, ask=data._picture, seen=loaded: seen.append(number) or ask(number)
        data[SampleKey(0, position, 5)]
        assert len(loaded) == (8 if mixup else 4)
        assert 5 in loaded[:4]
        shown += loaded
    assert set(shown) == set(range(len(index)))


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_partners_of_a_block_come_from_it_and_a_batch_decodes_each_image_once(
        index: AnnotationIndex, monkeypatch: pytest.MonkeyPatch, mixup: float) -> None:
    data = dataset(index, DEFAULT.model_copy(update={"mixup": mixup}))
    block = (1, 3, 4, 6)
    keys = [SampleKey(0, position, block[position % 4], block) for position in range(12)]
    alone = collate([data[key] for key in keys])

    loaded: list[int] = []
    load = data.pictures.load
    monkeypatch.setattr(data.pictures, "load", lambda image: loaded.append(image) or load(image))
    for _ in range(2):  # nothing is kept from batch to batch
        together = data.__getitems__(keys)
    assert sorted(loaded) == sorted(2 * block)
    for name, tensor in together.items():
        assert torch.equal(tensor, alone[name]), name


def test_each_image_of_a_block_can_be_a_partner(index: AnnotationIndex) -> None:
    block = (1, 3, 4, 6)
    data = dataset(index, STILL.model_copy(update={"mosaic": 1.0}))
    shown: set[int] = set()
    for position in range(30):
        data._picture = lambda number, ask=data._picture: shown.add(number) or ask(number)
        data[SampleKey(0, position, 3, block)]
    assert shown == set(block)


def test_the_seam_lies_in_the_middle_half_of_the_canvas_ends_included(index: AnnotationIndex) -> None:
    """A canvas of 64 x 64: seams at 16 to 48."""
    data = dataset(index, STILL.model_copy(update={"mosaic": 1.0}), imgsz=32)
    view = data._view
    seams = []

    def record(rng, tiles, labels, seam, *others):
        seams.append(seam)
        return view(rng, tiles, labels, seam, *others)

    data._view = record
    for position in range(400):
        data[SampleKey(0, position, 0)]
    for side in np.array(seams).T:
        assert set(side.tolist()) == set(range(16, 49))


def test_mixup_joins_the_labels_of_two_mosaics(index: AnnotationIndex) -> None:
    mosaic = STILL.model_copy(update={"mosaic": 1.0})
    more = 0
    for position in range(5):
        plain = dataset(index, mosaic)[SampleKey(0, position, 1)]
        mixed = dataset(index, mosaic.model_copy(update={"mixup": 1.0}))[SampleKey(0, position, 1)]
        assert torch.equal(mixed["boxes"][:len(plain["boxes"])], plain["boxes"])
        assert not torch.equal(mixed["image"], plain["image"])
        more += len(mixed["classes"]) - len(plain["classes"])
    assert more > 5


def test_mixup_blends_two_mosaics_nearly_half_and_half(tmp_path: Path) -> None:
    """Shares are drawn from Beta(32, 32), whose deviation is 1 / sqrt(4 x 65)."""
    description = write_dataset(tmp_path, {"a": None, "b": "0 0.5 0.5 0.5 0.5\n"}, size=(64, 64))
    for name, grey in (("a", 0), ("b", 250)):
        write_image(tmp_path / "images" / f"{name}.png", np.full((64, 64, 3), grey, np.uint8))
    augment = STILL.model_copy(update={"mosaic": 1.0, "mixup": 1.0})
    data, shares = dataset(read_index(description, "train"), augment), []
    for position in range(150):
        greys = np.unique(data[SampleKey(0, position, position % 2)]["image"]) / 250
        mixed = greys[(greys > 0) & (greys < 1)]
        assert len(mixed) <= 2  # one is black, the other white, or the other way round
        shares += mixed[:1].tolist()
    assert len(shares) > 100
    assert np.sqrt(np.mean((np.array(shares) - 0.5) ** 2)) == pytest.approx(260**-0.5, rel=0.25)


def test_rectangular_samples_have_the_given_shapes_and_no_mosaic(index: AnnotationIndex) -> None:
    shapes = np.tile([[64, 96]], (7, 1))
    sample = dataset(index, STILL.model_copy(update={"mosaic": 1.0}), shapes=shapes)[SampleKey(0, 0, 1)]
    assert sample["image"].shape == (3, 64, 96)
    assert np.array_equal(sample["image"].permute(1, 2, 0).numpy()[8:56, 16:80], ImageStore(index, 64).load(1))


def test_an_image_damaged_after_the_check_is_replaced_by_the_next(index: AnnotationIndex,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    Path(index.paths[2]).write_bytes(b"broken")
    data = dataset(index, STILL)
    broken, following = data[SampleKey(0, 0, 2)], data[SampleKey(0, 0, 3)]
    assert torch.equal(broken["image"], following["image"])
    assert torch.equal(broken["boxes"], following["boxes"])
    assert index.paths[2] in caplog.text
    for path in index.paths:
        Path(path).write_bytes(b"broken")
    with pytest.raises(DatasetError):
        data[SampleKey(0, 0, 2)]


def test_outlines_travel_to_loader_processes_only_when_they_are_used(index: AnnotationIndex) -> None:
    """They are wherever a picture is cut or moved."""
    assert dataset(index, STILL.model_copy(update={"fliplr": 0.5, "hsv_h": 0.1})).index.polygons == {}
    for change in ("mosaic", "translate", "scale", "degrees", "shear", "perspective"):
        augment = STILL.model_copy(update={change: 1e-4})
        assert dataset(index, augment).index.polygons == index.polygons != {}


def test_pickling_a_dataset_does_not_pickle_pictures(index: AnnotationIndex) -> None:
    store = ImageStore(index, 64, "ram")
    store.load(0)
    assert len(pickle.dumps(TrainDataset(index, store, AugmentConfig(), 64, 0, 1))) < 8000 < store.load(0).nbytes


def test_a_batch_has_the_agreed_form(index: AnnotationIndex) -> None:
    samples = [dataset(index, STILL)[SampleKey(0, number, number)] for number in (1, 0, 2)]
    batch = collate(samples)
    assert (batch["images"].shape, batch["images"].dtype) == ((3, 3, 64, 64), torch.uint8)
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert batch["indices"].tolist() == [1, 0, 2]
    assert batch["targets"].dtype == torch.float32
    assert batch["targets"][:, :2].tolist() == [[0, 0], [0, 1], [2, 0], [2, 1]]
    for number, sample in enumerate(samples):
        assert torch.equal(batch["images"][number], sample["image"])
        assert torch.equal(batch["targets"][batch["targets"][:, 0] == number, 2:], sample["boxes"])


@pytest.mark.parametrize("augment", [DEFAULT, WILD], ids=["default", "wild"])
def test_a_batch_is_its_samples(index: AnnotationIndex, augment: AugmentConfig) -> None:
    data = dataset(index, augment)
    batch, one_by_one = data.__getitems__(KEYS), collate([data[key] for key in KEYS])
    assert batch.keys() == one_by_one.keys()
    assert all(torch.equal(batch[name], one_by_one[name]) for name in batch)
    assert batch["images"].is_contiguous(memory_format=torch.channels_last)


def test_a_batch_of_quads_is_made_from_its_samples(index: AnnotationIndex) -> None:
    data = TrainDataset(index, ImageStore(index, 64), DEFAULT, 64, 0, 10, quad=True)
    keys = KEYS[:8]
    batch, quads = data.__getitems__(keys), quad_collate([data[key] for key in keys])
    assert batch["images"].shape == (2, 3, 128, 128)
    assert all(torch.equal(batch[name], quads[name]) for name in batch)
    assert len({data[key]["draw"] for key in keys}) == len(keys)


def test_a_batch_without_labels_has_no_targets(index: AnnotationIndex) -> None:
    assert collate([dataset(index, STILL)[SampleKey(0, 0, 0)]])["targets"].shape == (0, 6)


def plain_samples(draw: float) -> list[Sample]:
    return [{"image": torch.full((3, 4, 6), 10 * number, dtype=torch.uint8), "boxes": torch.tensor([[0.0, 0, 2, 3]]),
             "classes": torch.tensor([number]), "index": number, "draw": draw} for number in range(6)]


def test_quads_lie_side_by_side_or_are_enlarged_by_the_first_draw() -> None:
    grid = quad_collate(plain_samples(0.7))
    assert grid["images"].shape == (2, 3, 8, 12)
    assert grid["images"][0, 0, ::4, ::6].tolist() == [[0, 10], [20, 30]]
    assert grid["images"][1, 0, ::4, ::6].tolist() == [[40, 50], [114, 114]]
    assert grid["targets"].tolist()[:4] == [
        [0, 0, 0, 0, 2, 3], [0, 1, 6, 0, 8, 3], [0, 2, 0, 4, 2, 7], [0, 3, 6, 4, 8, 7]]
    large = quad_collate(plain_samples(0.2))
    assert large["images"].shape == (2, 3, 8, 12)
    assert large["targets"].tolist() == [[0, 0, 0, 0, 4, 6], [1, 4, 0, 0, 4, 6]]
    assert large["indices"].tolist() == [0, 4]
