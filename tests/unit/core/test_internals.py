"""Private names of other packages: the used ones exist, and a missing one is reported in plain words."""

from __future__ import annotations

import sys
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ray_yolo.core.errors import InputError
from ray_yolo.core.internals import NEEDED, internal
from ray_yolo.engine import collectives
from ray_yolo.ops import torch_internals

ROOT = Path(__file__).parents[3]


def test_what_is_there_is_given() -> None:
    assert internal("os.path", "join")("a", "b") == "a/b"


@pytest.mark.parametrize(("module", "name"), [("torch", "_gone"), ("torch._gone", "name")])
def test_a_missing_name_is_refused(module: str, name: str) -> None:
    with pytest.raises(InputError):
        internal(module, name)


def test_the_releases_that_are_named_begin_with_the_lowest_allowed_ones() -> None:
    floors = [text.replace("[default,train,tune]", "").split(",")[0].split(">=")
              for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]]
    lowest = {name: floor for name, *rest in floors for floor in rest}
    for package, needed in NEEDED.items():
        assert needed.split()[1] == lowest[package]


@pytest.mark.parametrize(("change", "expected"), [
    (lambda left: torch_internals.add_(left, [torch.ones(2), torch.ones(1)]), ([2.0, 3.0], [4.0])),
    (lambda left: torch_internals.add_(left, 2), ([3.0, 4.0], [5.0])),
    (lambda left: torch_internals.mul_(left, 0.5), ([0.5, 1.0], [1.5])),
    (lambda left: torch_internals.copy_(left, [torch.zeros(2), torch.ones(1)]), ([0.0, 0.0], [1.0])),
    (lambda left: torch_internals.lerp_(left, [torch.full((2,), 5.0), torch.ones(1)], 0.25), ([2.0, 2.75], [2.5])),
    (lambda left: torch_internals.lerp_(left, [torch.full((2,), 5.0), torch.ones(1)],
                                        [torch.tensor([0.25, 0.5]), torch.zeros(1)]), ([2.0, 3.5], [3.0])),
])
def test_torchs_operations_on_lists_do_what_is_said_of_them(change, expected) -> None:
    """Seen with PyTorch 2.11 and 2.15."""
    left = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    change(left)
    assert tuple(one.tolist() for one in left) == expected


def test_torchs_gradient_scaler_has_its_scale_in_tensors_that_an_update_changes() -> None:
    """Seen with PyTorch 2.15."""
    scaler, optimizer = torch.amp.GradScaler("cpu", 8.0, growth_interval=2), torch.optim.SGD([torch.ones(1)])
    optimizer.param_groups[0]["params"][0].grad = scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    state = torch_internals.scaler_tensors(scaler)
    assert [value.item() for value in state] == [8.0, 0]
    for expected in ([8.0, 1], [16.0, 0]):
        scaler.update()
        assert [value.item() for value in state] == expected
        scaler.unscale_(optimizer)
    assert torch_internals.scaler_tensors(torch.amp.GradScaler("cpu", enabled=False)) == []


def test_torchs_compiler_can_be_imported_ahead() -> None:
    torch_internals.import_compiler()
    assert "torch._dynamo" in sys.modules


@pytest.mark.parametrize("name", ["set_timeout", "_set_pg_timeout"])
def test_torch_sets_the_time_limit_of_a_group_by_the_newest_name_that_it_has(
        monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    limits: list[tuple[timedelta, object]] = []
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.setattr(dist.distributed_c10d if name[0] == "_" else dist, name,
                        lambda limit, group: limits.append((limit, group)), raising=False)
    collectives._set_group_timeout(None, 2.5)
    assert limits == [(timedelta(seconds=2.5), None)]
