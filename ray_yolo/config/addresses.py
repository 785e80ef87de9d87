"""Recognises addresses that are mistyped, so that they are not taken for file names."""

from __future__ import annotations

import re

_STORES = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "file": "file"}
_STORE = re.compile(rf"({'|'.join(_STORES)})(:/*|//)(?P<rest>.*)", re.IGNORECASE)
_HOST_PORT = re.compile(r"(\[[0-9a-f:]+\]|[a-z0-9]([\w.-]*\w)?):[0-9]{2,5}(/.*)?", re.IGNORECASE)
_WEB = re.compile(r"(?P<scheme>https?)(:/?|//|;//)(?P<rest>[^/:].*)", re.IGNORECASE)
_SQLITE = re.compile(r"sqlite:/{0,2}(?P<path>[^/].*|/[^/].*)", re.IGNORECASE)


def corrected_store(text: str) -> str:
    """The probably intended address of an object store: `s3://bucket` for `s3:/bucket`. '' if nothing is wrong."""
    text = text.strip()
    match = _STORE.fullmatch(text.replace("\\", "/"))
    if match is None:
        return ""
    scheme = _STORES[match[1].lower()]
    rest = match["rest"].lstrip("/")
    address = f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
    is_right = match[1] == scheme and text.startswith(f"{scheme}://") and (scheme == "file" or text == address)
    return "" if is_right else address


def corrected_tracking_uri(text: str) -> str:
    """The probably intended address of a tracking server: `http://localhost:5000` for `localhost:5000`. '' if nothing
    is wrong."""
    text = text.strip()
    if _HOST_PORT.fullmatch(text):
        return f"http://{text}"
    if (match := _WEB.fullmatch(text)) and not re.match(r"https?://", text, re.IGNORECASE):
        return f"{match['scheme'].lower()}://{match['rest']}"
    if (match := _SQLITE.fullmatch(text)) and not text.lower().startswith("sqlite:///"):
        return f"sqlite:///{match['path']}"
    return ""
