"""The cases of `cases.py` in flax.nnx. Called by the tests of porting in JAX and by the pairs of frameworks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.porting.layers.cases import CASES
from tests.porting.layers.linen_layers import random

Array = np.ndarray[Any, Any]
_EPSILON = 1e-5


def run(model: Any, inputs: Array) -> Array:
    """What a model makes of its inputs, as in inference."""
    return np.asarray(_applied(model, jnp.asarray(inputs)))


@nnx.jit
def _applied(model: Any, inputs: Any) -> Any:
    return model(inputs)


def _stream(shape: Any) -> Any:
    """A random key, or a counter of 0."""
    return jnp.zeros(shape.shape, shape.dtype) if shape.dtype == jnp.uint32 else jax.random.key(0)


def _case(name: str, make: Callable[[nnx.Rngs], Any]) -> Callable[[], Any]:
    def build() -> Any:
        # traced and not drawn: a compiled program for every initialiser would cost more than the tests
        graphdef, streams, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.RngState, ...)
        streams = jax.tree.map(_stream, streams)
        model = nnx.merge(graphdef, streams, random(rest, name))
        model.eval()
        return model

    return build


class TiedHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(11, 6, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.tokens.attend(self.tokens(x))


class Position(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.position = nnx.Param(jnp.zeros((1, 4, 6)))

    def __call__(self, x: Any) -> Any:
        return x + self.position


class Scalar(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.temperature = nnx.Param(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return x * self.temperature


class ClassToken(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token = nnx.Param(jnp.zeros((1, 1, 6)))

    def __call__(self, x: Any) -> Any:
        return jnp.concatenate([jnp.broadcast_to(self.token[...], (x.shape[0], 1, x.shape[-1])), x], 1)


class ByHand(nnx.Module):
    """Attention of dense layers."""

    def __init__(self, rngs: nnx.Rngs, *, packed: bool) -> None:
        for name in ("qkv",) if packed else ("query", "key", "value"):
            setattr(self, name, nnx.Linear(6, 18 if packed else 6, rngs=rngs))
        self.out = nnx.Linear(6, 6, rngs=rngs)
        self.packed = packed

    def __call__(self, x: Any) -> Any:
        parts = jnp.split(self.qkv(x), 3, -1) if self.packed else [self.query(x), self.key(x), self.value(x)]
        mixed = nnx.dot_product_attention(*(part.reshape(*x.shape[:-1], 2, 3) for part in parts))
        return self.out(mixed.reshape(x.shape))


def _dense(*args: Any, **options: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.Linear(*args, rngs=rngs, **options)


def _conv(*args: Any, **options: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.Conv(*args, rngs=rngs, **options)


def _transposed(*args: Any, **options: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.ConvTranspose(*args, padding="VALID", rngs=rngs, **options)


def _rnn(cell: Callable[..., Any], features: int = 3) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.RNN(cell(features, 5, rngs=rngs))


def _attention(*args: Any, **options: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: nnx.MultiHeadAttention(*args, decode=False, rngs=rngs, **options)


def _chain(*layers: Any) -> Callable[[nnx.Rngs], Any]:
    """Layers and functions; what makes a layer takes an argument `rngs`."""

    def make(rngs: nnx.Rngs) -> Any:
        made = [layer(rngs) if getattr(layer, "__name__", "") == "<lambda>" else layer for layer in layers]
        return nnx.Sequential(*made)

    return make


def _norm(kind: Callable[..., Any], *args: Any, **options: Any) -> Callable[[nnx.Rngs], Any]:
    return lambda rngs: kind(*args, epsilon=_EPSILON, rngs=rngs, **options)


def _joined(x: Any) -> Any:
    return x.reshape(*x.shape[:-2], -1)


def _flat(x: Any) -> Any:
    return x.reshape(len(x), -1)


def _bidirectional(rngs: nnx.Rngs) -> Any:
    return nnx.Bidirectional(_rnn(nnx.LSTMCell)(rngs), _rnn(nnx.OptimizedLSTMCell)(rngs))


_LAYERS: Mapping[str, Callable[[nnx.Rngs], Any]] = {
    "dense": _dense(5, 7),
    "dense_no_bias": _dense(5, 7, use_bias=False),
    "dense_square": _dense(6, 6),
    "einsum_dense": _chain(lambda rngs: nnx.Einsum("abc,cde->abde", (6, 2, 4), (2, 4), rngs=rngs), _joined),
    "einsum_dense_joins": lambda rngs: nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=rngs),
    "mlp": _chain(_dense(5, 8), functools.partial(jax.nn.gelu, approximate=False), _dense(8, 3)),
    "conv1d": _conv(3, 4, 3),
    "conv1d_dilated": _conv(3, 4, (3,), kernel_dilation=2, padding="VALID"),
    "conv2d": _conv(3, 4, (3, 2), padding="VALID", use_bias=False),
    "conv2d_square": _conv(3, 3, (3, 3)),
    "conv2d_explicit": _conv(3, 4, (3, 3), strides=2, padding=((1, 1), (1, 1))),
    "conv2d_same_strided": _conv(3, 4, (3, 3), strides=(2, 2)),
    "conv2d_grouped": _conv(4, 6, (3, 3), feature_group_count=2, padding="VALID"),
    "conv2d_depthwise": _conv(3, 6, (3, 3), feature_group_count=3, padding="VALID"),
    "conv2d_separable": _chain(
        _conv(3, 3, (3, 3), feature_group_count=3, padding="VALID", use_bias=False), _conv(3, 5, (1, 1))
    ),
    "conv3d": _conv(2, 3, (2, 3, 2), padding="VALID"),
    "conv_transpose1d": _transposed(3, 4, (3,), strides=(2,)),
    "conv_transpose2d": _transposed(3, 4, (3, 3), strides=(2, 2)),
    "conv_transpose2d_square": _transposed(3, 3, (3, 3), transpose_kernel=True),
    "conv_transpose3d": _transposed(2, 3, (2, 2, 2), strides=(2, 2, 2)),
    "embedding": lambda rngs: nnx.Embed(11, 6, rngs=rngs),
    "position": Position,
    "tied_head": TiedHead,
    "layer_norm": _norm(nnx.LayerNorm, 6),
    "layer_norm_no_bias": _norm(nnx.LayerNorm, 6, use_bias=False),
    "rms_norm": _norm(nnx.RMSNorm, 6),
    "group_norm": _norm(nnx.GroupNorm, 6, 2),
    "instance_norm": _norm(nnx.InstanceNorm, 6),
    "batch_norm": _norm(nnx.BatchNorm, 6, momentum=0.9),
    "lstm": _rnn(nnx.OptimizedLSTMCell),
    "lstm_stacked": _chain(_rnn(nnx.LSTMCell), _rnn(nnx.OptimizedLSTMCell, 5)),
    "lstm_bidirectional": _bidirectional,
    "gru": _rnn(nnx.GRUCell),
    "simple_rnn": _rnn(nnx.SimpleCell),
    "attention": _attention(2, 6),
    "attention_no_bias": _attention(2, 6, use_bias=False),
    "attention_packed": functools.partial(ByHand, packed=True),
    "attention_separate": functools.partial(ByHand, packed=False),
    "attention_grouped": _attention(4, 8, num_kv_heads=2, use_bias=False),
    "scalar": Scalar,
    "class_token": ClassToken,
    "flatten": _chain(_conv(3, 4, (3, 3), padding="VALID"), jax.nn.relu, _flat, _dense(48, 7)),
}

BUILD: Mapping[str, Callable[[], Any]] = {name: _case(name, make) for name, make in _LAYERS.items()}
"""Case -> the model with random weights."""

MISSING: Mapping[str, str] = {
    "gru_before": "GRUCell resets after the product",
    "prelu": "PReLU has one slope for all channels",
}
"""Case -> why nnx has no layer for it."""
assert set(BUILD) | set(MISSING) == set(CASES)
