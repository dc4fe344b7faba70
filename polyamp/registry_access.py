"""Access to the backend registry for modules below it, which cannot import it.

`Policy.autocast`, `LossScaler.init` and similar methods need the backend of an object or a name.
`polyamp.contract.registry` finds it, and itself imports policies. So `import polyamp` registers a loader for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

_registry_loaders: Final[list[Callable[[], ModuleType]]] = []


def set_registry_loader(imported: Callable[[], ModuleType]) -> None:
    """Set the function that imports `polyamp.contract.registry` and returns it."""
    _registry_loaders[:] = [imported]


def registry() -> Any:
    """Return the module `polyamp.contract.registry`."""
    return _registry_loaders[0]()
