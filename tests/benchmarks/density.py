"""How dense the code is: a thermometer, not a rule. `python tests/benchmarks/run.py density [--densest N] [--json]`

Counting only finds candidates for a second look; reading decides. `draw_affine` is dense by count and reads well, a
matrix on each line. Breaking lines to please this table is worse than leaving them.

| column | meaning |
|---|---|
| nodes | nodes of the syntax tree per line with code |
| dense per 100 | comprehensions, lambdas, assignment expressions and conditional expressions per 100 lines with code |
| over 15, over 20 | functions of eight lines or more that have more nodes a line than that |
| comments | lines with a comment per 100 lines with code |

A docstring is neither code nor nodes. A function counts the lines and nodes of its body.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ray_yolo"
DENSE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr, ast.IfExp)
LONG_LINES = 8  # shorter functions are not counted one by one


@dataclass(frozen=True)
class FunctionDensity:
    """One function."""

    name: str  # file:line name
    lines: int
    nodes: int

    @property
    def density(self) -> float:
        """Nodes a line."""
        return self.nodes / self.lines


@dataclass(frozen=True)
class RoomDensity:
    """One folder of the package, or all of it."""

    room: str
    files: int
    lines: int  # with code or comment
    nodes: float  # a line
    dense_per_100: float
    over_15: int
    over_20: int
    functions: int  # of eight lines or more
    comments_per_100: float


def without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """The statements of a body after its docstring."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def code_lines(statements: Sequence[ast.stmt], source: Sequence[str]) -> int:
    """Lines of statements that are neither blank nor only a comment."""
    if not statements:
        return 0
    last = statements[-1].end_lineno
    lines = source[statements[0].lineno - 1:last]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def count_nodes(statements: Sequence[ast.stmt]) -> int:
    """Nodes of the syntax tree of some statements."""
    return sum(1 for statement in statements for _ in ast.walk(statement))


def functions_of(tree: ast.Module, source: Sequence[str], place: str) -> Iterator[FunctionDensity]:
    """The functions of a file with at least `LONG_LINES` lines of code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = without_docstring(node.body)
        lines = code_lines(body, source)
        if lines >= LONG_LINES:
            yield FunctionDensity(f"{place}:{node.lineno} {node.name}", lines, count_nodes(body))


def docstring_nodes(tree: ast.Module) -> int:
    """Nodes that are docstrings: two each."""
    owners = [node for node in ast.walk(tree)
              if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    return 2 * sum(len(without_docstring(owner.body)) < len(owner.body) for owner in owners)


def docstring_lines(tree: ast.Module) -> int:
    """Lines of docstrings, without blank ones."""
    count = 0
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(owner, clean=False)
            count += sum(bool(line.strip()) for line in (text or "").splitlines())
    return count


def measure(room: str, paths: Sequence[Path]) -> tuple[RoomDensity, list[FunctionDensity]]:
    """A room's figures, and its functions."""
    lines = nodes = dense = comments = 0
    functions: list[FunctionDensity] = []
    for path in paths:
        text = path.read_text()
        source = text.splitlines()
        tree = ast.parse(text)
        lines += sum(bool(line.strip()) for line in source) - docstring_lines(tree)
        comments += sum("# " in line for line in source)
        nodes += sum(1 for _ in ast.walk(tree)) - docstring_nodes(tree)
        dense += sum(isinstance(node, DENSE) for node in ast.walk(tree))
        functions += functions_of(tree, source, str(path.relative_to(PACKAGE)))
    figures = RoomDensity(
        room, len(paths), lines, nodes / max(lines, 1), 100 * dense / max(lines, 1),
        sum(function.density > 15 for function in functions), sum(function.density > 20 for function in functions),
        len(functions), 100 * comments / max(lines, 1))
    return figures, functions


def rooms() -> dict[str, list[Path]]:
    """The files of each folder, and of the whole package."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = str(path.parent.relative_to(PACKAGE.parent))
        found.setdefault(room, []).append(path)
    return {**found, "all": sorted(PACKAGE.rglob("*.py"))}


def main(argv: list[str]) -> None:
    """Print the table, or one JSON line."""
    parser = argparse.ArgumentParser(prog="run.py density")
    parser.add_argument("--densest", type=int, default=0, help="also list this many functions")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    measured = {room: measure(room, paths) for room, paths in rooms().items()}
    if options.json:
        print(json.dumps([asdict(figures) for figures, _ in measured.values()]))
        return
    print("| room | files | lines | nodes | dense per 100 | over 15 | over 20 | functions | comments |")
    print("|---|---|---|---|---|---|---|---|---|")
    for room, (figures, _) in measured.items():
        print(f"| {room} | {figures.files} | {figures.lines} | {figures.nodes:.1f} | {figures.dense_per_100:.1f} | "
              f"{figures.over_15} | {figures.over_20} | {figures.functions} | {figures.comments_per_100:.1f} |")
    functions = sorted(measured["all"][1], key=lambda function: -function.density)
    for function in functions[:options.densest]:
        print(f"{function.density:5.1f}  {function.lines:3}  {function.name}")
