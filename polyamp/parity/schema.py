"""The JSON schema of a report, with the words of its classes' docstrings. Called by `Report.schema`."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import msgspec

_FIELD: Final = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n        .*)*)", re.MULTILINE)
"""An entry of a docstring's `Attributes:`, with the lines that go on with it."""


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a struct class, draft 2020-12: a title, and a description of every class and field."""
    (inner,), found = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    top = found.pop(inner["$ref"].rpartition("/")[2])
    for each in [top, *found.values()]:
        _describe(each)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "polyamp parity report"}
    return {**head, **{name: value for name, value in top.items() if name != "title"}, "$defs": found}


def _describe(component: dict[str, Any]) -> None:
    """Take apart a class's docstring: its beginning describes the class, its `Attributes:` the fields."""
    text = inspect.cleandoc(component.pop("description", ""))
    begin, _, fields = text.partition("\n\nAttributes:\n")
    if begin:
        component["description"] = _line(begin)
    for entry in _FIELD.finditer(fields):
        for name in entry["names"].split(", "):
            component["properties"][name]["description"] = _line(entry["text"])


def _line(text: str) -> str:
    """A text as one line; what is None in Python is null in the file."""
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("`", "").split()))
