"""equinox models whose modules mark what they give. Loaded by `marking`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from polyamp_jax.models.equinox import EquinoxAdapter, modules_in
from polyamp_jax.models.scopes import Casts
from polyamp_jax.observe.outputs import marking_class


@dataclasses.dataclass(frozen=True)
class MarkedEquinox(EquinoxAdapter):
    """The same adapter, of whose models every module marks what it gives."""

    def _cast(self, module: Any, casts: Casts) -> Any:
        leaves, structure = jax.tree.flatten(super()._cast(module, casts))
        made = jax.tree.unflatten(structure, leaves)
        for path, node in modules_in(made):
            if path and callable(node):
                kind: Any = type(node)
                object.__setattr__(node, "__class__", marking_class(kind, path))
        return made
