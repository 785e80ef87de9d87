"""Random damage to files and words, always the same for the same generator, and the count of what becomes of it."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ray_yolo.core.errors import InputError
from ray_yolo.labels.rows import UnreadableLabelsError

LONGEST_SECONDS = 5.0  # for one case, on a machine that may be busy

NUMBERS = (
    "0", "1", "2", "3", "-1", "0.5", ".5", "5.", "0.25", "1.0000001", "-1e-5", "1e-5", "-0.0", "+0.5", "1e-9", "1e-45",
    "1e-320", "4.9e-324", "1e308", "1e999", "-1e999", "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "0,5", "1.234,5",
    "0x1p-1", "1_0", "0.5f", "1e", "1e+", "--1", "٠٫٥", "٣", "１", "½", "²", "0.5%", "1/2", "TRUE", "null", "None",
    "9" * 30, "9" * 400, "0." + "3" * 400, "16777217", "0.99999999999999999", "cat", "\ufeff1", "1\u200b")
ROUGH = (
    b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b"\x85", b"\xc0\x80", b"\xed\xa0\x80",
    b"\x1b[2J", b"<", b">", b"&", b"'", b'"', b"{", b"]", b"*", b"&a", b"!!python/name:os.system", b"#", b"%", b"`",
    b"|", b"- ", b": ")
PLAIN = ("0", "1", "2", "3", "0.5", "true", "images", "a")
NASTY = (
    "", "0", "-1", "1e-3", "nan", "inf", "1e999", "9" * 5000, "yes", "no", "null", "~", "auto", "ram", "2-4", "4-2",
    "[1, 2]", "[[1], {a: 2}]", "{a: 1}", "{}", "[]", "'", '"x"', "a: b", "*a", "&a 1", "!!int 3", "\t", "#", "x" * 5000,
    "\u202e", "../../x", "True", "0x10", "1_0", "--", "-", "@", '"\\0"', '"\\ud800"', '"\\UFFFFFFFF"', '"\\e"',
    "~no-such-user/x", "/dev/null", "/dev/zero", "**", "[", "images", "images/**", "s3://x", "-9" * 50, "1" + "0" * 30,
    "é", "\U0001f600", "!!python/object/apply:os.system [true]",
    "<<", "=", "2026-01-02", "12:30", "0o17", ".inf", ".NaN")


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    """One of the choices."""
    return choices[int(rng.integers(len(choices)))]


def damage(rng: np.random.Generator, content: bytes) -> bytes:
    """The content with a few bytes changed, cut out, doubled, or put in."""
    for _ in range(rng.integers(1, 4)):
        at, end = sorted(rng.integers(0, len(content) + 1, 2).tolist())
        end = min(end, at + 12)
        piece = pick(rng, (b"", content[at:end] * 2, pick(rng, ROUGH), rng.bytes(3), pick(rng, NUMBERS).encode()))
        content = content[:at] + piece + content[end:]
    return content


def replace_one(rng: np.random.Generator, tree: Any, values: Sequence[Any]) -> Any:
    """Lists and mappings with one of their values, at any depth, replaced."""
    tree = at = copy.deepcopy(tree)
    while True:
        key = pick(rng, tuple(at) if isinstance(at, dict) else range(len(at)))
        if not isinstance(at[key], list | dict) or not at[key] or rng.random() < 0.2:
            at[key] = pick(rng, values)
            return tree
        at = at[key]


def tally(cases: Iterable[Any], read: Callable[[Any], object]) -> Counter[str]:
    """How many cases were `read`, `left out` or `refused`. Any other error, or a long wait, fails with its case."""
    ends: Counter[str] = Counter()
    for case in cases:
        began = time.process_time()
        try:
            read(case)
            end = "read"
        except UnreadableLabelsError:
            end = "left out"
        except InputError:
            end = "refused"
        except Exception as error:
            raise AssertionError(f"{case!r:.2000}") from error
        assert time.process_time() - began < LONGEST_SECONDS, f"{case!r:.2000}"
        ends[end] += 1
    return ends
