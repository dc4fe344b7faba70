"""pytest plugin of one run: puts polyamp in where asked, and writes the outcome of every test as JSON.

`POLYAMP_DOWNSTREAM_RECORD` names the file, `POLYAMP_DOWNSTREAM_REPLACED` what is replaced, separated by commas.
The module is found by its own name on the path, since a package under test may have a `tests` of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Final

from downstream_replacements import REPLACEMENTS, USES

_OUTCOMES: Final[dict[str, str]] = {}
_LIBRARIES: Final[list[Any]] = []
_MESSAGES: Final[dict[str, str]] = {}


def pytest_configure() -> None:
    """Put polyamp in before any test file is imported."""
    if importlib.util.find_spec("torchvision"):
        _declare_torchvision_operators()
    for name in filter(None, os.environ.get("POLYAMP_DOWNSTREAM_REPLACED", "").split(",")):
        REPLACEMENTS[name]()


def _declare_torchvision_operators() -> None:
    """Make torchvision importable with a torch that is built without CUDA: its compiled operators do not load there,
    and its import fails at the first two. No test here uses them."""
    import torch

    if torch.version.cuda is None:
        _LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _fail(name: str, outcome: str, report: Any) -> None:
    _OUTCOMES[name] = outcome
    lines = [line for line in str(report.longreprtext).splitlines() if line.startswith("E ")]
    _MESSAGES[name] = (lines or ["E no message"])[0][2:].strip()[:300]


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported counts as a test that fails."""
    if report.failed:
        _fail(report.nodeid.rsplit("/", 1)[-1], "failed", report)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the outcome of a test: its call's, and that of setting up or tearing down where that failed or skipped."""
    path, _, test = report.nodeid.partition("::")
    name = test or path
    if report.failed:
        _fail(name, "failed", report)
    elif report.skipped or report.when == "call":
        _OUTCOMES.setdefault(name, report.outcome)


def pytest_sessionfinish() -> None:
    """Write the record."""
    record = {"outcomes": _OUTCOMES, "messages": _MESSAGES, "uses": dict(USES)}
    Path(os.environ["POLYAMP_DOWNSTREAM_RECORD"]).write_text(json.dumps(record, indent=1), encoding="utf-8")
