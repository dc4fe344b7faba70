"""`save_page`: writes a `ReportPage` to an HTML or PNG file, and a report with data to JSON too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from polyamp.errors import ArgumentError
from polyamp.files import write_atomically
from polyamp.report_page.page import ReportPage

_PACKAGES: Final = {".html": "jinja2", ".png": "matplotlib"}
"""Suffix of a file -> the package that draws it."""


def save_page(page: ReportPage, path: str | Path, *, data: dict[str, Any] | None = None) -> Path:
    """Write a page as HTML or as a picture, or its report's data as JSON, by the suffix of the path.

    Args:
        page: the page.
        path: the file.
        data: the report as plain data; None for one that is not written as JSON.

    Raises:
        ArgumentError: another suffix; a path that cannot be written to; or the drawing package (extra `parity`) is not
            installed.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _PACKAGES and not (kind == ".json" and data is not None):
        kinds = ".html or .png" if data is None else ".json, .html or .png"
        raise ArgumentError(f"path must end in {kinds}. Received: {str(path)!r}.")
    try:
        write_atomically(path, _drawn(page, kind) if kind in _PACKAGES else _json(data))
    except ImportError as error:
        raise ArgumentError(
            f'A {kind} file needs {_PACKAGES[kind]}, which cannot be imported. Run: pip install "polyamp[parity]".'
        ) from error
    except OSError as error:
        raise ArgumentError(f"path must be one that can be written to. Received: {str(path)!r}, {error}.") from error
    return path


def _json(data: Any) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(data), indent=2)


def _drawn(page: ReportPage, kind: str) -> bytes:
    if kind == ".html":
        from polyamp.report_page.html_page import render_html

        return render_html(page).encode()
    from polyamp.report_page.png_page import draw_png

    return draw_png(page)
