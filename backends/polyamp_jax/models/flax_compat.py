"""Internal attributes of nnx modules, for each supported version of flax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp_jax.compat import walk_nnx_modules

NNX_INTERNAL: Final = ("__", "_pytree", "_object__", "_graph_node", "_setattr", "_check")
"""Name prefixes of nnx's internal module attributes (`_object__` until flax 0.11)."""


def nnx_class_options(kind: Any) -> dict[str, Any]:
    """Return the class keyword arguments that make a subclass of an nnx class a pytree only if that class is one."""
    return {} if getattr(kind, "_pytree__is_pytree", True) else {"pytree": False}


def drop_stale_nnx_attributes(model: Any) -> None:
    """Remove nnx's records of deleted attributes. Until flax 0.12, nnx does not remove them itself."""
    for _, module in walk_nnx_modules(model):
        for field in ("_pytree__nodes", "_object__nodes"):
            nodes = vars(module).get(field, ())
            gone = {name for name in nodes if name not in vars(module) and name not in getattr(type(module), field)}
            if gone:
                left = (
                    {name: nodes[name] for name in nodes if name not in gone}
                    if isinstance(nodes, Mapping)
                    else nodes - gone
                )
                object.__setattr__(module, field, type(nodes)(left))
