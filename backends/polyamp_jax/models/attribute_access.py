"""Checks and error messages for attribute access on the model inside `loss_fn` (S29)."""

from __future__ import annotations

import difflib
from typing import Any, Final

import jax

from polyamp.errors import RecipeError, TraceError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.arrays import is_array
from polyamp_jax.models.module_path import ModulePath

NO_ATTRIBUTE: Final = object()
"""Object that attributes of a plain function are read from: it has none."""

TRANSFORMED_LOSS_ERROR: Final = (
    "loss_fn must be the loss function itself: its model is no array, so jax.jit, jax.grad and jax.value_and_grad "
    "cannot take it. polyamp differentiates and compiles loss_fn: pass it without it, and call no transformation of "
    "JAX on a function of the model inside of it, nor a copy that nnx.merge, nnx.clone or jax.tree.map makes of it. (A "
    "transformed function may close over the model instead, if that has neither running statistics nor random "
    "streams.)"
)
"""Error message for a bound model that is passed to a JAX transformation, or whose copy is called."""


class UnboundEngine:
    """Engine of a copy that belongs to no model, made by `jax.tree.map` or a transformation. Every call raises.

    Attributes:
        params: the parameters of the copy, if it is no module of its library.
    """

    root: Any = None

    def __init__(self, params: Any = None) -> None:
        self.params = params

    def call(self, *_: Any) -> Any:
        """Raise `RecipeError`: the call could not pass on the running state and the random streams."""
        raise RecipeError(TRANSFORMED_LOSS_ERROR)

    computed = params_of = resolve_policy = state = view = call


def has_computed_arrays(value: Any) -> bool:
    """Return whether a property computed new arrays. These are computed again under the policy."""
    leaves = jax.tree.leaves(value)
    return not isinstance(value, compat.nnx_classes()) and bool(leaves) and all(map(is_array, leaves))


def refuse_base_method(owner: Any, route: ModulePath) -> None:
    """Reject a method of the library's base class. Raises `UnsupportedError`."""
    raise UnsupportedError(
        f"{route} is a method of {type(owner).__name__}'s base class, for use inside of a module: called from "
        "loss_fn it would pass the policy by, or what it changes would be lost. Call a method that the module "
        "defines; what belongs before training (train(), eval()) comes before polyamp.init. Parameters: "
        "model.params, or polyamp.parameters(model)."
    )


def refuse_set_attribute(route: ModulePath, name: str) -> None:
    """Reject `model.name = value`. Raises `TraceError`."""
    raise TraceError(
        f"{route}.{name} = ... would be lost: in JAX the model in loss_fn is a view of the state, "
        "which is a value. Return what is to be kept as aux, keep it in an nnx.Variable or a mutable collection of "
        "the model, or set the attribute before polyamp.init."
    )


def refuse_delete_attribute(route: ModulePath, name: str) -> None:
    """Reject `del model.name`. Raises `TraceError`."""
    raise TraceError(f"del {route}.{name} would be lost: delete the attribute before polyamp.init.")


def missing_attribute_message(owner: Any, route: ModulePath, name: str) -> str:
    """Return the error message for an attribute that does not exist."""
    if owner is NO_ATTRIBUTE:
        return (
            f"{route}.{name}: a model that is one function has the attribute params, and no other. Pass "
            "(linen_module, variables), an nnx or equinox module, or what hk.multi_transform made."
        )
    names = [other for other in dir(owner) if not other.startswith("_")]
    near = difflib.get_close_matches(name, names, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if compat.is_a(owner, "flax.linen", "Module"):
        hint += (
            " What linen makes in a @nn.compact method is no attribute: define it in setup(), or read "
            "model.params[...], which is nested by module names."
        )
    return f"{route}: {type(owner).__name__!r} has no attribute {name!r}.{hint}"
