"""`save`: a report as files in a folder, and `html`, its page. Called by `Report.save`.

The page is `template/report.html` filled with what `page_parts` makes of the report; its style and script stand in it,
and a content security policy forbids everything else, whatever a model's names hold.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from polyamp.errors import ArgumentError
from polyamp.files import write_atomically
from polyamp.parity import page_parts, words
from polyamp.parity.findings import Comparison, Findings, Row, encoded

_TEMPLATE: Final = Path(__file__).parent / "template"
LIMIT: Final = 490_000
"""Bytes of the page; lines of the tables of modules are left out, and it is said, until it is no larger."""
_NEEDED: Final = {"jinja2": "report.html", "matplotlib": "report.png"}
"""What draws, and what it draws: the extra `parity`."""
_PLACES: Final = {
    "forward": "the forward pass of step",
    "backward": "the backward pass of step",
    "step": "the numbers of step",
    "update": "the update of step",
}


def save(report: Findings, folder: Path) -> Path:
    """Write a report to a folder, which is made; see `Report.save`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "report.json", encoded(report))
        absent = [name for name in _NEEDED if not _importable(name)]
        if "jinja2" not in absent:
            write_atomically(folder / "report.html", html(report).encode())
        if "matplotlib" not in absent:
            from polyamp.parity.picture import draw

            write_atomically(folder / "report.png", draw(report))
    except OSError as error:
        raise ArgumentError(
            f"folder must be one that can be written to. Received: {str(folder)!r}, {error}."
        ) from error
    if absent:
        lost = " and ".join(f"{_NEEDED[name]} needs {name}" for name in absent)
        there = ", ".join(["report.json", *(file for name, file in _NEEDED.items() if name not in absent)])
        raise ArgumentError(
            f'{lost}, which cannot be imported. Run: pip install "polyamp[parity]". Written to {folder}: {there}.'
        )
    return folder / "report.html"


def html(report: Findings) -> str:
    """The page: one text without anything that is read from elsewhere, of less than 500 kB."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    template = environment.get_template("report.html")
    css, js = (_text(f"report.{kind}") for kind in ("css", "js"))
    common = {
        "report": report,
        "words": words,
        "plain": words.plain,
        "stats": page_parts.statistics,
        "nearest": _nearest,
        "outcome": words.outcome(report),
        "heading": _heading(report),
        "phases": page_parts.phases(report),
        "recipes": page_parts.recipes(report),
        "css": _safe(css),
        "js": _safe(js),
        "css_hash": _digest(css),
        "js_hash": _digest(js),
    }
    budget = LIMIT
    while True:
        pairs = page_parts.pairs(report, budget)
        parted = sorted((pair for pair in pairs if pair.comparison.first), key=lambda pair: pair.number)
        text = template.render(pairs=pairs, parted=parted, **common)
        above = len(text.encode()) - LIMIT
        if above <= 0 or budget <= 0:
            return text
        budget -= above + LIMIT // 50


def _heading(report: Findings) -> str:
    """The verdict without what the page says below it."""
    parts = words.parted(report)
    if parts is not None and parts.first is not None:
        first = parts.first
        where = f"in {_PLACES[first.stage]} {first.step}" if first.step else "before the first step"
        return words.plain(f"{words.listed(list(parts.sides))} part {where}")
    told = words.verdict(report)
    return told.partition(": ")[0] if report.agrees else told.removeprefix("no verdict: ")


def _nearest(comparison: Comparison) -> Sequence[tuple[str, Row]]:
    """Of each phase the row that comes nearest to what is allowed."""
    names = dict.fromkeys(row.phase for row in comparison.rows)
    found = [(name, page_parts.worst(row for row in comparison.rows if row.phase == name)) for name in names]
    return [(name, row) for name, row in found if row is not None]


def _text(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


def _safe(text: str) -> Any:
    """A text of polyamp's own, which is not escaped."""
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704  # never a text of a report


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
