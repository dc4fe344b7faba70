"""The `repr` of every report: what `print` shows, of which at most ten lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.contract.casting_report import CastingReport
from polyamp.diagnosis.report import DiagnoseReport
from polyamp.linter.lint_report import LintReport
from polyamp.nonfinite.replay import LeafDifference, ReplayReport
from polyamp.nonfinite.report import NonfiniteReport
from polyamp.parity.report.report import Report
from polyamp.porting import PortReport, StateReport
from polyamp.recipe.dialects.dialect_report import DialectReport
from polyamp.reference import MLP

CLASSES = (
    *(CastingReport, DiagnoseReport, DialectReport, LintReport, NonfiniteReport, PortReport, ReplayReport),
    *(Report, StateReport, polyamp.Capabilities),
)


class LongReport:
    """Stands for a report whose text is long."""

    def __str__(self) -> str:
        return "\n".join(map(str, range(50)))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_repr_of_a_report_is_at_most_ten_lines_of_its_text(kind: Any) -> None:
    assert kind.__repr__(LongReport()) == "0\n1\n2\n3\n4\n5\n6\n7\n8\n... (41 more lines: print it)"


def test_reports_as_they_come() -> None:
    options = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_batch_size": 8, "fp16": {"enabled": True}}
    leaves = tuple(LeafDifference(f"model/{number}", 1, 0.5) for number in range(20))
    batches = [np.ones((4, 4), np.float32)]
    made = polyamp.compare(
        MLP.random([4, 1], seed=0),
        MLP.random([4, 1], seed=1),
        batches[0],
        lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]),
        polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)),
    )
    for report in (made, polyamp.dialect_report("deepspeed", options), ReplayReport(leaves, (1.0, 2.0))):
        shown = repr(report).splitlines()
        assert 1 < len(shown) <= 10
        assert shown[:9] == str(report).splitlines()[:9]
        assert len(repr(report)) <= 10 * 121
