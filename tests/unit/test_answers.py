"""`--json`: one document on stdout, all else on stderr, and the page that describes the documents."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from ray_yolo.answers import answering, of_verification
from ray_yolo.cli import COMMANDS, parse_val
from ray_yolo.core.documents import DOCUMENTS, Document, StatusDocument
from ray_yolo.core.errors import InputError
from ray_yolo.runs.verification import CheckResult

DOCS = Path(__file__).parents[2] / "docs"


def test_prints_of_a_process_and_its_children_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with answering(True) as answer:
        print("of Python")
        os.write(1, b"of a child\n")  # as a process that inherits stdout
        answer(Document())
        print("after it")
    out, err = capfd.readouterr()
    assert Document.model_validate_json(out) == Document()
    assert sorted(err.splitlines()) == ["after it", "of Python", "of a child"]


def test_without_the_flag_prints_stay_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with answering(False) as answer:
        print("a line")
        answer(Document())
    assert capfd.readouterr() == ("a line\n", "")


def fail_after_an_answer() -> None:
    with answering(True) as answer:
        answer(Document())
        raise InputError("no")


def test_a_failed_command_has_no_document(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        fail_after_an_answer()
    print("later")
    assert capfd.readouterr() == ("later\n", "")


def test_a_dry_run_refuses_the_flag() -> None:
    with pytest.raises(InputError):
        parse_val(["--weights", "best.pt", "--json", "--dry-run"])


def test_a_number_that_is_not_finite_is_null() -> None:
    document = StatusDocument(name="exp", kind="training", state="failed", best=float("nan"), lines=())
    assert '"best":null' in document.model_dump_json()


@pytest.mark.parametrize(("other", "problem", "unclear", "equal"), [
    (None, None, "", None), ("b", None, "", True), ("b", None, "a has saved more", None),
    ("b", "differs", "", False), ("b", "differs", "a has saved more", False),
])
def test_equality_is_open_where_one_run_has_saved_more(
        other: str | None, problem: str | None, unclear: str, equal: bool | None) -> None:
    comparisons = [CheckResult("step 1", problem)] if other else []
    assert of_verification("a", other, [], comparisons, unclear).equal is equal


def test_the_page_about_documents_is_that_of_the_models() -> None:
    page = runpy.run_path(str(DOCS / "json_reference.py"))["page"]
    assert (DOCS / "json.md").read_text() == page(), "python docs/json_reference.py > docs/json.md"


def test_each_command_with_documents_has_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    having = set()
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit):
            command(["--help"])
        if "--json" in capsys.readouterr().out:
            having.add(name)
    assert having == set(DOCUMENTS)
