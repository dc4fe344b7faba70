"""`save`: a report as files in a folder. Called by `Report.save`."""

from __future__ import annotations

from pathlib import Path

from polyamp.errors import ArgumentError
from polyamp.files import write_atomically
from polyamp.parity import words
from polyamp.parity.findings import Findings, encoded
from polyamp.parity.said import said


def save(report: Findings, folder: Path) -> Path:
    """Write a report to a folder, which is made; see `Report.save`."""
    import html

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "report.json", encoded(report))
        page = (
            f"<!doctype html><title>{html.escape(words.verdict(report))}</title><pre>{html.escape(said(report))}</pre>"
        )
        write_atomically(folder / "report.html", page.encode())
    except OSError as error:
        raise ArgumentError(
            f"folder must be one that can be written to. Received: {str(folder)!r}, {error}."
        ) from error
    return folder / "report.html"
