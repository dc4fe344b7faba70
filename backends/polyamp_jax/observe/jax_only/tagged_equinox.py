"""Adapter of equinox models whose modules tag their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.equinox import EquinoxAdapter, walk_modules
from polyamp_jax.observe.jax_only.tagged_calls import tagging_class


@dataclasses.dataclass(frozen=True)
class EquinoxTagAdapter(EquinoxAdapter):
    """`EquinoxAdapter` whose models tag the output of every module."""

    def _cast(self, module: Any, casts: CallCasts) -> Any:
        leaves, structure = jax.tree.flatten(super()._cast(module, casts))
        made = jax.tree.unflatten(structure, leaves)
        for path, node in walk_modules(made):
            if path and callable(node):
                kind: Any = type(node)
                object.__setattr__(node, "__class__", tagging_class(kind, path))
        return made
