"""Recognise the label files of annotation tools that are not read, so that a message can name the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ADVICE = "export YOLO, COCO or Pascal VOC from it"
_MOST_BYTES = 64 * 2**20


def tool_of_file(file: str) -> str:
    """The tool that wrote a JSON file; '' if it is unknown, unreadable or COCO."""
    try:
        if Path(file).stat().st_size > _MOST_BYTES:
            return ""
        return tool_of(json.loads(Path(file).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return ""


def tool_of(content: Any) -> str:
    """The tool whose JSON format some content has; '' if it is unknown or COCO."""
    if isinstance(content, list):
        first = content[0] if content and isinstance(content[0], dict) else {}
        if "data" in first and ("annotations" in first or "predictions" in first):
            return "Label Studio (JSON)"
        if {"image", "annotations"} <= first.keys():
            return "CreateML"
        if "annotation_id" in first or "lead_time" in first:
            return "Label Studio (JSON-MIN)"
        return ""
    if not isinstance(content, dict):
        return ""
    keys = content.keys()
    if "_via_img_metadata" in keys or _is_via(content):
        return "VIA"
    if {"shapes", "imagePath"} <= keys:
        return "LabelMe"
    if {"asset", "regions"} <= keys or {"assets", "tags"} <= keys:
        return "VoTT"
    if {"objects", "size"} <= keys or "classTitle" in str(content.get("classes", ""))[:200]:
        return "Supervisely"
    if {"samples"} <= keys or {"classes", "labels"} <= keys:
        return "FiftyOne"
    return ""


def _is_via(content: dict[str, Any]) -> bool:
    """Whether it is VIA's export: objects with a file name and regions, by any key."""
    first = next(iter(content.values()), None)
    return isinstance(first, dict) and {"filename", "regions"} <= first.keys()
