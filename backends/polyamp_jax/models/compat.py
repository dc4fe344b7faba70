"""What nnx keeps for itself in its modules, by version of flax. Called by `bound_nnx` and `nnx_pass`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp_jax.compat import nnx_modules

NNX_INTERNAL: Final = ("__", "_pytree", "_object__", "_graph_node", "_setattr", "_check")
"""How the names begin that nnx looks up on a module for itself (`_object__` until flax 0.11)."""


def nnx_class_options(kind: Any) -> dict[str, Any]:
    """The keyword arguments that a subclass of an nnx class needs to be a pytree where that is one, and not else."""
    return {} if getattr(kind, "_pytree__is_pytree", True) else {"pytree": False}


def forget_nnx_attributes(model: Any) -> None:
    """Drop what nnx remembers of attributes that are gone: until flax 0.12 it does not by itself."""
    for _, module in nnx_modules(model):
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
