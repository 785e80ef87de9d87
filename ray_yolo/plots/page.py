"""A self-contained web page: text, tables and pictures in one file, without scripts and without other addresses."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TYPES = {".jpg": "image/jpeg", ".png": "image/png"}
_STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 1200px; margin: 2em auto; padding: 0 1em }
pre { background: #f4f4f4; padding: 1em; overflow-x: auto; line-height: 1.3 }
img { max-width: 100%; border: 1px solid #e4e4e4 }
figure { margin: 1em 0 }
figcaption { color: #666 }
"""


class Section(NamedTuple):
    """A part of a page: a heading, lines of text with aligned columns, and pictures."""

    heading: str
    lines: Sequence[str] = ()
    pictures: Sequence[Path] = ()  # .png and .jpg files; missing ones are left out


def render_page(title: str, sections: Sequence[Section]) -> str:
    """The HTML of a page. Sections without content are left out."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        pictures = [path for path in section.pictures if path.is_file()]
        if not (section.lines or pictures):
            continue
        parts.append(f"<h2>{html.escape(section.heading)}</h2>")
        if section.lines:
            text = "\n".join(section.lines)
            parts.append(f"<pre>{html.escape(text)}</pre>")
        parts += [_figure(path) for path in pictures]
    body = "\n".join(parts).encode("utf-8", "backslashreplace").decode()  # file names may contain surrogates
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n")


def _figure(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    name = html.escape(path.name)
    return (f'<figure><img alt="{name}" src="data:{_TYPES[path.suffix]};base64,{content}">'
            f"<figcaption>{name}</figcaption></figure>")
