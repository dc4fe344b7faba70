"""Code that asks a layer's methods what they take gets the same answer under a policy as without one."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
from polyamp_tensorflow import apply_policy

layers = keras.layers
POLICY = polyamp.Policy(compute="bfloat16", output="bfloat16")


class Asking(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Passes `training` and `mask` on only to a layer that takes them, as libraries of layers do."""

    def __init__(self, inner: Any) -> None:
        super().__init__(name="asking")
        self.inner = inner

    def call(self, x: Any, mask: Any = None, training: bool = False) -> Any:
        taken = inspect.signature(self.inner.call).parameters
        given = {"training": training, "mask": mask}
        return self.inner(x, **{name: value for name, value in given.items() if name in taken})


class Own(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A layer of the user's, with a norm inside, so that its call and the norm's are stood in for."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.norm = layers.BatchNormalization(name="norm")
        self.seen: list[Any] = []

    def call(self, x: Any, *, mask: Any = None, training: bool = False, scale: float = 1.0) -> Any:
        """Says what it was given."""
        self.seen.append(training)
        return self.norm(x, training=training) * scale


FAMILIES: dict[str, Any] = {
    "own": lambda: Own(),
    "BatchNormalization": lambda: layers.BatchNormalization(),
    "LayerNormalization": lambda: layers.LayerNormalization(),
    "Dense": lambda: layers.Dense(8),
    "Softmax": lambda: layers.Softmax(),
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dropout(0.5)),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
    "RNN": lambda: layers.RNN([layers.GRUCell(8, dropout=0.5), layers.LSTMCell(8)], return_sequences=True),
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(8)),
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 4),
    "Attention": lambda: layers.Attention(dropout=0.5),
    "RepeatVector": lambda: layers.RepeatVector(3),
}


def methods(model: Any) -> dict[str, Any]:
    return {
        f"{layer.path}.{name}": (inspect.signature(getattr(layer, name)), getattr(layer, name).__name__)
        for layer in model._flatten_layers()
        for name in ("call", "add_loss", "_apply_scores", "_calculate_scores")
        if hasattr(layer, name)
    }


def build(layer: Any) -> None:
    shape = (2, 8) if isinstance(layer, layers.RepeatVector) else (2, 3, 8)
    x = np.ones(shape, np.float32)
    if isinstance(layer, layers.MultiHeadAttention):
        layer(x, x)
    else:
        layer([x, x] if isinstance(layer, layers.Attention) else x)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_method_keeps_its_signature(name: str) -> None:
    layer = FAMILIES[name]()
    build(layer)
    before = methods(layer)
    with apply_policy(layer, POLICY):
        assert methods(layer) == before
        with apply_policy(layer, polyamp.Policy("mixed_float16")):
            assert methods(layer) == before
    applied = apply_policy(layer, POLICY)
    assert methods(layer) == before
    applied.restore()
    assert methods(layer) == before


@pytest.mark.parametrize("permanent", [False, True])
def test_training_reaches_a_layer_that_is_asked_for_it(permanent: bool) -> None:
    own = Own()
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Asking(own), layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    applied = apply_policy(model, polyamp.Policy("mixed_bfloat16"))
    own.seen.clear()
    before = own.norm.moving_mean.numpy()
    model(x, training=True)
    assert own.seen == [True]
    assert not np.array_equal(own.norm.moving_mean.numpy(), before)
    if not permanent:
        applied.restore()
    rebuilt = keras.Sequential([keras.Input((8,)), *model.layers])  # Keras asks each layer for its arguments
    assert rebuilt(x).shape == (16, 1)
