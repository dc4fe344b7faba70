"""Version-dependent and private API of the libraries on JAX: names that haiku, nnx, optax and orbax give."""

from __future__ import annotations

from typing import Any, Final

from polyamp_jax.compat import loaded_module

ORBAX_TREE: Final = "_METADATA"
"""Name of the file in each folder that stores an orbax array tree."""


def is_layer_stack_name(module: str) -> bool:
    """Return whether a name is the default module name of `hk.experimental.layer_stack`."""
    return module.startswith("__layer_stack")


def haiku_dropout() -> list[tuple[Any, str]]:
    """Return (module, name) of the replaceable function that implements `hk.dropout`."""
    module = loaded_module("haiku._src.basic")
    return [(module, name) for name in ("dropout_impl",) if hasattr(module, name)]


def nnx_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an nnx object in the order in which they were set, without flax's internal ones."""
    own = ("_pytree__", "_object__", "_length")  # `_object__` until flax 0.11, `_length` of an nnx.List
    return {name: value for name, value in vars(node).items() if not name.startswith(own)}


def optax_setting(path: str) -> str | None:
    """Return a path through an optax transformation's closures, without the parts that its wrappers add.

    Returns None for the closures of `init`, which repeat those of `update`.
    """
    if ".tx[0]" in path or "chain.init_fns[" in path:
        return None
    return path.replace("with_extra_args_support.tx[1].", "").replace("chain.update_fns[", "chain[")


def optax_hyperparameter(name: str) -> str:
    """Return the end of the path under which `optax.inject_hyperparams` stores a hyperparameter's initial value."""
    return f"inject_hyperparams.numeric_hps.{name}"
