"""How what a user writes reaches a backend without importing the registry above it.

`Policy.autocast`, `LossScaler.init` and their like need the backend of an object or a name. `contract.registry` finds
it, and knows policies; so it puts itself here when it is imported, which `import polyamp` does.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

_found: Final[list[ModuleType]] = []


def offer(registry: ModuleType) -> None:
    """Called by `contract.registry`, with itself."""
    _found[:] = [registry]


def registry() -> Any:
    """The module `polyamp.contract.registry`."""
    return _found[0]
