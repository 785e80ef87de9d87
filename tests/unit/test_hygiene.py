"""What must not be in the tree: code from data, shells, registries, paths of one machine."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ray_yolo", "cluster", "tests", "tune_spaces", "docs", ".ci")
REGISTRY = re.compile(r"(?:pypi|npmjs|registry\.[a-z]+|files\.[a-z]+hosted)\.(?:org|com)|https?://\S+/(?:simple|packages)/")
MACHINE = re.compile(r"(?<![\w.~$-])/(?:work|root)/")
RUNS_CODE = {"eval", "exec", "compile", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "os.system", "os.popen"}
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def texts() -> Iterator[tuple[str, str]]:
    """(path, content) of the project's own text files."""
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # of a worktree
    files += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted(files):
        content = path.read_bytes()
        if "__pycache__" not in path.parts and b"\0" not in content:
            yield path.relative_to(ROOT).as_posix(), content.decode("utf-8", "replace")


def hits(pattern: re.Pattern[str], name: str, text: str) -> list[str]:
    return [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in pattern.finditer(text)]


def dangers(source: str) -> list[str]:
    """`line: what` of every place where a module could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=function, keywords=keywords):
                named = {word.arg: word.value for word in keywords}
                name = ast.unparse(function)
                bad = name in RUNS_CODE or (name == "torch.load" and not _is_true(named.get("weights_only")))
                bad |= _is_true(named.get("shell")) or _is_true(named.get("allow_pickle"))
                found += [f"{node.lineno}: {name}"] * bad
            case ast.Import(names=names):
                found += [f"{node.lineno}: {alias.name}" for alias in names if alias.name in UNPICKLES]
            case ast.ImportFrom(module=module) if module in UNPICKLES:
                found.append(f"{node.lineno}: {module}")
    return found


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE], ids=["package registries", "paths of one machine"])
def test_no_text_names(pattern: re.Pattern[str]) -> None:
    found = [hit for name, text in texts() for hit in hits(pattern, name, text)]
    assert not found, "\n" + "\n".join(found)


def test_the_product_runs_nothing_that_it_reads() -> None:
    found = [f"{name}:{danger}" for name, text in texts() if name.startswith("ray_yolo/") and name.endswith(".py")
             for danger in dangers(text)]
    assert not found, "\n" + "\n".join(found)


def test_versions_are_exact_and_have_no_addresses() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = [line for line in lines if line and not line.startswith("#")]
    assert versions
    assert [line for line in versions if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)] == []


def test_the_licence_is_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(("pattern", "text"), [
    (REGISTRY, "--index-url https://py" + "pi.org/simple"), (REGISTRY, "https://files.python" + "hosted.org/a.whl"),
    (REGISTRY, "http://mirror:3141/root/pypi/+" + "/simple/torch"), (MACHINE, "cd /wo" + "rk/main"),
])
def test_names_are_caught(pattern: re.Pattern[str], text: str) -> None:
    assert hits(pattern, "a.txt", f"first\n{text}") != []
    assert hits(pattern, "a.txt", f"first\n{text}")[0].startswith("a.txt:2: ")


@pytest.mark.parametrize("source", [
    "eval('1')", "exec(code)", "yaml.load(text, Loader=yaml.SafeLoader)", "os.system('ls')", "run(line, shell=True)",
    "import pickle", "from pickle import loads", "torch.load(path)", "torch.load(path, weights_only=False)",
    "np.load(path, allow_pickle=True)",
])
def test_dangers_are_caught(source: str) -> None:
    assert len(dangers(source)) == 1


MESSAGES = {"what", "why", "problem", "message", "reason", "note", "args"}  # attributes that hold a text for a reader
SEARCHES = {"startswith", "endswith", "find", "rfind", "index", "search", "match", "fullmatch"}
FOREIGN = {  # errors of libraries whose type does not say it
    "engine/collectives.py": "a departed peer is a RuntimeError of torch",
    "runtime/workers/failures.py": "the same",
    "tune/pairs.py": "the error of a training by another version is a line of its output",
}


def decisions_by_text(source: str) -> list[str]:
    """`line: what` of every place that searches in a message: of an error, a finding or an event."""
    tree = ast.parse(source)
    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)} | {"error"}

    def is_message(node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name("str" | "repr"), args=[ast.Name(name)]):
                return name in errors
            case ast.Attribute(attr=name):
                return name in MESSAGES
            case ast.Subscript(value=value):
                return is_message(value)
        return False

    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=subject, attr=name), args=given) if name in SEARCHES:
                searched = [subject, *given]
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[container]):
                searched = [container]
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(str(text))]) if text:
                searched = [left]
            case _:
                continue
        if any(map(is_message, searched)):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_decision_reads_a_text() -> None:
    """A message is for readers: its wording may change, and what it says has to be a value of its own."""
    package = ROOT / "ray_yolo"
    found = [f"{name}:{place}" for name, text in texts() if name.startswith("ray_yolo/") and name.endswith(".py")
             if str((ROOT / name).relative_to(package)) not in FOREIGN for place in decisions_by_text(text)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("source", [
    "finding.what.startswith(prefixes)", "'NaN' in outcome.reason", "if error.args[0] == 'no such file': pass",
    "try: f()\nexcept OSError as problem:\n  if 'full' in str(problem): pass", "re.search('lost', str(error))",
    "event.message.find('x')",
])
def test_a_decision_by_text_is_caught(source: str) -> None:
    assert len(decisions_by_text(source)) == 1


def test_what_only_looks_dangerous_passes() -> None:
    assert dangers("model.eval()\nre.compile('a')\nyaml.safe_load(text)\ntorch.load(path, weights_only=True)") == []
