"""The cases of `cases.py` in flax.linen, as `(module, variables)`. Called by the tests of porting in JAX and by the
pairs of frameworks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tests.porting.layers.cases import CASES, inputs

Array = np.ndarray[Any, Any]
_EPSILON = 1e-5


def run(model: Any, inputs: Array) -> Array:
    """What a model makes of its inputs, as in inference."""
    module, variables = model
    return np.asarray(_applied(module, variables, inputs))


@functools.partial(jax.jit, static_argnums=0)
def _applied(module: Any, variables: Any, inputs: Any) -> Any:
    return module.apply(variables, inputs)


def random(tree: Any, name: str) -> Any:
    """The same pytree with random values; those of a variance are positive."""
    rng = np.random.default_rng(len(name))

    def one(keys: Any, leaf: Any) -> Any:
        values = rng.normal(0, 0.5, leaf.shape)
        positive = "'var'" in jax.tree_util.keystr(keys)
        return jnp.asarray(1 + 0.2 * np.abs(values) if positive else values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def _case(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        module = make()
        shapes = jax.eval_shape(module.init, jax.random.key(0), inputs(name))
        return module, random(shapes, name)

    return build


class Chain(nn.Module):
    """Functions that make a layer, called one after another."""

    layers: tuple[Callable[[], Any], ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for make in self.layers:
            x = make()(x)
        return x


class TiedHead(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        tokens = nn.Embed(11, 6)
        return tokens.attend(tokens(x))


class Parameter(nn.Module):
    """A parameter of no layer."""

    name_: str
    shape: tuple[int, ...]
    use: Callable[[Any, Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.use(x, self.param(self.name_, nn.initializers.normal(), self.shape))


class ByHand(nn.Module):
    """Attention of dense layers."""

    packed: bool = False
    heads: int = 2
    key_heads: int = 2
    bias: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        features = x.shape[-1]
        size = features // self.heads
        dense = functools.partial(nn.Dense, use_bias=self.bias)
        if self.packed:
            query, key, value = jnp.split(dense(3 * features, name="qkv")(x), 3, -1)
        else:
            query = dense(features, name="query")(x)
            key, value = (dense(self.key_heads * size, name=name)(x) for name in ("key", "value"))
        query, key, value = (part.reshape(*x.shape[:-1], -1, size) for part in (query, key, value))
        mixed = nn.dot_product_attention(
            query, *(jnp.repeat(part, self.heads // self.key_heads, -2) for part in (key, value))
        )
        return dense(features, name="out")(mixed.reshape(x.shape))


def _dense(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: nn.Dense(*args, **options)


def _conv(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: nn.Conv(*args, **options)


def _transposed(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: nn.ConvTranspose(*args, padding="VALID", **options)


def _rnn(cell: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: nn.RNN(cell(5))


def _attention(**options: Any) -> Callable[[], Any]:
    return lambda: nn.MultiHeadDotProductAttention(2, qkv_features=6, **options)


def _joined(x: Any) -> Any:
    return x.reshape(*x.shape[:-2], -1)


def _class_token(x: Any, token: Any) -> Any:
    return jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, x.shape[-1])), x], 1)


_LAYERS: Mapping[str, Callable[[], Any]] = {
    "dense": _dense(7),
    "dense_no_bias": _dense(7, use_bias=False),
    "dense_square": _dense(6),
    "einsum_dense": lambda: Chain((lambda: nn.DenseGeneral((2, 4)), lambda: _joined)),
    "einsum_dense_joins": lambda: nn.Einsum((2, 4, 6), "...de,def->...f"),
    "mlp": lambda: Chain((_dense(8), lambda: functools.partial(nn.gelu, approximate=False), _dense(3))),
    "conv1d": _conv(4, 3),
    "conv1d_dilated": _conv(4, (3,), kernel_dilation=2, padding="VALID"),
    "conv2d": _conv(4, (3, 2), padding="VALID", use_bias=False),
    "conv2d_square": _conv(3, (3, 3)),
    "conv2d_explicit": _conv(4, (3, 3), strides=2, padding=1),
    "conv2d_same_strided": _conv(4, (3, 3), strides=(2, 2)),
    "conv2d_grouped": _conv(6, (3, 3), feature_group_count=2, padding="VALID"),
    "conv2d_depthwise": _conv(6, (3, 3), feature_group_count=3, padding="VALID"),
    "conv2d_separable": lambda: Chain(
        (_conv(3, (3, 3), feature_group_count=3, padding="VALID", use_bias=False), _conv(5, (1, 1)))
    ),
    "conv3d": _conv(3, (2, 3, 2), padding="VALID"),
    "conv_transpose1d": _transposed(4, (3,), strides=(2,)),
    "conv_transpose2d": _transposed(4, (3, 3), strides=(2, 2)),
    "conv_transpose2d_square": _transposed(3, (3, 3), transpose_kernel=True),
    "conv_transpose3d": _transposed(3, (2, 2, 2), strides=(2, 2, 2)),
    "embedding": lambda: nn.Embed(11, 6),
    "position": lambda: Parameter("position", (1, 4, 6), lambda x, position: x + position),
    "tied_head": TiedHead,
    "layer_norm": lambda: nn.LayerNorm(epsilon=_EPSILON),
    "layer_norm_no_bias": lambda: nn.LayerNorm(epsilon=_EPSILON, use_bias=False),
    "rms_norm": lambda: nn.RMSNorm(epsilon=_EPSILON),
    "group_norm": lambda: nn.GroupNorm(2, epsilon=_EPSILON),
    "instance_norm": lambda: nn.InstanceNorm(epsilon=_EPSILON),
    "batch_norm": lambda: nn.BatchNorm(use_running_average=True, epsilon=_EPSILON, momentum=0.9),
    "lstm": _rnn(nn.OptimizedLSTMCell),
    "lstm_stacked": lambda: Chain((_rnn(nn.LSTMCell), _rnn(nn.OptimizedLSTMCell))),
    "lstm_bidirectional": lambda: nn.Bidirectional(nn.RNN(nn.LSTMCell(5)), nn.RNN(nn.LSTMCell(5))),
    "gru": _rnn(nn.GRUCell),
    "simple_rnn": _rnn(nn.SimpleCell),
    "attention": _attention(),
    "attention_no_bias": _attention(use_bias=False),
    "attention_packed": lambda: ByHand(packed=True),
    "attention_separate": ByHand,
    "attention_grouped": lambda: ByHand(heads=4, bias=False),
    "scalar": lambda: Parameter("temperature", (), lambda x, temperature: x * temperature),
    "class_token": lambda: Parameter("class_token", (1, 1, 6), _class_token),
    "flatten": lambda: Chain(
        (_conv(4, (3, 3), padding="VALID"), lambda: nn.relu, lambda: lambda x: x.reshape(len(x), -1), _dense(7))
    ),
}

BUILD: Mapping[str, Callable[[], Any]] = {name: _case(name, make) for name, make in _LAYERS.items()}
"""Case -> the model with random weights."""

MISSING: Mapping[str, str] = {
    "gru_before": "GRUCell resets after the product",
    "prelu": "PReLU has one slope for all channels",
}
"""Case -> why linen has no layer for it."""
assert set(BUILD) | set(MISSING) == set(CASES)
