"""A page is one file: its pictures are inside, and text from users is text."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

from ray_yolo.plots.page import Section, render_page
from tests.support.pictures import smooth_picture, write_image

VOID = {"meta", "img"}


class Checker(HTMLParser):
    """Collects the text and the open elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_contains_its_pictures_and_nothing_of_another_place(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", smooth_picture(20, 30))
    page = render_page("exp", [Section("Curves", ["one  1"], [tmp_path / "a.png", tmp_path / "missing.png"])])
    [content] = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(content) == (tmp_path / "a.png").read_bytes()
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert "<script" not in page
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "missing" not in page


def test_names_of_users_are_text_and_empty_sections_are_left_out(tmp_path: Path) -> None:
    page = render_page("<b>exp</b>", [Section("Empty"), Section("Data & more", ["<script>alert(1)</script> \udcff"])])
    assert "<script>" not in page
    assert "<h1>&lt;b&gt;exp&lt;/b&gt;</h1>" in page
    assert "Empty" not in page
    checker = Checker()
    checker.feed(page)
    assert "<script>alert(1)</script> \\udcff" in checker.text
