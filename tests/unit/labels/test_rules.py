"""The table of rules: each code leads to one thing, and its text is a text for readers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_yolo.core.structures import Finding
from ray_yolo.labels.remarks import combine, judge
from ray_yolo.labels.rules import Code, Remark


def test_texts_differ() -> None:
    """Members of an Enum with equal values would be one."""
    assert len({code.text for code in Code} - {"{0}"}) == len(Code) - 3  # of images, in the decoder's words


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_a_text_has_the_values_of_its_kind(code: Code) -> None:
    """Counted remarks have their number and nothing else, compared ones no value, others theirs in order from 0."""
    fields = set(re.findall(r"\{(\w+)[!:}]", code.text))
    if code.then in ("count", "compare"):
        assert fields == ({"n"} if code.then == "count" else set())
    elif code is not Code.CLASS_UNKNOWN:  # its first value is the number, for decisions alone
        assert fields == {str(number) for number in range(len(fields))}


def test_what_a_finding_leads_to() -> None:
    left_out = Code.CLASS_UNKNOWN.finding("a.txt:3", 7, "7.0", 3, 2)
    what = "has the class 7.0, but the data set names 3 classes (0-2); correct it or add the name"
    assert left_out == Finding("a.txt:3", what, dropped=True, code="CLASS_UNKNOWN", values=(7, "7.0", 3, 2))
    assert not Code.REPEATED.finding("a.txt:3").dropped


def test_counted_remarks_are_one_finding() -> None:
    remarks = [Remark(Code.CROWD, "a.json: annotation 2"), Remark(Code.BOX, "a.json: annotation 1", "COCO"),
               Remark(Code.CROWD, "a.json: annotation 4", times=3)]
    (finding,) = judge(combine(remarks))
    assert finding.where == "a.json: annotation 2"
    assert finding.what.startswith("is the first of 4 annotations marked iscrowd")
    assert (finding.code, finding.values, finding.dropped) == ("CROWD", (4,), False)


PAGE = Path(__file__).parents[3] / "docs" / "findings.md"
SECTIONS = {"leave out": "Left out", "try again": "Left out until it can be read", "report": "Reported",
            "count": "Reported once for a split"}


def tables() -> str:
    """The table of rules as sections of Markdown; values are shown as `...`."""
    parts = []
    for then, title in SECTIONS.items():
        texts = [re.sub(r"\{\w+(![rs]|:g)?\}", "...", code.text) for code in Code if code.then == then]
        rows = [f"| {text.replace('|', chr(92) + '|')} |" for text in texts if text != "..."]
        parts.append("\n".join([f"## {title}", "", "| finding |", "|---|", *rows, ""]))
    return "\n".join(parts)


def test_the_page_of_findings_has_the_rules() -> None:
    page = PAGE.read_text("utf-8")
    assert page[page.index("## "):] == tables()
