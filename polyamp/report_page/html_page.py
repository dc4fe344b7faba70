"""`render_html`: a `ReportPage` as one self-contained HTML text.

Its style is inline, and a content security policy forbids everything else, whatever a model's names contain.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any, Final

from polyamp._version import __version__
from polyamp.report_page import text_format
from polyamp.report_page.page import BarChart, Chart, CurveChart, ReportPage, has_values
from polyamp.report_page.svg_charts import draw_chart

_TEMPLATE_FOLDER: Final = Path(__file__).parent / "template"


def render_html(page: ReportPage) -> str:
    """Return the page."""
    css = page_css()
    text: str = load_template(_TEMPLATE_FOLDER / "page.html").render(
        page=page,
        version=__version__,
        plain=text_format.plain,
        draw=lambda chart: safe_markup(draw_chart(chart)),
        legend=_legend,
        has_values=has_values,
        is_wide=lambda chart: not isinstance(chart, CurveChart),
        css=safe_markup(css),
        css_hash=csp_hash(css),
    )
    return text


def load_template(path: Path) -> Any:
    """Return a page's jinja template, which escapes what it is given and refuses names that it is not."""
    import jinja2

    loader = jinja2.FileSystemLoader(path.parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.get_template(path.name)


def _legend(chart: Chart) -> list[tuple[int, str, bool]]:
    """Return number, name and whether it is a bar, of what has a colour of its own."""
    if isinstance(chart, CurveChart):
        found = [(number, line.label, False) for number, line in enumerate(chart.lines)]
        return found if len(found) > 1 else []
    if isinstance(chart, BarChart):
        return [(number, part.label, True) for number, part in enumerate(chart.parts)]
    return []


def page_css() -> str:
    """Return the style sheet that all pages have in common."""
    return (_TEMPLATE_FOLDER / "page.css").read_text(encoding="utf-8")


def safe_markup(text: str) -> Any:
    """Mark a text as safe: one of polyamp's own files, or a chart, in which every name is escaped already."""
    import markupsafe

    return markupsafe.Markup(text)  # noqa: S704  # names in a chart are escaped where it is drawn


def csp_hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
