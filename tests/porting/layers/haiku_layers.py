"""The cases of `cases.py` in haiku. Called by the tests of porting in JAX and by the pairs of frameworks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from tests.porting.layers.cases import inputs as given

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

MISSING: Mapping[str, str] = {
    "gru": "haiku's GRU resets before the product",
    "simple_rnn": "haiku's VanillaRNN has relu",
    "prelu": "haiku has no PReLU",
}


def run(model: Any, inputs: Array) -> Array:
    """What a model makes of its inputs, as in inference."""
    return np.asarray(_applied(*model, inputs))


@functools.partial(jax.jit, static_argnums=0)
def _applied(transformed: Any, held: Any, inputs: Any) -> Any:
    if isinstance(held, tuple):
        return transformed.apply(*held, inputs)[0]
    return transformed.apply(held, inputs)


def _build(name: str, function: Function) -> Callable[[], Any]:
    def build() -> Any:
        rng = np.random.default_rng(len(name))
        stateful = name == "batch_norm"
        transformed = hk.without_apply_rng((hk.transform_with_state if stateful else hk.transform)(function))
        flags = {"is_training": True} if stateful else {}
        shapes = jax.eval_shape(functools.partial(transformed.init, **flags), jax.random.key(0), given(name))
        params, state = shapes if stateful else (shapes, {})
        params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), jnp.float32), params)
        if not stateful:
            return transformed, params
        averages = {}
        for module, leaves in state.items():
            average = jnp.asarray(1 + rng.random(leaves["average"].shape), jnp.float32)
            averages[module] = {"counter": jnp.asarray(7), "hidden": average * 0.3, "average": average}
        return transformed, (params, averages)

    return build


def _unrolled(core: Any, x: Any, *, reverse: bool = False) -> Any:
    return hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False, reverse=reverse)[0]


def _stacked(x: Any) -> Any:
    return _unrolled(hk.DeepRNN([hk.LSTM(5), hk.LSTM(5)]), x)


def _bidirectional(x: Any) -> Any:
    forward, backward = hk.LSTM(5, name="forward"), hk.LSTM(5, name="backward")
    return jnp.concatenate([_unrolled(forward, x), _unrolled(backward, x, reverse=True)], -1)


def _joined(x: Any) -> Any:
    return hk.Linear(6)(x.reshape(*x.shape[:2], -1))


def _mlp(x: Any) -> Any:
    return hk.Linear(3)(jax.nn.gelu(hk.Linear(8)(x), approximate=False))


def _separable(x: Any) -> Any:
    x = hk.DepthwiseConv2D(1, 3, padding="VALID", with_bias=False)(x)
    return hk.Conv2D(5, 1)(x)


def _position(x: Any) -> Any:
    return x + hk.get_parameter("position", x.shape[1:], init=jnp.zeros)


def _tied(tokens: Any) -> Any:
    embed = hk.Embed(11, 6)
    return embed(tokens) @ embed.embeddings.T


def _scalar(x: Any) -> Any:
    return x * hk.get_parameter("factor", (), init=jnp.zeros)


def _class_token(x: Any) -> Any:
    token = hk.get_parameter("cls_token", (1, 1, 6), init=jnp.zeros)
    return jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, 6)), x], 1)


def _attention(x: Any, *, biases: bool = True) -> Any:
    return hk.MultiHeadAttention(2, 3, with_bias=biases, w_init=hk.initializers.VarianceScaling())(x, x, x)


def _mixed(query: Any, key: Any, value: Any, size: int) -> Any:
    query, key, value = (part.reshape(*part.shape[:2], -1, size) for part in (query, key, value))
    repeats = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, repeats, 2), jnp.repeat(value, repeats, 2)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(size))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*query.shape[:2], -1)


def _packed(x: Any) -> Any:
    return hk.Linear(6, name="proj")(_mixed(*jnp.split(hk.Linear(18, name="qkv")(x), 3, -1), 3))


def _separate(x: Any) -> Any:
    parts = (hk.Linear(6, name=name)(x) for name in ("query", "key", "value"))
    return hk.Linear(6, name="out")(_mixed(*parts, 3))


def _grouped(x: Any) -> Any:
    sizes = {"query": 8, "key": 4, "value": 4}
    parts = (hk.Linear(size, with_bias=False, name=name)(x) for name, size in sizes.items())
    return hk.Linear(8, with_bias=False, name="out")(_mixed(*parts, 2))


def _flatten(x: Any) -> Any:
    return hk.Linear(7)(hk.Flatten()(jax.nn.relu(hk.Conv2D(4, 3, padding="VALID")(x))))


_FUNCTIONS: Mapping[str, Function] = {
    "dense": lambda x: hk.Linear(7)(x),
    "dense_no_bias": lambda x: hk.Linear(7, with_bias=False)(x),
    "dense_square": lambda x: hk.Linear(6)(x),
    "einsum_dense": lambda x: hk.Linear(8)(x),
    "einsum_dense_joins": _joined,
    "mlp": _mlp,
    "conv1d": lambda x: hk.Conv1D(4, 3)(x),
    "conv1d_dilated": lambda x: hk.Conv1D(4, 3, rate=2, padding="VALID")(x),
    "conv2d": lambda x: hk.Conv2D(4, (3, 2), padding="VALID", with_bias=False)(x),
    "conv2d_square": lambda x: hk.Conv2D(3, 3)(x),
    "conv2d_explicit": lambda x: hk.Conv2D(4, 3, 2, padding=((1, 1), (1, 1)))(x),
    "conv2d_same_strided": lambda x: hk.Conv2D(4, 3, 2)(x),
    "conv2d_grouped": lambda x: hk.Conv2D(6, 3, padding="VALID", feature_group_count=2)(x),
    "conv2d_depthwise": lambda x: hk.DepthwiseConv2D(2, 3, padding="VALID")(x),
    "conv2d_separable": _separable,
    "conv3d": lambda x: hk.Conv3D(3, (2, 3, 2), padding="VALID")(x),
    "conv_transpose1d": lambda x: hk.Conv1DTranspose(4, 3, 2, padding="VALID")(x),
    "conv_transpose2d": lambda x: hk.Conv2DTranspose(4, 3, 2, padding="VALID")(x),
    "conv_transpose2d_square": lambda x: hk.Conv2DTranspose(3, 3, padding="VALID")(x),
    "conv_transpose3d": lambda x: hk.Conv3DTranspose(3, 2, 2, padding="VALID")(x),
    "embedding": lambda tokens: hk.Embed(11, 6)(tokens),
    "position": _position,
    "tied_head": _tied,
    "layer_norm": lambda x: hk.LayerNorm(-1, True, True)(x),
    "layer_norm_no_bias": lambda x: hk.LayerNorm(-1, True, False)(x),
    "rms_norm": lambda x: hk.RMSNorm(-1)(x),
    "group_norm": lambda x: hk.GroupNorm(2)(x),
    "instance_norm": lambda x: hk.InstanceNorm(True, True)(x),
    "batch_norm": lambda x, is_training=False: hk.BatchNorm(True, True, 0.9)(x, is_training),
    "lstm": lambda x: _unrolled(hk.LSTM(5), x),
    "lstm_stacked": _stacked,
    "lstm_bidirectional": _bidirectional,
    "gru_before": lambda x: _unrolled(hk.GRU(5), x),
    "attention": _attention,
    "attention_no_bias": lambda x: _attention(x, biases=False),
    "attention_packed": _packed,
    "attention_separate": _separate,
    "attention_grouped": _grouped,
    "scalar": _scalar,
    "class_token": _class_token,
    "flatten": _flatten,
}
BUILD: Mapping[str, Callable[[], Any]] = {name: _build(name, function) for name, function in _FUNCTIONS.items()}
