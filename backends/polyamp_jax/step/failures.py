"""What was mistaken when a step ends in one of JAX's errors. Called by the backend, after the failure.

They are recognised by their class, or by their words in jax 0.7 to 0.10; one that is not recognised stays as it is.
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
    ReplicaError,
    TraceError,
    described,
)
from polyamp.rules.replicas import called, shortened
from polyamp_jax import compat
from polyamp_jax.arrays import is_array
from polyamp_jax.models.attributes import TRANSFORMED
from polyamp_jax.precision.reading import is_bound

_VALUES: Final = (
    jax.errors.ConcretizationTypeError,  # float(), int(), `if`
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_COLLECTIVE: Final = re.compile(r"(Gloo|NCCL) \S+ (failed|operation)|Gloo context initialization failed")
_CALLS: Final = {
    "TracerBoolConversionError": "Python cannot branch on one with if, and, or, not",
    "TracerArrayConversionError": "NumPy cannot take one",
    "TracerIntegerConversionError": "Python cannot index or count with one",
    "NonConcreteBooleanIndexError": "a mask of them selects an unknown number of rows",
}


def explained(error: Exception, batch: Any, *, casts: bool = False) -> PolyampError | None:
    """The error to raise in place of JAX's; None if it is not known what was mistaken.

    Args:
        error: what was raised.
        batch: the step's.
        casts: whether the policy has mode "cast".
    """
    text = str(error)
    if casts and isinstance(error, ValueError) and "`where` must use just the PyTree structure" in text:
        return RecipeError(
            "eqx.tree_at(where, model, ...): with mode='cast' a parameter that is read by its attribute is its cast, "
            "and no leaf of the model, whose leaves are the masters. Choose the module around it, lambda m: m.layer, "
            "or use mode='autocast'."
        )
    if (parted := of_other_process(error)) is not None:
        return parted
    if isinstance(error, _VALUES):
        what = _CALLS.get(type(error).__name__)
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
    if isinstance(error, TypeError) and "BoundModel" in text and ("valid JAX" in text or "abstract array" in text):
        return RecipeError(TRANSFORMED)
    if isinstance(error, TypeError) and "as an abstract array" in text:
        return _no_array(batch)
    return None


def of_other_process(error: Exception) -> ReplicaError | None:
    """The error to raise in place of a collective's; None if it is another one."""
    return _other_process(error) if _COLLECTIVE.search(str(error)) and jax.process_count() > 1 else None


def _no_array(batch: Any) -> BatchError | None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not is_valid(leaf):
            where = f"batch{jax.tree_util.keystr(path)}"
            return BatchError(f"{where} is {named(leaf)}, which JAX cannot take. {_instead(leaf, where)}")
    return None


def _is_model(node: Any) -> bool:
    return is_bound(node)  # a pytree of its arrays


def check_aux(aux: Any) -> None:
    """Refuse what a compiled step cannot return beside the loss.

    Raises:
        LossError: names the leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_model):
        if not is_valid(leaf):
            raise LossError(
                f"aux{jax.tree_util.keystr(path)} is {named(leaf)}. What loss_fn returns beside the loss must "
                "be arrays "
                f"and numbers, in dicts, tuples and lists. {_registered(leaf)}".rstrip()
            )


def is_valid(leaf: Any) -> bool:
    """Whether a compiled function takes and returns it."""
    if is_array(leaf):
        return isinstance(leaf, jax.Array) or leaf.dtype.kind not in "OUSM"
    return isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__")


def named(leaf: Any) -> str:
    """A leaf as a message calls it."""
    if is_array(leaf):
        kind = {"O": "Python objects", "M": "dates"}.get(leaf.dtype.kind, "text")
        return f"a NumPy array of {kind}"
    if isinstance(leaf, str):
        return f"a str, {leaf!r}"
    dataclass = ", a dataclass" if hasattr(type(leaf), "__dataclass_fields__") else ""
    return f"{described(leaf)}{dataclass}"


def _instead(leaf: Any, where: str) -> str:
    if is_array(leaf) and leaf.dtype.kind == "O":
        return "It is made of rows of different length, or of None. Pad the rows to one length, and give a mask."
    return _registered(leaf) or f"Take it out of the batch, or turn it into numbers before the step ({where})."


def _registered(leaf: Any) -> str:
    if not hasattr(type(leaf), "__dataclass_fields__"):
        return ""
    return (
        f"Make it known to JAX with @jax.tree_util.register_dataclass above class {type(leaf).__name__}, or "
        "use a dict or "
        "a NamedTuple."
    )


def _named(processes: list[int]) -> str:
    return called(processes).replace("ranks", "processes").replace("rank", "process")


def _other_process(error: Exception) -> ReplicaError:
    """Of two processes it is the other one; of more JAX does not say which before its service has missed it."""
    others = [number for number in range(jax.process_count()) if number != jax.process_index()]
    return ReplicaError(
        f"{_named(others)} "
        f"{'ended, raised or was killed' if len(others) == 1 else 'did not all take part: one ended, raised or died'}: "
        f"a collective of process {jax.process_index()} failed ({shortened(error, 200)}). Look at what the others "
        "printed. Start all processes again and polyamp.restore the last checkpoint: this state is not to be used "
        "again."
    )
