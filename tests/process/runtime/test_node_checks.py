"""Checks of a cluster's nodes before training starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import ray

from ray_yolo.core.errors import InputError, ResourcesError
from ray_yolo.core.structures import DatasetSnapshot
from ray_yolo.runtime import node_checks
from ray_yolo.runtime.node_checks import (
    check_nodes,
    describe_cluster,
)
from tests.support.jobs import make_index
from tests.support.sweeps import assert_cpus_return
from tests.unit.runtime.test_node_checks import OURS


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_every_other_node_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = make_index(tmp_path, 5)
    assert check_nodes(tmp_path / "gone", index) == []  # one node: its own disk will do
    monkeypatch.setattr(node_checks, "other_nodes", lambda: {ray.get_runtime_context().get_node_id(): "n1"})
    assert check_nodes(tmp_path, index) == []
    with pytest.raises(InputError, match=r"node n1 does not see .*gone; give a folder that every node mounts"):
        check_nodes(tmp_path / "gone", index)
    away = replace(index, snapshot=DatasetSnapshot("file:///none", "0", str(tmp_path)))
    with pytest.raises(InputError, match="node n1: data: file:///none: there is no such bucket or object"):
        check_nodes(tmp_path, away)
    monkeypatch.setattr(node_checks, "other_nodes", lambda: {"0" * 56: "n2"})
    with pytest.raises(ResourcesError, match="node n2 has left the cluster"):
        check_nodes(tmp_path, index)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_cluster_is_described_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_cpus_return()
    [driver, node], fit = describe_cluster("")
    assert fit
    assert driver.startswith("driver: Python 3.")
    assert node.endswith(": 4 of 4 CPU free")
    monkeypatch.setattr(
        node_checks, "other_nodes", lambda: {each["NodeID"]: node_checks._name(each) for each in ray.nodes()}
    )
    monkeypatch.setattr(node_checks, "versions", lambda: OURS)
    lines, fit = describe_cluster("")
    assert not fit
    assert "the driver 0.2.0 (aaaaaaaa): results would differ" in lines[2]
