"""Numbers, durations and sizes as text for users."""

from __future__ import annotations

from collections.abc import Sequence


def format_number(value: float | None) -> str:
    """Four significant digits; '-' for None."""
    return "-" if value is None else f"{value:.4g}"


def format_cell(value: float | None, decimals: int = 4) -> str:
    """A number of a table's column, whose points are below each other; '-' for None."""
    return "-" if value is None else f"{value:.{decimals}f}" if abs(value) < 10000 else f"{value:.4g}"


def format_count(value: float, noun: str) -> str:
    """'1 epoch', '2 epochs', '2 processes', '2 microbatches'."""
    plural = noun if value == 1 else f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"{value if isinstance(value, int) else format(value, 'g')} {plural}"


def format_duration(seconds: float) -> str:
    """h:mm:ss, rounded to seconds."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def format_size(num_bytes: float) -> str:
    """At least two digits with a decimal unit: 850 B, 64 MB, 1.5 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of a table: the first column is aligned to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        columns = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *columns]).rstrip())
    return lines


def encodable(text: str) -> str:
    """The text with an escape such as \\udcff in place of each character that UTF-8 lacks.

    Python represents the bytes of file names that are not UTF-8 by such characters.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
