"""Two trainings of a user's own model, in two frameworks or in one, compared array by array; where they part is said.

`polyamp.compare` does it in one process, `run` with one process per side; both return a `Report`, whose `first` is a
`Divergence`. Here are their parts: `observing` is what a backend gives, `sketch` and `trace` what is kept of a run,
`report` what is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyamp.parity.own_loop import OwnLoop
    from polyamp.parity.report import Divergence, Report
    from polyamp.parity.runner import run

_LAZY = {
    "Divergence": "polyamp.parity.report",
    "OwnLoop": "polyamp.parity.own_loop",
    "Report": "polyamp.parity.report",
    "run": "polyamp.parity.runner",
}

__all__ = ["Divergence", "OwnLoop", "Report", "run"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polyamp.parity' has no attribute {name!r}.{_meant(name)}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def _meant(name: str) -> str:
    from polyamp.errors import did_you_mean

    return "" if name.startswith("__") else did_you_mean(name, __all__)
