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
    if scheme == "file" and text.startswith("file://"):  # file://folder and file:///folder both work
        return ""
    return "" if text == address else address


def corrected_tracking_uri(text: str) -> str:
    """The probably intended address of a tracking server: `http://localhost:5000` for `localhost:5000`. '' if nothing
    is wrong."""
    text = text.strip()
    if _HOST_PORT.fullmatch(text):
        return f"http://{text}"
    lower = text.lower()
    web = _WEB.fullmatch(text)
    if web and not lower.startswith(("http://", "https://")):
        return f"{web['scheme'].lower()}://{web['rest']}"
    database = _SQLITE.fullmatch(text)
    if database and not lower.startswith("sqlite:///"):
        return f"sqlite:///{database['path']}"
    return ""
