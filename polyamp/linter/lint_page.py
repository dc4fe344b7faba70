"""`lint_page`: the page of a lint's findings, drawn by `polyamp.report_page`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyamp.linter.lint_rules import LintFinding
from polyamp.report_page.page import BarChart, BarPart, PageSection, PageTable, ReportPage
from polyamp.report_page.text_format import count_text


def lint_page(backend: str, findings: Sequence[LintFinding], unchecked: Mapping[str, str]) -> ReportPage:
    """Return the page: one section for each finding, and the rules that were not checked."""
    lengths = [float(len(each.places)) for each in findings]
    chart = BarChart("places of each finding", [each.rule for each in findings], [BarPart("places", lengths)], "places")
    sections = [PageSection("Findings", [], [chart])] if findings else []
    sections += [
        PageSection(
            each.rule,
            [f"{each.figure[:1].upper()}{each.figure[1:]}.", each.advice],
            [],
            [PageTable(count_text(len(each.places), "place"), ["where"], [[place] for place in each.places])],
        )
        for each in findings
    ]
    if unchecked:
        rows = [[rule, needs] for rule, needs in unchecked.items()]
        sections.append(PageSection("Not checked", [], [], [PageTable("Rules", ["rule", "needs"], rows)]))
    said = count_text(len(findings), "finding")
    return ReportPage("differ" if findings else "agree", said, "Faults of precision in this set-up", backend, sections)
