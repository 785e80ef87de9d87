"""A page is one file: its pictures are inside, and text from users is text."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

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
    [content] = re.findall(r'src="data:image/webp;base64,([^"]+)"', page)
    with Image.open(io.BytesIO(base64.b64decode(content))) as inside, Image.open(tmp_path / "a.png") as picture:
        assert inside.size == picture.size
    assert re.findall(r'(?:src|href)="(?!data:)([^"]*)', page) == ["a.png"]  # its file, in the folder of the page
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


def test_a_large_picture_is_inside_with_at_most_1000_pixels(tmp_path: Path) -> None:
    write_image(tmp_path / "wide & high.png", smooth_picture(500, 2000))
    page = render_page("exp", [Section("Curves", pictures=[tmp_path / "wide & high.png"])])
    assert 'href="wide%20%26%20high.png"' in page
    assert 'alt="wide &amp; high.png" width="1000" height="250"' in page


def test_numbers_of_a_table_are_aligned_and_missing_ones_are_dashes() -> None:
    page = render_page("exp", [Section("Classes", table=[["class", "labels", "mAP50"], ["<a>", 12000, None],
                                                          ["b", 3, 0.25]])])
    assert '<th>class</th><th class="number">labels</th><th class="number">mAP50</th>' in page
    assert '<td>&lt;a&gt;</td><td class="number">12000</td><td class="number">-</td>' in page
    assert '<td class="number">0.2500</td>' in page


def test_facts_without_a_text_are_left_out() -> None:
    page = render_page("exp", [Section("Origin", facts=[("commit", ""), ("run", "<x>")]), Section("Time",
                               facts=[("hours", "")])], summary="a & b")
    assert "<tr><th>run</th><td>&lt;x&gt;</td></tr>" in page
    assert '<p class="summary">a &amp; b</p>' in page
    assert "commit" not in page
    assert "Time" not in page


def test_sentences_wrap_and_lines_keep_their_columns() -> None:
    page = render_page("exp", [Section("Claim", text=["A <is> better"], lines=["a   1"])])
    assert "<p>A &lt;is&gt; better</p>\n<pre>a   1</pre>" in page
