"""cluster/Dockerfile: who runs in it, and what gets into it."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each instruction, continuation lines joined."""
    lines = (ROOT / "cluster" / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#")).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines())]


def test_it_runs_as_a_numbered_user_that_is_not_root() -> None:
    """Kubernetes' runAsNonRoot can tell from a number only."""
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users == ["1000"]
    assert [name for name, _ in instructions()].index("USER") > max(
        i for i, (name, _) in enumerate(instructions()) if name == "RUN")
    assert f"useradd --uid {users[0]}" in " ".join(rest for name, rest in instructions() if name == "RUN")


def test_base_and_packages_are_pinned() -> None:
    (base,) = [rest for name, rest in instructions() if name == "FROM"]
    assert base.partition(":")[2] not in ("", "latest")
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert "pip install --no-deps --require-hashes --requirement requirements.txt" in installs[0]
    assert installs[1:] == ["pip install --no-deps --no-build-isolation ."]  # what builds it has been installed, too


def test_requirements_are_the_tested_versions_each_by_its_content() -> None:
    requirements, constraints = (versions(path) for path in ("cluster/requirements.txt", "constraints.txt"))
    assert len(requirements) > 100
    assert {name: constraints.get(name) for name in requirements} == requirements
    lines = (ROOT / "cluster" / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.!]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_requirements_have_whatever_the_package_needs() -> None:
    """Also what that needs in turn: nothing is looked for by pip, which is messages --no-deps."""
    requirements = versions("cluster/requirements.txt")
    asked = [("ray_yolo", "")]
    for name, extra in asked:
        for needed in map(Requirement, distribution(name).requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                assert canonicalize_name(needed.name) in requirements, f"{name} needs {needed}"
                asked += [each for each in [(needed.name, ""), *((needed.name, extra) for extra in needed.extras)]
                          if each not in asked]


def test_requirements_are_made_of_what_pip_reports() -> None:
    files = [{"metadata": {"name": name, "version": "1.0"}, "download_info": info} for name, info in (
        ("Zipp", {"archive_info": {"hashes": {"sha256": "a" * 64}}}), ("ray_yolo", {"dir_info": {}}),
        ("attrs", {"archive_info": {"hashes": {"sha256": "b" * 64}}}))]
    done = subprocess.run([sys.executable, ROOT / "cluster" / "requirements.py"], input=json.dumps({"install": files}),
                          capture_output=True, text=True, check=True)
    messages = done.stdout.splitlines()
    assert messages[-2:] == [f"attrs==1.0 --hash=sha256:{'b' * 64}", f"Zipp==1.0 --hash=sha256:{'a' * 64}"]
    assert messages[:-2] == (ROOT / "cluster" / "requirements.txt").read_text().splitlines()[:len(messages) - 2]


def versions(path: str) -> dict[str, str]:
    """Name -> version of a file of requirements."""
    lines = [line.split()[0].split("==") for line in (ROOT / path).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in lines}


def test_only_named_files_get_in() -> None:
    """COPY never takes a whole folder of unknown content, and the ignore file starts from nothing."""
    copied = {word for name, rest in instructions() if name in ("COPY", "ADD") for word in rest.split()[:-1]}
    ignored = [line for line in (ROOT / "cluster" / "Dockerfile.dockerignore").read_text().splitlines()
               if line and not line.startswith("#")]
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / word).exists() for word in copied)


def test_tokens_are_checked_and_no_shell_line_is_swallowed() -> None:
    """`ray up` and KubeRay start the image with a command of their own, which an ENTRYPOINT would swallow."""
    names = [name for name, _ in instructions()]
    assert "ENTRYPOINT" not in names
    assert any("RAY_AUTH_MODE=token" in rest for name, rest in instructions() if name == "ENV")


def test_torch_without_cuda_takes_the_place_of_torch_and_all_of_cuda() -> None:
    (install,) = [rest for name, rest in instructions() if name == "RUN" and "TORCH_INDEX" in rest]
    alone = '--no-deps --constraint constraints.txt --index-url "$TORCH_INDEX" torch torchvision && sed'
    assert alone in " ".join(install.split())
    (pattern,) = re.findall(r"'/(.+)/d' requirements.txt", install)
    names = {name for name in versions("cluster/requirements.txt") if re.match(pattern, f"{name}==")}
    assert {"torch", "torchvision", "triton", "nvidia-cudnn-cu13"} < names
    assert names <= {"torch", "torchvision", "triton"} | {
        name for name in names if name.startswith(("nvidia-", "cuda-"))}
    assert ("ARG", "TORCH_INDEX=") in instructions()
