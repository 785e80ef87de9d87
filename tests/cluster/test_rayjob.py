"""cluster/rayjob*.yaml with network.yaml, storage.yaml and kueue.yaml: KubeRay's schema, Kubernetes' own, and the rules
that schemas do not know.
"""

import copy
import functools
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT.parent / "shared" / "schemas" / "ray.io_rayjobs.yaml"
KUBERNETES = "1.34"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "cluster" / name).read_text()))


FILES = {name: documents(name) for name in ("rayjob.yaml", "rayjob-cpu.yaml", "rayjob-spot.yaml")}
JOBS = {name: parts[0] for name, parts in FILES.items()}
(POLICY,) = documents("network.yaml")
(CLAIM,) = documents("storage.yaml")
QUEUES = documents("kueue.yaml")
SPOT, LASTING = ({"karpenter.sh/capacity-type": kind} for kind in ("spot", "on-demand"))


def cluster(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]


def templates(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods of a job by what they are for."""
    (group,) = cluster(job)["workerGroupSpecs"]
    return {"submitter": job["spec"]["submitterPodTemplate"], "head": cluster(job)["headGroupSpec"]["template"],
            "worker": group["template"]}


PODS = {f"{file}:{name}": template for file, job in JOBS.items() for name, template in templates(job).items()}
RAY_PODS = {name: template for name, template in PODS.items() if not name.endswith("submitter")}


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
@pytest.mark.parametrize("file", JOBS)
def test_kuberay_accepts_it(file: str) -> None:
    assert faults(JOBS[file]) == []


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
    job = copy.deepcopy(JOBS["rayjob.yaml"])
    spoil(job)
    assert len(faults(job)) == 1


def test_a_closed_schema_keeps_what_is_open_on_purpose() -> None:
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert closed({"properties": {"x": one}, "type": "object"})["properties"]["x"]["additionalProperties"] is False
    assert "additionalProperties" not in closed({**one, "x-kubernetes-preserve-unknown-fields": True})
    assert closed({**one, "additionalProperties": True})["additionalProperties"] is True
    assert closed({"type": "object"}) == {"type": "object"}


OBJECTS = [POLICY, CLAIM, *(part for parts in FILES.values() for part in parts[1:])]


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda thing: f"{thing['kind']} {thing['metadata']['name']}")
def test_kubernetes_accepts_it(thing: dict[str, Any]) -> None:
    kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**thing, "spec": {**thing["spec"], "unknown": 1}}, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_kubernetes_accepts_the_pods(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **PODS[name], "metadata": {"name": "pod", **PODS[name]["metadata"]}}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_pods_are_restricted() -> None:
    """Kubernetes' `restricted` pod security standard, and no account token, which Ray jobs have no use for."""
    for name, template in PODS.items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_containers_have_limits_and_a_pinned_image() -> None:
    for name, template in PODS.items():
        for container in template["spec"]["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), name
            assert container["resources"]["requests"] == container["resources"]["limits"], name
            assert container["image"].partition(":")[2] not in ("", "latest"), name


def test_volumes_are_mounted_and_scratch_is_sized() -> None:
    for name, template in PODS.items():
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes), name
        assert all("sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume), name


def test_ray_pods_have_shared_memory_and_the_storage_of_the_entrypoint() -> None:
    for name, template in RAY_PODS.items():
        pod = template["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        storage = flag(JOBS[name.partition(":")[0]], "--storage-path")
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory", name
        assert mounted[storage]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"], name
        assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"], name


def test_mlflows_secret_is_the_drivers_alone() -> None:
    """The head runs the driver, and the driver's node everything that talks to MLflow."""
    for name, template in PODS.items():
        (container,) = template["spec"]["containers"]
        secrets = [source["secretRef"] for source in container.get("envFrom", ())]
        assert secrets == [{"name": "ray-yolo-mlflow", "optional": True}] * name.endswith("head"), name


def test_only_token_holders_and_the_jobs_own_pods_get_in_and_nothing_else_is_talked_to() -> None:
    assert all(cluster(job)["authOptions"] == {"mode": "token"} for job in JOBS.values())
    selected = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(template["metadata"]["labels"].items() >= selected.items() for template in PODS.values())
    assert POLICY["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all("podSelector" in source for rule in POLICY["spec"]["ingress"] for source in rule["from"])
    assert all("to" in rule and "ipBlock" not in peer for rule in POLICY["spec"]["egress"] for peer in rule["to"])


def test_the_job_ends_and_cleans_up() -> None:
    for file, job in JOBS.items():
        spec = job["spec"]
        assert spec["shutdownAfterJobFinishes"] is True, file  # Kueue asks for it too
        assert spec["ttlSecondsAfterFinished"] > 0, file
        assert spec["activeDeadlineSeconds"] > 0, file
        assert 0 < spec["backoffLimit"] <= 10, file


def test_the_workers_fit_on_the_nodes() -> None:
    """As many workers as GPUs, or one on each node; their CPUs within each node's, none on the head."""
    for file, job in JOBS.items():
        (group,) = cluster(job)["workerGroupSpecs"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        per_node = int(limits.get("nvidia.com/gpu", 1))
        assert int(flag(job, "--num-workers").split("-")[-1]) == group["replicas"] * per_node, file
        assert int(flag(job, "--cpus-per-worker")) * per_node <= int(limits["cpu"]), file
        assert cluster(job)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", file


@pytest.mark.parametrize("file", JOBS)
@pytest.mark.parametrize("title", ["RayTrainWorker.poll_status", "pool_worker", "Recorder"])
@pytest.mark.root
def test_workers_are_signalled_before_their_pod_ends(file: str, title: str) -> None:
    """In a process space of its own, with a stand-in of that name that says what it gets."""
    [container] = PODS[f"{file}:worker"]["spec"]["containers"]
    messages = container["lifecycle"]["preStop"]["exec"]["command"]
    assert messages[:2] == ["sh", "-c"]
    script = (f"""(trap 'echo messages; exit' TERM; exec -a 'ray::{title}' bash -c "trap 'echo messages; exit' TERM; """
              """while :; do read -t 0.1 <> <(:); done") & sleep 0.5; sh -c "$1"; kill -9 %1""")
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", script, "pod",
                           messages[2].replace("sleep 15", "sleep 0.5")], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["messages"] * (title != "Recorder"), done.stderr


def test_a_drain_leaves_the_head_and_takes_one_worker_at_a_time() -> None:
    for file, job in JOBS.items():
        (group,) = cluster(job)["workerGroupSpecs"]
        head, workers = (part["spec"] for part in FILES[file][1:])
        assert (head["minAvailable"], workers["minAvailable"]) == (1, group["replicas"] - 1), file
        for budget, kind in ((head, "head"), (workers, "worker")):  # KubeRay labels its pods with their kind
            name = job["metadata"]["name"]
            labels = {"app.kubernetes.io/instance": name, "ray.io/node-type": kind}
            assert budget["selector"]["matchLabels"] == labels, (file, kind)
            assert PODS[f"{file}:{kind}"]["metadata"]["labels"]["app.kubernetes.io/instance"] == name, (file, kind)


def test_only_workers_are_on_spot_and_lose_little() -> None:
    job = JOBS["rayjob-spot.yaml"]
    placed = {name: pod["spec"].get("nodeSelector") for name, pod in templates(job).items()}
    assert placed == {"submitter": LASTING, "head": LASTING, "worker": SPOT}
    assert cluster(job)["workerGroupSpecs"][0]["labels"] == {"ray.io/market-type": "spot"}
    assert flag(job, "--max-failures") == "-1"
    assert int(flag(job, "--save-steps")) <= 500


@pytest.mark.parametrize("file", ["rayjob-cpu.yaml", "rayjob-spot.yaml"])
def test_workers_are_spread(file: str) -> None:
    worker = PODS[f"{file}:worker"]
    (spread,) = worker["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == worker["metadata"]["labels"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"  # or a small cluster would wait for ever


def test_every_job_has_a_queue_with_room_for_it() -> None:
    by_kind: dict[str, dict[str, Any]] = {}
    for thing in QUEUES:
        assert thing["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        by_kind.setdefault(thing["kind"], {})[thing["metadata"]["name"]] = thing
    flavours = {name: flavour["spec"]["nodeLabels"] for name, flavour in by_kind["ResourceFlavor"].items()}
    assert flavours == {"on-demand": LASTING, "spot": SPOT}
    for job in JOBS.values():
        labels = job["metadata"]["labels"]
        queue = by_kind["LocalQueue"][labels["kueue.x-k8s.io/queue-name"]]
        assert labels["kueue.x-k8s.io/priority-class"] in by_kind["WorkloadPriorityClass"]
        (group,) = by_kind["ClusterQueue"][queue["spec"]["clusterQueue"]]["spec"]["resourceGroups"]
        nodes = cluster(job)["workerGroupSpecs"][0]["replicas"]
        asked = templates(job)["worker"]["spec"]["containers"][0]["resources"]["limits"]
        for offer in group["flavors"]:
            room = {resource["name"]: resource["nominalQuota"] for resource in offer["resources"]}
            assert list(room) == group["coveredResources"]
            assert all(nodes * int(asked.get(kind, 0)) <= room[kind] for kind in ("cpu", "nvidia.com/gpu"))


def flag(job: dict[str, Any], name: str) -> str:
    """The value of a flag of a job's entrypoint."""
    words = shlex.split(job["spec"]["entrypoint"])
    return words[words.index(name) + 1]
