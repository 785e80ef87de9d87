"""docs/json.md, the documents that commands print with `--json`, from their models.

`python docs/json_reference.py > docs/json.md` writes it again.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from ray_yolo.core.documents import DOCUMENTS

HEAD = """# JSON

`train`, `val`, `predict`, `compare`, `status`, `list`, `verify` and `checks` take `--json`. Then stdout has one JSON
document, and everything else that a command prints is on stderr. If a command fails, stdout is empty, and the exit
status and stderr say why; `verify` and `checks` also print their document when they have found something wrong.

```bash
ray_yolo val --weights best.pt --data data.yaml --json
```

`version` is 1. It grows when a field is removed, renamed, or gets another meaning. New fields may come without that, so
a reader skips fields that it does not know. JSON has no NaN: a number that is not finite is `null`."""


def page() -> str:
    """The whole page."""
    parts, shared = [HEAD], dict[str, type[BaseModel]]()
    for command, documents in DOCUMENTS.items():
        parts.append(f"## {command}")
        for document in documents:
            parts += [_about(document), "\n".join(_table(document))]
            shared |= _parts_of(document)
    parts.append("## Parts of several documents")
    for name, model in shared.items():
        parts += [f"### {name}", _about(model), "\n".join(_table(model))]
    return "\n\n".join(parts) + "\n"


def _about(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| field | value | meaning |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{field.alias or name}` | {_kind(field.annotation)} | {text} |"


def _kind(annotation: Any) -> str:
    """A type in the words of JSON."""
    words = {str: "string", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    if annotation in words:
        return words[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_kind, arguments))
    if origin is Literal:
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in arguments)
    if origin is dict:
        return f"object of {_kind(arguments[1])}"
    assert origin is tuple, annotation
    return f"array of {_kind(arguments[0])}"


def _parts_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models that the fields of a document have, by name."""
    found: dict[str, type[BaseModel]] = {}
    for field in annotation.model_fields.values():
        waiting = [field.annotation]
        while waiting:
            kind = waiting.pop()
            waiting += typing.get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= {kind.__name__: kind, **_parts_of(kind)}
    return found


if __name__ == "__main__":
    print(page(), end="")
