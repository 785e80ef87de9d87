"""Small JSON files that outlive a release: run.json and the manifests of states. Each has a format and a checksum.

The checksum is that of all other entries, so a file with a flipped bit does not agree with itself. It is looked at
before the format, because a flipped bit can be in either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2
"""Version of run.json, of states and of their manifests. It grows by 1 in a release that adds, removes or renames a
setting of the recipe, or an entry of these files. 1 has no checksums."""

_CHECKSUM = "checksum"


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON content with the checksum of its entries, which replaces an earlier one."""
    entries = json.loads(json.dumps({name: value for name, value in content.items() if name != _CHECKSUM}))
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))  # as it is computed from the file's entries
    return {**entries, _CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def parse_versioned(data: bytes) -> dict[str, Any]:
    """The content of a file of `with_checksum`, or of one of format 1.

    Raises:
        ValueError: if it is no JSON object, or does not agree with its checksum.
    """
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no entries")
    if _CHECKSUM in content and content != with_checksum(content):
        raise ValueError("it does not match its own checksum")
    if _CHECKSUM not in content and content.get("format") != 1:
        raise ValueError("its checksum is missing")
    return content


def is_of_later_version(content: Mapping[str, Any]) -> bool:
    """Whether a later ray_yolo has written a file, or its content."""
    version = content.get("format", 1)
    return isinstance(version, int) and version > FORMAT
