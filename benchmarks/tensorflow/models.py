"""The workloads of `workloads` as Keras models: channels last, no dropout, as one writes them with the functional API.

Weights are float32 and the same at every call. The layers take the dtype policy that they are built under, Keras's own
or none; `workloads` builds one model for each side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import keras
from keras import layers

from benchmarks.common import workloads
from benchmarks.common.workloads import Workload

ADAM_EPSILON: Final = 1e-12
"""For AdamW on both sides, far below the gradients: Keras adds it to a root of the second moment that is not corrected
yet, polyamp, as torch, to the corrected one, which at the first step is 30 times as much."""
_EPSILON: Final = 1e-5


@contextmanager
def keras_policy(name: str) -> Iterator[None]:
    """Layers made inside are under Keras's policy of that name."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def model(workload: Workload) -> Any:
    """The workload's model; the last layer is linear."""
    keras.utils.set_random_seed(0)
    return _BUILDERS[workload.name](workload)


def classifies(workload: Workload) -> bool:
    """Whether the loss is cross-entropy over classes; otherwise the mean squared error."""
    return workload.vocabulary > 0


def _mlp(workload: Workload) -> Any:
    inputs = x = keras.Input((workload.width,))
    for _ in range(workload.layers - 1):
        x = layers.Dense(workload.width, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(workload.width)(x))


def _block(workload: Workload) -> Any:
    inputs = keras.Input((workload.length, workload.width))
    return keras.Model(inputs, _encoder(inputs, workload, causal=False))


def _gpt(workload: Workload) -> Any:
    tokens = keras.Input((workload.length,), dtype="int32")
    x = Positions(workload.length)(layers.Embedding(workload.vocabulary, workload.width)(tokens))
    for _ in range(workload.layers):
        x = _encoder(x, workload, causal=True)
    x = layers.LayerNormalization(epsilon=_EPSILON)(x)
    return keras.Model(tokens, layers.Dense(workload.vocabulary, use_bias=False)(x))


def _encoder(x: Any, workload: Workload, *, causal: bool) -> Any:
    """A pre-norm transformer layer."""
    normed = layers.LayerNormalization(epsilon=_EPSILON)(x)
    attention = layers.MultiHeadAttention(workload.heads, workload.width // workload.heads)
    x = layers.Add()([x, attention(normed, normed, use_causal_mask=causal)])
    hidden = layers.LayerNormalization(epsilon=_EPSILON)(x)
    hidden = layers.Dense(4 * workload.width, activation="gelu")(hidden)
    return layers.Add()([x, layers.Dense(workload.width)(hidden)])


class Positions(layers.Layer):
    """Adds a learned vector for each position."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def build(self, shape: Any) -> None:
        """The table, (length, width)."""
        self.table = self.add_weight((self._length, shape[-1]), keras.initializers.RandomNormal(stddev=0.02))

    def call(self, x: Any) -> Any:
        """(batch, length, width) -> the same."""
        return x + self.table


def _resnet(workload: Workload) -> Any:
    inputs = keras.Input((workload.length, workload.length, 3))
    x = _normed(layers.Conv2D(workload.width, 3, padding="same", use_bias=False)(inputs))
    x = layers.ReLU()(x)
    for stage in range(3):
        for number in range(workload.layers):
            x = _residual(x, workload.width * 2**stage, 2 if stage and not number else 1)
    return keras.Model(inputs, layers.Dense(workload.vocabulary)(layers.GlobalAveragePooling2D()(x)))


def _residual(x: Any, width: int, stride: int) -> Any:
    """Two convolutions and what goes past them, which is projected where the shape changes."""
    past = x
    if stride > 1:
        past = _normed(layers.Conv2D(width, 1, stride, use_bias=False)(x))
    x = layers.ReLU()(_normed(layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)))
    x = _normed(layers.Conv2D(width, 3, padding="same", use_bias=False)(x))
    return layers.ReLU()(layers.Add()([x, past]))


def _normed(x: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=_EPSILON)(x)


_BUILDERS: Final[dict[str, Callable[[Workload], Any]]] = {
    workloads.MLP.name: _mlp,
    workloads.BLOCK.name: _block,
    workloads.GPT.name: _gpt,
    workloads.RESNET.name: _resnet,
}
