"""`LintReport`: the faults that a lint found, as text, page and plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from polyamp.display import first_lines
from polyamp.linter.lint_page import lint_page
from polyamp.linter.lint_rules import LintFinding
from polyamp.report_page.page_files import save_page
from polyamp.report_page.text_format import count_text


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `polyamp.lint` found; `print` it.

    Attributes:
        backend: the framework.
        findings: one for each rule that is broken.
        unchecked: rules that could not be checked -> the arguments that they need.
    """

    backend: str
    findings: list[LintFinding]
    unchecked: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{count_text(len(self.findings), 'finding')} ({self.backend})"]
        for each in self.findings:
            lines += ["", f"{each.rule}: {each.where}", f"  {each.figure}", f"  {each.advice}"]
        if self.unchecked:
            listed = "; ".join(f"{rule} needs {needs}" for rule, needs in self.unchecked.items())
            lines += ["", f"not checked: {listed}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def save(self, path: str | Path) -> Path:
        """Draw the report to an .html or .png file (extra `parity`).

        Raises:
            ArgumentError: another suffix, or a path that cannot be written to.
        """
        return save_page(lint_page(self.backend, self.findings, self.unchecked), path)
