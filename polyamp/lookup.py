"""How what a user writes reaches a backend without importing the registry above it.

`Policy.autocast`, `LossScaler.init` and their like need the backend of an object or a name. `contract.registry` finds
it, and knows policies; so it cannot be imported from here, and `import polyamp` says how it is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

_offered: Final[list[Callable[[], ModuleType]]] = []


def offer(imported: Callable[[], ModuleType]) -> None:
    """Called by `polyamp` itself, with what imports `polyamp.contract.registry` and returns it."""
    _offered[:] = [imported]


def registry() -> Any:
    """The module `polyamp.contract.registry`."""
    return _offered[0]()
