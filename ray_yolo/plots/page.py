"""A self-contained web page: text, tables and pictures in one file, without scripts and without other addresses.

Pictures are inside it in a smaller size. Each links to its file, which a page that was sent alone does not have.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from PIL import Image

from ray_yolo.core.formatting import format_cell

LONGEST_SIDE = 1000  # pixels of a picture in the page
_QUALITY = 60  # a usual page stays below 1 MB with this quality of WebP
_STYLE = """
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 1.5em 1em 3em }
h1 { margin: 0; overflow-wrap: anywhere }
h2 { margin: 2em 0 .5em; font-size: 1.15em }
pre { background: #f5f5f5; padding: .8em 1em; margin: .5em 0; line-height: 1.4; font-size: 13px; overflow-x: auto;
  border-radius: 6px }
.summary { color: #666; margin: 0 0 1.2em; overflow-wrap: anywhere }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .7em; margin: 1em 0 }
.cards div { background: #f5f5f5; border-radius: 6px; padding: .6em .9em }
.cards b { display: block; font-size: 1.5em; font-weight: 600; line-height: 1.3 }
.cards span { color: #666; font-size: 13px }
p { margin: .4em 0; overflow-wrap: anywhere }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; vertical-align: top; padding: .3em 1.4em .3em 0; border-bottom: 1px solid #e4e4e4 }
thead th { color: #666; font-weight: normal; white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
.facts th { color: #666; font-weight: normal; white-space: nowrap }
.facts td { overflow-wrap: anywhere }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 1em }
figure { margin: 0 }
img { display: block; width: 100%; max-width: 1000px; height: auto; border: 1px solid #e4e4e4 }
figcaption { color: #666; font-size: 13px }
@media (max-width: 480px) { .facts tr { display: block; padding: .3em 0; border-bottom: 1px solid #e4e4e4 }
  .facts th, .facts td { display: block; border: 0; padding: 0 }
  .table table { font-size: 12px } .table th, .table td { padding-right: .7em } }
"""

Cell = str | int | float | None
"""A number is aligned to the right; a float has four decimals."""


class Section(NamedTuple):
    """A part of a page: a heading and any of its contents, which follow in this order."""

    heading: str
    lines: Sequence[str] = ()  # their columns are aligned, and they may be wider than the page
    pictures: Sequence[Path] = ()  # .png and .jpg files in the folder of the page; missing ones are left out
    cards: Sequence[tuple[str, str]] = ()  # (value, what it is), the few numbers to see first
    facts: Sequence[tuple[str, str]] = ()  # (name, text) rows; those without a text are left out
    table: Sequence[Sequence[Cell]] = ()  # rows, the first of which is the header
    text: Sequence[str] = ()  # sentences, each a paragraph that wraps


def render_page(title: str, sections: Sequence[Section], summary: str = "") -> str:
    """The HTML of a page. Sections without content are left out.

    Args:
        summary: one line below the title.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if summary:
        parts.append(f'<p class="summary">{html.escape(summary)}</p>')
    for section in sections:
        contents = _contents(section)
        if contents:
            parts += [f"<h2>{html.escape(section.heading)}</h2>" if section.heading else "", *contents]
    body = "\n".join(parts).encode("utf-8", "backslashreplace").decode()  # file names may contain surrogates
    return ('<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n")


def notebook_html(section: Section, picture: Image.Image | None = None) -> str:
    """A section as the output of a notebook's cell, which has a style of its own, with a picture as JPEG below it."""
    parts = [f"<strong>{html.escape(section.heading)}</strong>", *_contents(section)]
    if picture is not None:
        small = _reduced(picture)
        parts.append(f'<img style="max-width: 100%; height: auto" width="{small.width}" height="{small.height}" '
                     f'src="{data_address(jpeg(small), "jpeg")}">')
    return "\n".join(parts)


def read_picture(path: Path) -> Image.Image | None:
    """A picture of a folder; None if it has not been drawn."""
    if not path.is_file():
        return None
    with Image.open(path) as picture:
        return picture.convert("RGB")


def jpeg(picture: Image.Image) -> bytes:
    """A picture as the content of a .jpg file."""
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=85)
    return content.getvalue()


def data_address(content: bytes, kind: str) -> str:
    """The address that contains a picture."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _contents(section: Section) -> list[str]:
    """The elements of a section; none if it has no content."""
    parts = []
    if section.cards:
        cards = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
                        for value, name in section.cards)
        parts.append(f'<div class="cards">{cards}</div>')
    parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.text]
    if section.lines:
        text = "\n".join(section.lines)
        parts.append(f"<pre>{html.escape(text)}</pre>")
    facts = [(name, text) for name, text in section.facts if text]
    if facts:
        names = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
        parts.append(f'<table class="facts">\n{names}\n</table>')
    if section.table:
        header, *rows = section.table
        head = "".join(_cell("th", cell, row) for cell, row in zip(header, rows[0] if rows else header, strict=True))
        body = "\n".join("<tr>" + "".join(_cell("td", cell, cell) for cell in row) + "</tr>" for row in rows)
        parts.append(f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
                     f"<tbody>\n{body}\n</tbody></table></div>")
    pictures = [path for path in section.pictures if path.is_file()]
    if pictures:
        parts.append('<div class="pictures">' + "\n".join(map(_figure, pictures)) + "</div>")
    return parts


def _cell(tag: str, cell: Cell, aligned_as: Cell) -> str:
    """A cell, aligned as a number if the other one is a number."""
    text = cell if isinstance(cell, str) else str(cell) if isinstance(cell, int) else format_cell(cell)
    kind = "" if isinstance(aligned_as, str) else ' class="number"'
    return f"<{tag}{kind}>{html.escape(text)}</{tag}>"


def _figure(path: Path) -> str:
    name, link = html.escape(path.name), quote(path.name)
    with Image.open(path) as picture:
        small = _reduced(picture)
    content = io.BytesIO()
    small.save(content, "WEBP", quality=_QUALITY)
    address = data_address(content.getvalue(), "webp")
    return (f'<figure><a href="{link}"><img alt="{name}" width="{small.width}" height="{small.height}" '
            f'src="{address}"></a><figcaption>{name}</figcaption></figure>')


def _reduced(picture: Image.Image) -> Image.Image:
    """A copy of at most LONGEST_SIDE pixels; it keeps its shape, and is never enlarged."""
    small = picture.convert("RGB")
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return small
