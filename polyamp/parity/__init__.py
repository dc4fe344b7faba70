"""Parity runs: array-by-array comparison of two trainings of a user's model, in two frameworks or in one.

`polyamp.compare` runs both sides in one process, `run` starts one process per side. Both return a `Report`, whose
`first` is the first `Divergence`. The packages: `trace` records a side, `verdict` compares two traces, `report` renders
the result, `run` drives the sides, `in_pytest` is the pytest integration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyamp.parity.execution.runner import run
    from polyamp.parity.report.report import Report
    from polyamp.parity.report_data import Divergence
    from polyamp.parity.trainers import OwnLoop

_LAZY = {
    "Divergence": "polyamp.parity.report_data",
    "OwnLoop": "polyamp.parity.trainers",
    "Report": "polyamp.parity.report.report",
    "run": "polyamp.parity.execution.runner",
}

__all__ = ["Divergence", "OwnLoop", "Report", "run"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polyamp.parity' has no attribute {name!r}.{_meant(name)}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def _meant(name: str) -> str:
    from polyamp.errors import did_you_mean

    return "" if name.startswith("__") else did_you_mean(name, __all__)
