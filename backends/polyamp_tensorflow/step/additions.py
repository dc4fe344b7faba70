"""What a Keras model adds to its loss by itself (S25): regularizers of weights and activities, and `add_loss`.

`fit` adds it; a step's loss is what `loss_fn` returns. So `loss_fn` can ask for it, and a model that has some while
nobody asked is named in a warning. Called by the backend, the step and the bound model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from polyamp_tensorflow.arrays import at_least_float32, raw
from polyamp_tensorflow.compat import every_layer, forget_losses, losses_instead, own_losses, own_trainable
from polyamp_tensorflow.models.layers import is_layer, modules
from polyamp_tensorflow.precision.bound import ASKED, native_of


def regularization(model: Any) -> Any:
    """The sum of what a model or layer adds, float32; each term as Keras's trainer sums it.

    Args:
        model: a `BoundModel`, a Keras model or layer, or another model, which adds nothing.
    """
    model = native_of(model)
    asked = ASKED.get()
    if asked is not None:
        asked.append(model)
    total = tf.zeros((), tf.float32)
    if is_layer(model):
        for term in _terms(model):
            total += tf.reduce_sum(tf.cast(term, tf.float32))
    return total


def _terms(model: Any) -> list[Any]:
    """Losses of the last call, then of the weights: a regularizer of 16-bit weights sums in float32 (S4)."""
    instead = losses_instead(model)
    if instead:
        return instead
    collected = [loss for layer in every_layer(model) for loss in own_losses(layer)]
    weights = [variable for variable in model.trainable_weights if variable.regularizer is not None]
    return collected + [v.regularizer(tf.cast(raw(v), at_least_float32(raw(v).dtype))) for v in weights]


@contextlib.contextmanager
def awaited(states: Sequence[Any]) -> Iterator[None]:
    """Around one call of `loss_fn`: warns, once for each state, if it leaves out what a model adds."""
    for state in states:
        if is_layer(state.model):
            forget_losses(state.model)  # of an earlier call; what stands there afterwards is of this one
    token = ASKED.set([])
    try:
        yield
        asked = ASKED.get() or []
    finally:
        ASKED.reset(token)
    for state in states:
        if not state.warned_of_additions and is_layer(state.model):
            _warn(state, asked)


def _warn(state: Any, asked: list[Any]) -> None:
    parts = modules(state.model)
    if any(part.layer is layer for part in parts for layer in asked):
        return
    names = [part.path or state.model.name for part in parts if _adds(part.layer)]
    if not names:
        return
    state.warned_of_additions = True
    warnings.warn(
        f"loss_fn leaves out what the model adds to its loss: regularizers or add_loss of {', '.join(names)}. Keras's "
        "fit adds it; here the loss is what loss_fn returns. Add polyamp.losses.regularization(model) to it, or, if it "
        "is left out on purpose, warnings.filterwarnings('ignore', message='loss_fn leaves out').",
        stacklevel=2,
    )


def _adds(layer: Any) -> bool:
    own = own_trainable(layer) if layer.trainable else ()
    return bool(own_losses(layer)) or any(v.trainable and v.regularizer is not None for v in own)
