"""Docstrings of this repository as MyST Markdown: sections become lists, examples become fenced blocks."""

from __future__ import annotations

import re
import textwrap
from typing import Final

SECTIONS: Final = {
    "Args": "Parameters",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Example": "Example",
    "Examples": "Example",
    "Note": "Note",
}
"""Heading in a docstring -> the heading on the page."""
_HEADING: Final = re.compile(rf"^({'|'.join(SECTIONS)})(::?)$")
_ENTRY: Final = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*):( .+)?$")
_OPTION: Final = re.compile(r"^    `\w+`[^:]*: ")
"""An entry of a list below `**options`."""
_LISTS: Final = ("Args", "Attributes", "Raises")


def docstring_markdown(text: str) -> str:
    """Return a clean docstring as Markdown."""
    parts: list[str] = []
    heading: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        found = _HEADING.match(line)
        if found or (heading and line and not line.startswith(" ")):  # the section before it is over
            parts += _section(heading, lines)
            heading, lines = found, [] if found else [line]
        else:
            lines.append(line)
    return "\n\n".join([*parts, *_section(heading, lines)]) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s(?=[A-Z`])", paragraph, maxsplit=1)[0]


def raised(text: str) -> list[tuple[str, str]]:
    """Return (error, cause) of each error in the section "Raises" of a clean docstring."""
    found: list[tuple[list[str], str]] = []
    is_inside = False
    for line in text.splitlines():
        heading = _HEADING.match(line)
        is_inside = heading[1] == "Raises" if heading else is_inside and (not line or line.startswith(" "))
        entry = _ENTRY.match(line[4:]) if is_inside and line.startswith("    ") else None
        if entry:
            found.append((entry[1].split(", "), (entry[2] or "").strip()))
        elif is_inside and found and not heading and line:
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
    return [(error, cause) for errors, cause in found for error in errors]


def _section(heading: re.Match[str] | None, lines: list[str]) -> list[str]:
    body = textwrap.dedent("\n".join(lines)).strip("\n")
    if heading is None:
        return [_blocks(body)] if body else []
    if heading[2] == "::":
        text = f"```python\n{body}\n```"
    else:
        text = _entries(body) if heading[1] in _LISTS else _blocks(body)
    return [f"**{SECTIONS[heading[1]]}**", text]


def _entries(body: str) -> str:
    """Return a list of entries; entries below an entry that has no text of its own are a list in it."""
    items: list[str] = []
    is_nested = False
    for line in body.splitlines():
        entry, nested = _ENTRY.match(line), _OPTION.match(line)
        if entry:
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            items.append(f"- {names}:{entry[2] or ''}")
            is_nested = entry[2] is None
        elif not items:
            items.append(line)
        elif is_nested:
            items.append(f"  - {line.strip()}" if nested else f"    {line.strip()}")
        else:
            items.append(f"  {line.strip()}")
    return "\n".join(items)


def _blocks(body: str) -> str:
    """Fence what begins with `>>>`, up to the next blank line, and indented code, which may have blank lines."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", body):
        at = re.search(r"^ *>>> ", paragraph, re.MULTILINE)
        if at is not None:
            before, code = paragraph[: at.start()].strip("\n"), textwrap.dedent(paragraph[at.start() :])
            parts += [*([before] if before else []), f"```pycon\n{code}\n```"]
        elif paragraph.startswith("    "):
            code = paragraph[4:].replace("\n    ", "\n")
            if parts and parts[-1].startswith("```python"):
                parts[-1] = f"{parts[-1].removesuffix('```')}\n{code}\n```"
            else:
                parts.append(f"```python\n{code}\n```")
        else:
            parts.append(paragraph)
    return "\n\n".join(parts)
