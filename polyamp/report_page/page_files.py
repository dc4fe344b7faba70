"""`save_page`: writes a `ReportPage` to an HTML or PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polyamp.errors import ArgumentError
from polyamp.files import write_atomically
from polyamp.report_page.page import ReportPage

_PACKAGES: Final = {".html": "jinja2", ".png": "matplotlib"}
"""Suffix of a file -> the package that draws it."""


def save_page(page: ReportPage, path: str | Path) -> Path:
    """Write a page as HTML or as a picture, by the suffix of the path.

    Raises:
        ArgumentError: another suffix; a path that cannot be written to; or the drawing package (extra `parity`) is not
            installed.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _PACKAGES:
        raise ArgumentError(f"path must end in .html or .png. Received: {str(path)!r}.")
    try:
        write_atomically(path, _drawn(page, kind))
    except ImportError as error:
        raise ArgumentError(
            f'A {kind} file needs {_PACKAGES[kind]}, which cannot be imported. Run: pip install "polyamp[parity]".'
        ) from error
    except OSError as error:
        raise ArgumentError(f"path must be one that can be written to. Received: {str(path)!r}, {error}.") from error
    return path


def _drawn(page: ReportPage, kind: str) -> bytes:
    if kind == ".html":
        from polyamp.report_page.html_page import render_html

        return render_html(page).encode()
    from polyamp.report_page.png_page import draw_png

    return draw_png(page)
