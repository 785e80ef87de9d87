"""The plan of an epoch: no image is dropped or repeated, for any number of workers."""

import itertools
import tracemalloc

import numpy as np
import pytest

from ray_yolo.config.recipe import Recipe, resolve
from ray_yolo.core.errors import ConfigError
from ray_yolo.core.structures import SampleKey
from ray_yolo.engine.plan import Plan, ShardSampler, Step
from ray_yolo.ops.seeding import epoch_order
from ray_yolo.sinks.report import idle_line


def make_plan(num_images: int = 37, **recipe: object) -> Plan:
    fields = {"batch_size": 16, "microbatch": 4, **recipe}
    return Plan(resolve(Recipe.model_validate(fields), 1, gpu=False), num_images)


def test_hand_worked_epochs() -> None:
    plan = make_plan()
    assert plan.batches == 3
    assert plan.warmup == 100  # at least 100 batches
    assert plan.steps(0) == [Step(range(0, 16), 0), Step(range(16, 32), 1), Step(range(32, 37), 2)]
    assert plan.steps(40) == [Step(range(0, 37), 122)]  # 4 batches wanted, 3 in the epoch
    assert plan.microbatches(plan.steps(0)[2]) == 2  # 4 + 1 images


def test_steps_partition_the_epoch() -> None:
    for num_images, epoch in itertools.product((1, 16, 37, 100, 333), (0, 1, 7, 50)):
        steps = make_plan(num_images).steps(epoch)
        assert [i for step in steps for i in step.images] == list(range(num_images)), (num_images, epoch)


def test_shares_partition_every_step() -> None:
    for sync_bn, workers in itertools.product((False, True), (1, 2, 3, 4)):
        plan = make_plan(sync_bn=sync_bn, **({"microbatch": None} if sync_bn else {}))
        for epoch, step in ((e, s) for e in (0, 20, 60) for s in plan.steps(e)):
            shares = [plan.shard(step, worker, workers) for worker in range(workers)]
            images = sorted(i for part in shares for microbatch in part for i in microbatch.images)
            assert images == list(step.images), (sync_bn, workers, epoch)
            assert plan.shard_sizes(step, workers) == [len(part) for part in shares], (sync_bn, workers, epoch)


def test_microbatches_do_not_depend_on_the_number_of_workers() -> None:
    plan = make_plan(100)
    for step in plan.steps(60):
        whole = {m.number: m.images for m in plan.shard(step, 0, 1)}
        for workers in (2, 3, 4, 7):
            shared = {m.number: m.images for w in range(workers) for m in plan.shard(step, w, workers)}
            assert shared == whole


def keys_of(sampler: ShardSampler) -> list[SampleKey]:
    """The keys of all parts of an iteration."""
    return [key for part in sampler for key in part.keys]


def test_parts_are_the_plans_microbatches_in_pieces_one_epoch_after_the_other() -> None:
    for sync_bn, workers, images in itertools.product((False, True), (1, 2, 3, 4), (1, 3, 2**31)):
        plan = make_plan(sync_bn=sync_bn, **({"microbatch": None} if sync_bn else {}))
        for worker, epoch in itertools.product(range(workers), (0, 60)):
            sampler = ShardSampler(plan, worker, workers, part_images=images)
            sampler.start(epoch, 0, None, epoch + 1)
            found: list[tuple[int, list[int]]] = []
            for part in sampler:
                assert len(part.keys) == min(images, part.size - part.first)
                if part.first == 0:
                    found.append((part.keys[0].epoch, []))
                assert len(found[-1][1]) == part.first
                found[-1][1].extend(key.position for key in part.keys)
            wanted = []
            for each in (epoch, epoch + 1):
                shares = [plan.shard(step, worker, workers) for step in plan.steps(each)]
                wanted += [(each, list(m.images)) for share in shares for m in share if m.images]
            assert found == wanted, (sync_bn, workers, worker, epoch, images)


def test_partners_are_images_of_neighbouring_positions_for_any_number_of_workers() -> None:
    """37 images in blocks of 8: the last block is that of the last 8 positions, so it is a whole one, too."""
    plan = make_plan(augment={"partners": 8})
    order = epoch_order(plan.recipe.seed, 3, 37).tolist()
    blocks = {}
    for workers in (1, 2, 3):
        for worker in range(workers):
            sampler = ShardSampler(plan, worker, workers)
            sampler.start(3)
            blocks |= {(workers, key.position): key.block for key in keys_of(sampler)}
    for workers in (1, 2, 3):
        found = [blocks[workers, position] for position in range(37)]
        assert found[:8] == [tuple(order[:8])] * 8
        assert found[24:32] == [tuple(order[24:32])] * 8
        assert found[32:] == [tuple(order[29:])] * 5


def test_a_block_larger_than_the_data_set_is_all_of_it_and_without_partners_there_is_none() -> None:
    for partners, sizes in ((64, {37}), (0, {0})):
        sampler = ShardSampler(make_plan(augment={"partners": partners}), 0, 1)
        sampler.start(0)
        assert {len(key.block) for key in keys_of(sampler)} == sizes


def test_resuming_inside_an_epoch_continues_the_same_order() -> None:
    plan = make_plan()
    sampler = ShardSampler(plan, 0, 1)
    sampler.start(3)
    whole = keys_of(sampler)
    sampler.start(3, images_done=16)
    assert keys_of(sampler) == whole[16:]
    sampler.start(3, 16, None, 4)
    both = keys_of(sampler)
    sampler.start(4)
    following = keys_of(sampler)
    assert both == whole[16:] + following
    for last, expected in ((3, []), (4, following)):  # all steps were done, but the epoch was not closed
        sampler.start(3, 37, None, last)
        assert keys_of(sampler) == expected
    assert sorted(key.image for key in whole) == list(range(37))


def test_a_sample_takes_a_few_bytes_and_a_running_iteration_keeps_its_epoch() -> None:
    """A list of keys took 144 bytes for each image, in every worker."""
    sampler = ShardSampler(make_plan(100_000), 0, 1, part_images=1)
    tracemalloc.start()
    try:
        sampler.start(0)
        iteration = iter(sampler)
        first = next(iteration)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 100_000 < 30
    order = [first, *itertools.islice(iteration, 9)]
    again = iter(sampler)
    assert [next(again) for _ in range(10)] == order
    sampler.start(1)
    assert {part.keys[0].epoch for part in itertools.islice(again, 5)} == {0}
    assert next(iter(sampler)).keys[0].epoch == 1


def test_weighted_epochs_may_repeat_images_but_never_positions() -> None:
    sampler = ShardSampler(make_plan(), 0, 1)
    sampler.start(0, weights=np.eye(37)[5] + 1e-9)
    keys = keys_of(sampler)
    assert [key.position for key in keys] == list(range(37))
    assert len({key.image for key in keys}) < 5


@pytest.mark.parametrize(("fields", "most"), [({}, 4), ({"microbatch": 16}, 1), ({"microbatch": 1}, 16),
                                              ({"sync_bn": True, "microbatch": None}, 16)])
def test_as_many_workers_as_a_full_step_has_parts_are_legal(fields: dict[str, object], most: int) -> None:
    recipe = Recipe.model_validate({"batch_size": 16, "microbatch": 4, "optimizer": {"nominal_batch": 16}, **fields})
    assert resolve(recipe, most, gpu=False).batch_size == 16
    with pytest.raises(ConfigError):
        resolve(recipe, most + 1, gpu=False)


def test_rates_use_the_steps_last_batch_and_the_integer_epoch() -> None:
    plan = make_plan(epochs=100)
    step = plan.steps(60)[0]
    rates = plan.rates(step, 60)
    assert rates.lr == pytest.approx((0.01 * (0.4 * 0.99 + 0.01),) * 3)
    first = plan.rates(plan.steps(0)[0], 0)
    assert first.lr == pytest.approx((0.1, 0.0, 0.0))


@pytest.mark.parametrize(("num_workers", "settings"), [
    (1, {}), (2, {"microbatch": 16}), (4, {"microbatch": 16}), (3, {"microbatch": 4}), (2, {"microbatch": 8}),
    (5, {"batch_size": 8, "microbatch": 4}), (3, {"sync_bn": True, "microbatch": None})])
def test_idle_share_is_that_of_the_shards(num_workers: int, settings: dict[str, object]) -> None:
    """Against a slow loop over the shards: a step lasts as long as the largest one. 205 images, as BCCD has."""
    plan = make_plan(205, **settings)
    for epoch in (0, 1, 5, 40):
        worked = lasted = 0
        for step in plan.steps(epoch):
            sizes = [len(plan.shard(step, worker, num_workers)) for worker in range(num_workers)]
            worked += sum(sizes)
            lasted += max(sizes) * num_workers
        assert plan.idle_share(epoch, num_workers) == pytest.approx(1 - worked / lasted), epoch


def test_idle_line_of_a_warm_up() -> None:
    """BCCD with a batch of 16: its first epoch has steps of one microbatch, so half of two workers' time is idle."""
    plan = make_plan(205, microbatch=None)
    assert idle_line(plan, 1) == ""
    assert idle_line(plan, 2) == (
        "2 workers are idle for 50 % of their time in the first epoch: its first step has 1 microbatch of 16 images, "
        "so 1 worker without work, until epoch 3; with --microbatch 8, a new training with other weights, 0 %")
    assert idle_line(make_plan(205, microbatch=8), 2) == ""
    assert "in every epoch" in idle_line(make_plan(640, batch_size=64, microbatch=16), 3)
