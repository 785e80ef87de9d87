"""cluster/rayjob.yaml and storage.yaml: KubeRay's schema, and the rules that a schema does not know."""

import copy
import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT.parent / "shared" / "schemas" / "ray.io_rayjobs.yaml"
JOB, POLICY = yaml.safe_load_all((ROOT / "cluster" / "rayjob.yaml").read_text())
CLAIM: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "storage.yaml").read_text())
HEAD = JOB["spec"]["rayClusterSpec"]["headGroupSpec"]
WORKERS = JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
TEMPLATES = {"submitter": JOB["spec"]["submitterPodTemplate"], "head": HEAD["template"],
             **{group["groupName"]: group["template"] for group in WORKERS}}
RAY_PODS = [name for name in TEMPLATES if name != "submitter"]


def closed(schema: Any) -> Any:
    """The schema with every described object closed, as the API server's strict field validation reads it."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    described = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if described and not schema.get("x-kubernetes-preserve-unknown-fields"):
        parts.setdefault("additionalProperties", False)
    return parts


@functools.cache
def ray_job_schema() -> dict[str, Any]:
    crd = yaml.load(SCHEMA.read_text(), yaml.CSafeLoader)
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    return closed(version["schema"]["openAPIV3Schema"])


def faults(job: dict[str, Any]) -> list[str]:
    """What KubeRay's schema has to say about a RayJob."""
    return [error.message for error in jsonschema.Draft7Validator(ray_job_schema()).iter_errors(job)]


@pytest.mark.realdata
def test_kuberay_accepts_it() -> None:
    assert faults(JOB) == []


def _misspell(job: dict[str, Any]) -> None:
    job["spec"]["entrypont"] = job["spec"].pop("entrypoint")


def _misspell_deep(job: dict[str, Any]) -> None:
    container = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["resource"] = container.pop("resources")


def _ill_type(job: dict[str, Any]) -> None:
    job["spec"]["backoffLimit"] = "3"


def _unknown_mode(job: dict[str, Any]) -> None:
    job["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "tokens"


@pytest.mark.realdata
@pytest.mark.parametrize("spoil", [_misspell, _misspell_deep, _ill_type, _unknown_mode])
def test_kuberay_refuses_a_spoilt_copy(spoil: Callable[[dict[str, Any]], None]) -> None:
    job = copy.deepcopy(JOB)
    spoil(job)
    assert len(faults(job)) == 1


def test_a_closed_schema_keeps_what_is_open_on_purpose() -> None:
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert closed({"properties": {"x": one}, "type": "object"})["properties"]["x"]["additionalProperties"] is False
    assert "additionalProperties" not in closed({**one, "x-kubernetes-preserve-unknown-fields": True})
    assert closed({**one, "additionalProperties": True})["additionalProperties"] is True
    assert closed({"type": "object"}) == {"type": "object"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_pods_are_restricted(name: str) -> None:
    """Kubernetes' `restricted` pod security standard, and no account token, which Ray jobs have no use for."""
    pod = TEMPLATES[name]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_containers_have_limits_and_a_pinned_image(name: str) -> None:
    for container in TEMPLATES[name]["spec"]["containers"]:
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["image"].partition(":")[2] not in ("", "latest")


@pytest.mark.parametrize("name", TEMPLATES)
def test_volumes_are_mounted_and_scratch_is_sized(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == set(volumes)
    assert all("sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume)


@pytest.mark.parametrize("name", RAY_PODS)
def test_ray_pods_have_shared_memory_and_the_storage_of_the_entrypoint(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounted[flag("--storage-path")]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_token_holders_and_the_jobs_own_pods_get_in() -> None:
    assert JOB["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    selected = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(template["metadata"]["labels"].items() >= selected.items() for template in TEMPLATES.values())
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    assert all("podSelector" in source for rule in POLICY["spec"]["ingress"] for source in rule["from"])


def test_the_job_ends_and_cleans_up() -> None:
    spec = JOB["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["activeDeadlineSeconds"] > 0
    assert 0 < spec["backoffLimit"] <= 10


def test_the_workers_fit_on_the_nodes() -> None:
    """As many workers as GPUs, their CPUs within each node's, none on the head."""
    (group,) = WORKERS
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_node = int(limits["nvidia.com/gpu"])
    assert int(flag("--num-workers")) == group["replicas"] * per_node
    assert int(flag("--cpus-per-worker")) * per_node <= int(limits["cpu"])
    assert HEAD["rayStartParams"]["num-cpus"] == "0"


def flag(name: str) -> str:
    """The value of a flag of the entrypoint."""
    words = shlex.split(JOB["spec"]["entrypoint"])
    return words[words.index(name) + 1]
