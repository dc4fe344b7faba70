"""Explanations for JAX errors that a user's mistake causes in a step.

Errors are recognised by their class, or by their text in jax 0.7 to 0.10. Other errors are raised unchanged.
"""

from __future__ import annotations

import re
from typing import Any, Final

import jax

from polyamp.errors import (
    BatchError,
    LossError,
    ModelError,
    PolyampError,
    RecipeError,
    TraceError,
    describe_value,
)
from polyamp_jax import compat
from polyamp_jax.arrays import is_array
from polyamp_jax.distributed.jax_only.collective_errors import other_process_error
from polyamp_jax.models.module_proxy import TRANSFORMED_LOSS_ERROR
from polyamp_jax.precision.policy_module import is_policy_module

_CONCRETE_VALUE_ERRORS: Final = (
    jax.errors.ConcretizationTypeError,  # float(), int(), `if`
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_VALUE_READ_HINTS: Final = {
    "TracerBoolConversionError": "Python cannot branch on one with if, and, or, not",
    "TracerArrayConversionError": "NumPy cannot take one",
    "TracerIntegerConversionError": "Python cannot index or count with one",
    "NonConcreteBooleanIndexError": "a mask of them selects an unknown number of rows",
}


def explain_error(error: Exception, batch: Any, *, casts: bool = False) -> PolyampError | None:
    """Return the error to raise in place of JAX's, or None if the mistake is not recognised.

    Args:
        error: the exception that was raised.
        batch: the batch of the step.
        casts: whether the policy has mode "cast".
    """
    text = str(error)
    if casts and isinstance(error, ValueError) and "`where` must use just the PyTree structure" in text:
        return RecipeError(
            "eqx.tree_at(where, model, ...): with mode='cast' a parameter that is read by its attribute is its cast, "
            "and no leaf of the model, whose leaves are the masters. Choose the module around it, lambda m: m.layer, "
            "or use mode='autocast'."
        )
    if (parted := other_process_error(error)) is not None:
        return parted
    if isinstance(error, _CONCRETE_VALUE_ERRORS):
        what = _VALUE_READ_HINTS.get(type(error).__name__)
        if what is None:
            what = ".item() cannot read one" if "item()" in text else "float() and int() cannot read one"
        return TraceError(
            f"loss_fn is traced, so that its arrays have no values yet: {what}. Return the array itself, compute with "
            "jnp, and choose with jnp.where; what is to be looked at goes into aux, (loss, aux)."
        )
    if isinstance(error, NameError) and (axis := re.search(r"unbound axis name: (\S+?)\.?(?:\s|$)", text)):
        return ModelError(
            f"the model or loss_fn reduces over a mapped axis {axis[1]!r}, and the step maps none. That is what flax's "
            f"BatchNorm(axis_name={axis[1]!r}) and jax.lax.pmean do under pmap. Drop axis_name=: the step "
            "takes the whole "
            "batch, sharded over the devices or not, so that statistics and means are those of the whole batch "
            "already. "
            "An equinox module that is written for one example: polyamp.init(model, recipe, axis_name=...)."
        )
    if compat.is_a(error, "flax.errors", "InvalidRngError") and (stream := re.search(r'PRNG for "(\w+)"', text)):
        name = stream[1]
        return ModelError(
            f"the model draws from the random stream {name!r}, which the state does not have. Give it a seed: "
            f"polyamp.init(model, recipe, rngs={{{name!r}: 0}}); the state then moves it on with every step."
        )
    if isinstance(error, TypeError) and "PolicyModule" in text and ("valid JAX" in text or "abstract array" in text):
        return RecipeError(TRANSFORMED_LOSS_ERROR)
    if isinstance(error, TypeError) and "as an abstract array" in text:
        return _batch_leaf_error(batch)
    return None


def _batch_leaf_error(batch: Any) -> BatchError | None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not is_jax_type(leaf):
            where = f"batch{jax.tree_util.keystr(path)}"
            return BatchError(
                f"{where} is {leaf_description(leaf)}, which JAX cannot take. {_replacement_hint(leaf, where)}"
            )
    return None


def check_aux(aux: Any) -> None:
    """Reject auxiliary outputs that a compiled step cannot return.

    Raises:
        LossError: names the leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_policy_module):
        if not is_jax_type(leaf):
            raise LossError(
                f"aux{jax.tree_util.keystr(path)} is {leaf_description(leaf)}. What loss_fn returns beside the loss "
                f"must be arrays and numbers, in dicts, tuples and lists. {_registration_hint(leaf)}".rstrip()
            )


def is_jax_type(leaf: Any) -> bool:
    """Return whether a compiled function can take and return `leaf`."""
    if is_array(leaf):
        return isinstance(leaf, jax.Array) or leaf.dtype.kind not in "OUSM"
    return isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__")


def leaf_description(leaf: Any) -> str:
    """Return the description of a leaf for error messages."""
    if is_array(leaf):
        kind = {"O": "Python objects", "M": "dates"}.get(leaf.dtype.kind, "text")
        return f"a NumPy array of {kind}"
    if isinstance(leaf, str):
        return f"a str, {leaf!r}"
    dataclass = ", a dataclass" if hasattr(type(leaf), "__dataclass_fields__") else ""
    return f"{describe_value(leaf)}{dataclass}"


def _replacement_hint(leaf: Any, where: str) -> str:
    if is_array(leaf) and leaf.dtype.kind == "O":
        return "It is made of rows of different length, or of None. Pad the rows to one length, and give a mask."
    return _registration_hint(leaf) or f"Take it out of the batch, or turn it into numbers before the step ({where})."


def _registration_hint(leaf: Any) -> str:
    if not hasattr(type(leaf), "__dataclass_fields__"):
        return ""
    return (
        f"Make it known to JAX with @jax.tree_util.register_dataclass above class {type(leaf).__name__}, or "
        "use a dict or "
        "a NamedTuple."
    )
