"""The words of the project: private idiom must not come back, and the name of a class, alias or type variable has one
meaning.

docs/design.md has the glossary: one idea, one word, the field's word.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs",
    "cluster",
    "ray_yolo",
    "tests",
    "tune_spaces",
    "Makefile",
    "pyproject.toml",
)
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".ipynb", ""}
INSTEAD = {  # what must not come back: what to write
    r"rosters?": "coordinator",
    r"crews?": "worker pool, job queue",
    r"narrators?": "report",
    r"spools?": "working copy",
    r"bookkeeping": "run logger",
    r"forebears?|heirs?": "ancestors, fork",
    r"projections?": "sink",
    r"calm (?:run|training|one|sweep|curve)s?": "uninterrupted run",
    r"in vain": "say what failed",
    r"whoever|whomever|nobody|somebody|everybody": "name the process, the worker or the user",
    r"told": "reported, messages, reply",
    r"(?:is|are|was|were|be) let go of": "released",
    r"put up with": "allowed",
    r"(?:gets?|got) on(?= (?:with|as|again|and|well)\b)": "progresses",
    r"ow(?:es?|ed|ing)": "pending",
    r"harder ends?": "SIGKILL",
    r"(?<![/'])\b(?:he|him|his|himself)\b": "it: a process is a thing",
    r"gladly|for want of": "plain words",
}
ON_DISK = re.compile(r'mlflow-owed\.json|OWED_FILE|"spool"|ray_yolo/spool')  # names of files stay
IDIOM = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in INSTEAD), re.IGNORECASE)


def texts() -> Iterator[tuple[str, str]]:
    for name in PAGES:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__) and "fixtures" not in path.parts \
                    and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def idioms(name: str, text: str) -> list[str]:
    """`file:line: word` of each private word in a text."""
    text = ON_DISK.sub(lambda hit: "." * len(hit[0]), text).replace("_", " ")
    return [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in IDIOM.finditer(text)]


def test_private_words_do_not_come_back() -> None:
    found = [hit for name, text in texts() for hit in idioms(name, text)]
    assert not found, f"{len(found)} private words\n" + "\n".join(found)


def meanings(place: str, source: str) -> Iterator[tuple[str, str]]:
    """The classes, aliases and type variables of a module: name, and what it means. Two classes are never the same."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class of {place}"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name):
                yield name, ast.unparse(node.value)


def ambiguous(named: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The names that have several meanings."""
    found = defaultdict(set)
    for name, meaning in named:
        found[name].add(meaning)
    return {name: several for name, several in found.items() if len(several) > 1}


def test_the_name_of_a_class_an_alias_or_a_type_variable_has_one_meaning() -> None:
    named = [pair for path in (ROOT / "ray_yolo").rglob("*.py") for pair in meanings(str(path), path.read_text())]
    assert len(named) > 300
    assert ambiguous(named) == {}


@pytest.mark.parametrize("other", ["class Run: pass", "Run = Callable[[int], str]", 'Run = TypeVar("Run", bound=int)'])
def test_a_second_meaning_is_found(other: str) -> None:
    named = [*meanings("a.py", "Run = Callable[[], str]"), *meanings("b.py", other)]
    assert list(ambiguous(named)) == ["Run"]


def test_the_same_alias_in_two_modules_passes() -> None:
    assert ambiguous([*meanings("a.py", "Run = Callable[[], str]"), *meanings("b.py", "Run = Callable[[], str]")]) == {}


@pytest.mark.parametrize(
    "text", ["class Roster: the roster", "as he is told", "_crew = None", "nobody waits", "it owes a row"]
)
def test_a_private_word_is_found(text: str) -> None:
    assert idioms("a.py", text)


@pytest.mark.parametrize(
    "text", ["The sink writes mlflow-owed.json.", "the scheme, the cache", "forget on exit", "escrew"]
)
def test_a_plain_word_passes(text: str) -> None:
    assert idioms("a.py", text) == []
