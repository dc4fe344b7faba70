"""Casts of results to the policy's dtypes (S1), and the dtype of a loss (S6).

A rounded tensor keeps the wider one for the cast of the output.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

import keras

from polyamp.errors import LossError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import cast, dtype_name, is_floating
from polyamp_keras.compat import copy_keras_mask, get_tensor_attribute, set_tensor_attribute

LOSSES_READ: Final[ContextVar[list[Any] | None]] = ContextVar("losses_read", default=None)
"""Layers whose losses `loss_fn` has read so far; None outside a step. See `regularization_losses`."""
_UNROUNDED: Final = "_polyamp_unrounded"  # attribute of a tensor, like Keras's logits on a softmax's result


def cast_output(tree: Any, dtype: str, *, float64: bool) -> Any:
    """Cast a model's output to the policy's output dtype (S1), from the unrounded tensor if `round_to_dtype` stored
    one."""

    def cast_leaf(leaf: Any) -> Any:
        wide = get_tensor_attribute(leaf, _UNROUNDED)
        return copy_keras_mask(leaf, cast(leaf if wide is None else wide, dtype, float64=float64))

    return keras.tree.map_structure(cast_leaf, tree)


def is_rounded(leaf: Any) -> bool:
    """Return whether `round_to_dtype` rounded a tensor and stored the wider one on it."""
    return get_tensor_attribute(leaf, _UNROUNDED) is not None


def round_to_dtype(tree: Any, dtype: str) -> Any:
    """Cast the floating tensors of a tree to `dtype`. A tensor that loses digits stores the original one."""

    def round_leaf(leaf: Any) -> Any:
        if not keras.ops.is_tensor(leaf) or not is_floating(leaf) or dtype_name(leaf) in (dtype, "float64"):
            return leaf
        narrow = copy_keras_mask(leaf, keras.ops.cast(leaf, dtype))
        if dtype in HALF_DTYPES and dtype_name(leaf) not in HALF_DTYPES:
            set_tensor_attribute(narrow, _UNROUNDED, leaf)
        return narrow

    return keras.tree.map_structure(round_leaf, tree)


def warn_narrow_loss(dtype: str, *, stacklevel: int) -> None:
    """Warn about a loss that is given to `scale_loss` in 16 bits. A `stacklevel` of 1 is this function's line."""
    if dtype in HALF_DTYPES:
        warnings.warn(
            f"scale_loss() is given a loss in {dtype}: it was computed in 16 bits, where a sum has three digits. Cast "
            "what it is made of, loss = keras.ops.mean(keras.ops.square(keras.ops.cast(x, 'float32'))), or use a loss "
            "object of Keras's or polyamp.losses, which compute in float32.",
            UserWarning,
            stacklevel=stacklevel,
        )


def check_loss_dtype(loss: Any, plans: Sequence[ResolvedPolicy]) -> None:
    """Raise for a loss that `loss_fn` computed in 16 bits although the models' outputs are wider (S6).

    Args:
        loss: the loss, a tensor or variable of Keras's backend, or a number.
        plans: the policies of the models.

    Raises:
        LossError: names the remedy.
    """
    narrow = dtype_name(loss) if hasattr(loss, "dtype") else ""
    if narrow in HALF_DTYPES and not any(plan.output in HALF_DTYPES for plan in plans):
        raise LossError(
            f"loss_fn returned a loss in {narrow}, though the model's outputs are {plans[0].output}: it was computed "
            "in 16 bits, where a sum has three digits. Cast what it is made of, keras.ops.cast(x, 'float32'), or use "
            "polyamp.losses, which compute in float32."
        )
