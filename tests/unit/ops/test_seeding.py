"""Draws belong to their keys."""

import numpy as np

from ray_yolo.ops.seeding import Stream, epoch_order, generator, image_size


def test_equal_keys_draw_alike_and_sums_of_keys_do_not_matter() -> None:
    def draw(*key: int) -> float:
        return float(generator(Stream.SAMPLE, *key).random())

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert draw(1, 2, 3) != draw(2, 1, 3)
    assert draw(0, 3, 3) != draw(1, 2, 3)
    assert generator(Stream.ORDER, 1).random() != generator(Stream.SAMPLE, 1).random()


def test_an_epochs_order_is_a_permutation_that_changes_with_seed_and_epoch() -> None:
    order = epoch_order(0, 0, 37)
    assert sorted(order) == list(range(37))
    assert not np.array_equal(order, epoch_order(0, 1, 37))
    assert not np.array_equal(order, epoch_order(1, 0, 37))


def test_weighted_order_draws_in_proportion_to_the_weights() -> None:
    weights = np.zeros(10_000)
    weights[7], weights[9] = 1.0, 3.0
    order = epoch_order(0, 0, 10_000, weights)
    assert set(order) == {7, 9}
    assert 0.73 < (order == 9).mean() < 0.77


def test_multi_scale_sizes_are_multiples_of_the_stride_within_half_and_one_and_a_half() -> None:
    sizes = [image_size(0, step, 640, 32) for step in range(2000)]
    assert all(size % 32 == 0 for size in sizes)
    assert min(sizes) == 320
    assert max(sizes) == 960
    assert sizes[5] == image_size(0, 5, 640, 32)


def test_multi_scale_sizes_are_at_least_two_strides() -> None:
    def drawn(imgsz: int, step: int) -> int:
        return int(generator(Stream.IMAGE_SIZE, 0, step).integers(imgsz // 2, imgsz * 3 // 2 + 32)) // 32 * 32

    assert {image_size(0, step, 64, 32) for step in range(200)} == {64, 96}
    assert min(drawn(64, step) for step in range(200)) == 32
    assert all(image_size(0, step, 128, 32) == drawn(128, step) for step in range(200))
