"""Losses that a Keras model itself adds (S25): regularizers of weights and activities, and `add_loss`.

`fit` adds them, but a step's loss is the result of `loss_fn`. So `loss_fn` can request them. A warning names a model
that has such losses if `loss_fn` does not read them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from polyamp.context_values import temporary_value
from polyamp_keras.arrays import at_least_float32, native_variable
from polyamp_keras.compat import clear_losses, flatten_layers, losses_override, own_losses, own_trainable_variables
from polyamp_keras.models.layers import is_layer, list_layers
from polyamp_keras.precision.bound_model import native_model
from polyamp_keras.precision.output_casts import LOSSES_READ


def regularization(model: Any) -> Any:
    """Return the sum of the losses that a model or layer adds, float32; each term summed as in Keras's trainer.

    Args:
        model: a `BoundKerasModel`, a Keras model or layer. Any other model adds nothing.
    """
    model = native_model(model)
    layers_read = LOSSES_READ.get()
    if layers_read is not None:
        layers_read.append(model)
    total = keras.ops.zeros((), "float32")
    if is_layer(model):
        for term in _loss_terms(model):
            total = total + keras.ops.sum(keras.ops.cast(native_variable(term), "float32"))
    return total


def _loss_terms(model: Any) -> list[Any]:
    """Return the losses of the last call, then of the weights. Regularizers of 16-bit weights sum in float32 (S4)."""
    instead = losses_override(model)
    if instead:
        return instead
    collected = [loss for layer in flatten_layers(model) for loss in own_losses(layer)]
    weights = [variable for variable in model.trainable_weights if variable.regularizer is not None]
    return collected + [v.regularizer(keras.ops.cast(native_variable(v), at_least_float32(v))) for v in weights]


@contextlib.contextmanager
def warn_missing_regularization(states: Sequence[Any]) -> Iterator[None]:
    """Context manager around one call of `loss_fn` that warns, once per state, if it omits losses that a model adds."""
    for state in states:
        if is_layer(state.model):
            clear_losses(state.model)  # of an earlier call
    layers_read: list[Any] = []
    with temporary_value(LOSSES_READ, layers_read):
        yield
    for state in states:
        if not state.warned_of_additions and is_layer(state.model):
            _warn_missing_losses(state, layers_read)


def _warn_missing_losses(state: Any, layers_read: list[Any]) -> None:
    parts = list_layers(state.model)
    if any(part.layer is layer for part in parts for layer in layers_read):
        return
    names = [part.path or state.model.name for part in parts if _has_losses(part.layer)]
    if not names:
        return
    state.warned_of_additions = True
    warnings.warn(
        f"loss_fn leaves out what the model adds to its loss: regularizers or add_loss of {', '.join(names)}. Keras's "
        "fit adds it; here the loss is what loss_fn returns. Add polyamp.losses.regularization(model) to it, or, if it "
        "is left out on purpose, warnings.filterwarnings('ignore', message='loss_fn leaves out').",
        stacklevel=2,
    )


def _has_losses(layer: Any) -> bool:
    own = own_trainable_variables(layer) if layer.trainable else ()
    return bool(own_losses(layer)) or any(v.trainable and v.regularizer is not None for v in own)
