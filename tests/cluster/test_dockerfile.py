"""cluster/Dockerfile: who runs in it, and what gets into it."""

from pathlib import Path

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
    assert installs
    assert all("--constraint constraints.txt" in rest or "--no-deps" in rest for rest in installs)


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


def test_torch_without_cuda_is_there_before_what_needs_torch() -> None:
    """And what comes later leaves it alone, since it is what constraints.txt asks for."""
    installs = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert '${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch torchvision' in installs[0]
    assert all("TORCH_INDEX" not in install for install in installs[1:])
    assert ("ARG", "TORCH_INDEX=") in instructions()
