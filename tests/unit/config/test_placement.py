"""Where a training runs: what is read as a number of workers, and what follows from it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ray_yolo.config.placement import Placement


def test_workers_are_a_number_a_range_or_auto() -> None:
    for given, read, most in (("auto", "auto", 1), (0, 0, 1), (3, 3, 3), ("2-8", (2, 8), 8), ([1, 4], (1, 4), 4)):
        placement = Placement.model_validate({"num_workers": given})
        assert (placement.num_workers, placement.max_workers) == (read, most), given


@pytest.mark.parametrize("given", [-1, 4097, "8-2", "0-4", "2-", "many"])
def test_other_numbers_of_workers_are_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        Placement.model_validate({"num_workers": given})


@pytest.mark.parametrize("name", ["a/b", "..", "-a", "é", "a" * 64, "a b"])
def test_a_name_is_no_path(name: str) -> None:
    for field in ("name", "registered_name"):
        with pytest.raises(ValidationError) as caught:
            Placement.model_validate({field: name})
        assert [problem["loc"] for problem in caught.value.errors()] == [(field,)]


def test_threads_are_what_loader_processes_leave() -> None:
    left = {(-1, 4.0): 4, (0, 4.0): 4, (1, 4.0): 3, (5, 1.0): 1, (0, 0.5): 1, (0, "auto"): 1}
    for (workers, cpus), threads in left.items():
        placement = Placement.model_validate({"workers": workers, "cpus_per_worker": cpus})
        assert placement.threads == threads, (workers, cpus)


@pytest.mark.parametrize("cpus", [0, -1, 4097, "all"])
def test_other_numbers_of_cpus_are_refused(cpus: object) -> None:
    with pytest.raises(ValidationError):
        Placement.model_validate({"cpus_per_worker": cpus})


def test_a_range_of_workers_is_elastic() -> None:
    for num_workers, expected in [(2, False), (1, False), ((2, 4), True), ((1, 2), True)]:
        assert Placement(num_workers=num_workers).is_elastic is expected, num_workers
