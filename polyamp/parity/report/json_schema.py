"""JSON schema of a report, with descriptions from the docstrings of its classes."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import msgspec

_FIELD: Final = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n        .*)*)", re.MULTILINE)
"""An entry of a docstring's `Attributes:`, with its continuation lines."""


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a struct class, with a description of every class and field."""
    (inner,), found = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    top = found.pop(inner["$ref"].rpartition("/")[2])
    for each in [top, *found.values()]:
        _move_docstring(each)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "polyamp parity report"}
    return {**head, **{name: value for name, value in top.items() if name != "title"}, "$defs": found}


def _move_docstring(component: dict[str, Any]) -> None:
    """Split a class's docstring into the description of the class and those of its fields (`Attributes:`)."""
    text = inspect.cleandoc(component.pop("description", ""))
    begin, _, fields = text.partition("\n\nAttributes:\n")
    if begin:
        component["description"] = _join_lines(begin)
    for entry in _FIELD.finditer(fields):
        for name in entry["names"].split(", "):
            component["properties"][name]["description"] = _join_lines(entry["text"])


def _join_lines(text: str) -> str:
    """Return a text as one line, with `null` for `None`."""
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("`", "").split()))
