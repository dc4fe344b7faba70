"""`save_report`, which writes a report to a folder, and `render_html`, which renders its HTML page.

The page is `template/report.html`, filled from `html_sections`. Its style and script are inline, and a content security
policy forbids everything else, whatever a model's names contain.
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
from polyamp.parity.report import formatting, html_sections
from polyamp.parity.report_data import Comparison, ComparisonRow, Findings, encode_report

_TEMPLATE_FOLDER: Final = Path(__file__).parent / "template"
MAX_PAGE_BYTES: Final = 490_000
"""Largest size of the page in bytes. Longer module tables are cut to fit, with a note on the page."""
_DRAWING_PACKAGES: Final = {"jinja2": "report.html", "matplotlib": "report.png"}
"""Package of the extra `parity` -> the file that needs it."""
_STAGE_TEXTS: Final = {
    "forward": "the forward pass of step",
    "backward": "the backward pass of step",
    "step": "the numbers of step",
    "update": "the update of step",
}


def save_report(report: Findings, folder: Path) -> Path:
    """Write a report to a folder, creating it if needed; see `Report.save`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "report.json", encode_report(report))
        absent = [name for name in _DRAWING_PACKAGES if not _is_importable(name)]
        if "jinja2" not in absent:
            write_atomically(folder / "report.html", render_html(report).encode())
        if "matplotlib" not in absent:
            from polyamp.parity.report.png_charts import draw

            write_atomically(folder / "report.png", draw(report))
    except OSError as error:
        raise ArgumentError(
            f"folder must be one that can be written to. Received: {str(folder)!r}, {error}."
        ) from error
    if absent:
        missing_files = " and ".join(f"{_DRAWING_PACKAGES[name]} needs {name}" for name in absent)
        written = ", ".join(["report.json", *(file for name, file in _DRAWING_PACKAGES.items() if name not in absent)])
        raise ArgumentError(
            f'{missing_files}, which cannot be imported. Run: pip install "polyamp[parity]". Written to {folder}: '
            f"{written}."
        )
    return folder / "report.html"


def render_html(report: Findings) -> str:
    """Return the page as one self-contained HTML text of less than 500 kB."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    template = environment.get_template("report.html")
    css, js = (_read_template(f"report.{kind}") for kind in ("css", "js"))
    common = {
        "report": report,
        "words": formatting,
        "plain": formatting.plain,
        "stats": html_sections.statistics_rows,
        "nearest": _nearest_rows,
        "outcome": formatting.outcome(report),
        "heading": _heading_text(report),
        "phases": html_sections.phase_sections(report),
        "recipes": html_sections.recipe_texts(report),
        "css": _safe_markup(css),
        "js": _safe_markup(js),
        "css_hash": _csp_hash(css),
        "js_hash": _csp_hash(js),
    }
    budget = MAX_PAGE_BYTES
    while True:
        pairs = html_sections.comparison_sections(report, budget)
        divergent = sorted((pair for pair in pairs if pair.comparison.first), key=lambda pair: pair.number)
        text = template.render(pairs=pairs, divergent=divergent, **common)
        above = len(text.encode()) - MAX_PAGE_BYTES
        if above <= 0 or budget <= 0:
            return text
        budget -= above + MAX_PAGE_BYTES // 50


def _heading_text(report: Findings) -> str:
    """Return the verdict without the details that the page shows below it."""
    comparison = formatting.divergent_comparison(report)
    if comparison is not None and comparison.first is not None:
        first = comparison.first
        where = f"in {_STAGE_TEXTS[first.stage]} {first.step}" if first.step else "before the first step"
        return formatting.plain(f"{formatting.join_words(list(comparison.sides))} part {where}")
    verdict = formatting.verdict(report)
    return verdict.partition(": ")[0] if report.agrees else verdict.removeprefix("no verdict: ")


def _nearest_rows(comparison: Comparison) -> Sequence[tuple[str, ComparisonRow]]:
    """Return for each phase the row nearest to its allowed distance."""
    names = dict.fromkeys(row.phase for row in comparison.rows)
    found = [(name, html_sections.worst_row(row for row in comparison.rows if row.phase == name)) for name in names]
    return [(name, row) for name, row in found if row is not None]


def _read_template(name: str) -> str:
    return (_TEMPLATE_FOLDER / name).read_text(encoding="utf-8")


def _safe_markup(text: str) -> Any:
    """Mark a text from polyamp's own files as safe, so that it is not escaped."""
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704  # never text from a report


def _csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
