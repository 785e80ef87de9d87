"""A training whose device renders its samples has the same bits on any number of workers. Here the device is the CPU,
by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_yolo.config.placement import Placement
from ray_yolo.config.recipe import Recipe
from ray_yolo.core.events import Event, StepEvent
from ray_yolo.engine import team as team_module
from ray_yolo.engine.collectives import Collectives
from ray_yolo.engine.membership import Rendezvous
from ray_yolo.engine.session import run_session
from ray_yolo.engine.spec import TrainSpec, WorkerContext
from tests.support import run_log
from tests.support.interpreted import interpreted
from tests.support.jobs import make_spec
from tests.support.workers import run_workers, wrap_model

pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
pytestmark = pytest.mark.timeout(300)

RECIPE: dict[str, Any] = {"exact": True, "epochs": 2, "batch_size": 8, "microbatch": 4, "multi_scale": True,
                          "optimizer": {"nominal_batch": 24, "clip_norm": 0.3}}
NUM_IMAGES = 19


def train(collectives: Collectives, spec: TrainSpec, loader_processes: int = 0) -> dict[str, Any]:
    """The losses of a training that the device renders, the pictures of this worker's microbatches, and the
    checkpoint."""
    events: list[Event] = []
    pictures: list[Tensor] = []
    context = WorkerContext(prepare_model=lambda model: wrap_model(model, collectives),
                            loader_processes=loader_processes)
    with pytest.MonkeyPatch.context() as patch, interpreted(
            "ray_yolo.ops.render_kernel", "ray_yolo.ops.colour_kernel") as module:
        def noted(*args: Any) -> Tensor:
            images = render(*args)
            pictures.append(images.clone())
            return images

        render = module.rendered_input
        patch.setattr(module, "rendered_input", noted)
        for decide in (team_module.renders_on_device, team_module.recolours_on_device):  # as on a GPU
            patch.setattr(team_module, decide.__name__, partial(as_on_gpu, decide))
        run_session(spec, context, Placement(), events.append, Rendezvous(collectives))
    losses = [event.loss for event in run_log.only(StepEvent, events)]
    state = torch.load(spec.run_dir / "weights" / "last.pt", weights_only=True)
    return {"losses": losses, "pictures": pictures, "weights": list(state["model"].values())}


def as_on_gpu(decide: Callable[[Recipe, torch.device], bool], recipe: Recipe, device: torch.device) -> bool:
    return decide(recipe, torch.device("cuda"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(Collectives(), make_spec(tmp_path_factory.mktemp("alone"), NUM_IMAGES, **RECIPE,
                                          augment={"render": "device"}))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    for a, b in zip(one["weights"], other["weights"], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_any_number_of_workers_trains_the_same_weights(alone: dict[str, Any], tmp_path: Path, num_workers: int) -> None:
    spec = make_spec(tmp_path, NUM_IMAGES, **RECIPE, augment={"render": "device"})
    results = run_workers(num_workers, train, spec)
    assert_same(results[0], alone)
    assert sum(len(each) for result in results for each in result["pictures"]) == 2 * NUM_IMAGES
    assert all(result["pictures"] for result in results)


def test_loader_processes_send_the_same_views(alone: dict[str, Any], tmp_path: Path) -> None:
    spec = make_spec(tmp_path, NUM_IMAGES, **RECIPE, augment={"render": "device"})
    assert_same(train(Collectives(), spec, loader_processes=2), alone)


def test_its_weights_are_close_to_those_of_the_hosts_pictures(alone: dict[str, Any], tmp_path: Path) -> None:
    host = train(Collectives(), make_spec(tmp_path, NUM_IMAGES, **RECIPE))
    assert not host["pictures"]
    apart = (torch.tensor(host["losses"]) - torch.tensor(alone["losses"])).abs()
    assert 0 < apart.max() < 0.02


def test_settings_decide_who_renders_from_epoch_to_epoch(alone: dict[str, Any], tmp_path: Path) -> None:
    """In the second one mixup needs the host."""
    changed = train(Collectives(), make_spec(tmp_path, NUM_IMAGES, **RECIPE, augment={"render": "device"},
                                             changes=("1: mixup=0.5",)))
    assert sum(map(len, changed["pictures"])) == NUM_IMAGES
    for found, expected in zip(changed["pictures"], alone["pictures"], strict=False):
        assert torch.equal(found, expected)
