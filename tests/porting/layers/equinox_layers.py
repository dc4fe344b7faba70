"""The cases of `cases.py` as equinox modules. Called by the tests of porting in JAX and by the pairs of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import nn

Array = np.ndarray[Any, Any]
_KEY = jax.random.key(0)  # every array is replaced

MISSING: Mapping[str, str] = {
    "gru_before": "equinox's GRUCell resets after the product",
    "simple_rnn": "equinox has no simple recurrent cell",
}


def run(model: Any, inputs: Array) -> Array:
    """What a model makes of its inputs, as in inference: channels last outside, one sample at a time inside."""
    return np.asarray(_applied(model, jnp.asarray(inputs)))


@eqx.filter_jit
def _applied(model: Any, x: Any) -> Any:
    module, state = model if isinstance(model, tuple) else (model, None)
    module = eqx.nn.inference_mode(module)
    if state is not None:
        module = _with_state(module, state)
    if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm | nn.Embedding):
        for _ in range(x.ndim - (not isinstance(module, nn.Embedding))):
            module = jax.vmap(module)
        return module(x)
    if not isinstance(model, nn.Conv | nn.ConvTranspose | nn.GroupNorm | nn.Sequential | Flattened | tuple):
        return jax.vmap(module)(x)
    made = jax.vmap(module)(jnp.moveaxis(x, -1, 1))
    return made if isinstance(model, Flattened) else jnp.moveaxis(made, 1, -1)


def _with_state(module: Any, state: Any) -> Callable[[Any], Any]:
    return lambda x: module(x, jax.tree.map(lambda leaf: leaf, state))[0]


def randomised(model: Any, name: str) -> Any:
    """The model with random numbers in every array; states are running statistics."""
    rng = np.random.default_rng(len(name))

    def one(leaf: Any) -> Any:
        return jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype) if eqx.is_inexact_array(leaf) else leaf

    def statistic(leaf: Any) -> Any:
        return jnp.asarray(1 + rng.random(leaf.shape), leaf.dtype) if eqx.is_inexact_array(leaf) else leaf

    module, state = model if isinstance(model, tuple) else (model, None)
    module = jax.tree.map(one, module)
    return module if state is None else (module, jax.tree.map(statistic, state))


def _build(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    def zeros(leaf: Any) -> Any:
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    # traced and not drawn: a compiled program for every initialiser would cost more than the tests
    return lambda: randomised(jax.tree.map(zeros, eqx.filter_eval_shape(make)), name)


class Mlp(eqx.Module):
    hidden: nn.Linear
    head: nn.Linear

    def __init__(self) -> None:
        self.hidden = nn.Linear(5, 8, key=_KEY)
        self.head = nn.Linear(8, 3, key=_KEY)

    def __call__(self, x: Any) -> Any:
        return self.head(jax.nn.gelu(self.hidden(x), approximate=False))


class Flattened(eqx.Module):
    conv: nn.Conv2d
    dense: nn.Linear

    def __init__(self) -> None:
        self.conv = nn.Conv2d(3, 4, 3, key=_KEY)
        self.dense = nn.Linear(48, 7, key=_KEY)

    def __call__(self, x: Any) -> Any:
        return self.dense(jax.nn.relu(self.conv(x)).ravel())


class Heads(eqx.Module):
    """Features to heads, or heads to features: as one dense layer."""

    dense: nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.dense)(x.reshape(x.shape[0], -1))


class Position(eqx.Module):
    position: Any

    def __call__(self, x: Any) -> Any:
        return x + self.position


class Scalar(eqx.Module):
    factor: Any

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class ClassToken(eqx.Module):
    cls_token: Any

    def __call__(self, x: Any) -> Any:
        return jnp.concatenate([self.cls_token, x])


class TiedHead(eqx.Module):
    tokens: nn.Embedding

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.tokens)(x) @ self.tokens.weight.T


class Recurrent(eqx.Module):
    cell: Any
    reverse: bool = eqx.field(static=True, default=False)

    def __call__(self, x: Any) -> Any:
        zeros = jnp.zeros(self.cell.hidden_size)
        both = isinstance(self.cell, nn.LSTMCell)

        def step(state: Any, row: Any) -> Any:
            state = self.cell(row, state)
            return state, state[0] if both else state

        return jax.lax.scan(step, (zeros, zeros) if both else zeros, x, reverse=self.reverse)[1]


class Stacked(eqx.Module):
    layers: list[Recurrent]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Bidirectional(eqx.Module):
    forward: Recurrent
    backward: Recurrent

    def __call__(self, x: Any) -> Any:
        return jnp.concatenate([self.forward(x), self.backward(x)], -1)


class SelfAttention(eqx.Module):
    attention: nn.MultiheadAttention

    def __call__(self, x: Any) -> Any:
        return self.attention(x, x, x)


def _mixed(query: Any, key: Any, value: Any, size: int) -> Any:
    query, key, value = (part.reshape(part.shape[0], -1, size) for part in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = jnp.repeat(key, repeats, 1), jnp.repeat(value, repeats, 1)
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(size))
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(query.shape[0], -1)


class Packed(eqx.Module):
    qkv: nn.Linear
    proj: nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.proj)(_mixed(*jnp.split(jax.vmap(self.qkv)(x), 3, -1), 3))


class Separate(eqx.Module):
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    size: int = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        parts = (jax.vmap(layer)(x) for layer in (self.query, self.key, self.value))
        return jax.vmap(self.out)(_mixed(*parts, self.size))


class Slopes(eqx.Module):
    prelu: nn.PReLU

    def __call__(self, x: Any) -> Any:
        return self.prelu(x)


def _linear(inputs: int, features: int, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, features, key=_KEY, **options)


def _lstm(inputs: int) -> nn.LSTMCell:
    return nn.LSTMCell(inputs, 5, key=_KEY)


def _separable() -> nn.Sequential:
    depthwise = nn.Conv2d(3, 3, 3, groups=3, use_bias=False, key=_KEY)
    return nn.Sequential([depthwise, nn.Conv2d(3, 5, 1, key=_KEY)])


def _attention(biases: bool) -> SelfAttention:
    names = ("query", "key", "value", "output")
    return SelfAttention(nn.MultiheadAttention(2, 6, key=_KEY, **{f"use_{name}_bias": biases for name in names}))


def _batch_norm() -> Any:
    return nn.make_with_state(nn.BatchNorm)(6, "batch", momentum=0.9, mode="batch")


_MAKE: Mapping[str, Callable[[], Any]] = {
    "dense": lambda: _linear(5, 7),
    "dense_no_bias": lambda: _linear(5, 7, use_bias=False),
    "dense_square": lambda: _linear(6, 6),
    "einsum_dense": lambda: Heads(_linear(6, 8)),
    "einsum_dense_joins": lambda: Heads(_linear(8, 6)),
    "mlp": Mlp,
    "conv1d": lambda: nn.Conv1d(3, 4, 3, padding="SAME", key=_KEY),
    "conv1d_dilated": lambda: nn.Conv1d(3, 4, 3, dilation=2, key=_KEY),
    "conv2d": lambda: nn.Conv2d(3, 4, (3, 2), use_bias=False, key=_KEY),
    "conv2d_square": lambda: nn.Conv2d(3, 3, 3, padding="SAME", key=_KEY),
    "conv2d_explicit": lambda: nn.Conv2d(3, 4, 3, 2, 1, key=_KEY),
    "conv2d_same_strided": lambda: nn.Conv2d(3, 4, 3, 2, "SAME", key=_KEY),
    "conv2d_grouped": lambda: nn.Conv2d(4, 6, 3, groups=2, key=_KEY),
    "conv2d_depthwise": lambda: nn.Conv2d(3, 6, 3, groups=3, key=_KEY),
    "conv2d_separable": _separable,
    "conv3d": lambda: nn.Conv3d(2, 3, (2, 3, 2), key=_KEY),
    "conv_transpose1d": lambda: nn.ConvTranspose1d(3, 4, 3, 2, key=_KEY),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(3, 4, 3, 2, key=_KEY),
    "conv_transpose2d_square": lambda: nn.ConvTranspose2d(3, 3, 3, key=_KEY),
    "conv_transpose3d": lambda: nn.ConvTranspose3d(2, 3, 2, 2, key=_KEY),
    "embedding": lambda: nn.Embedding(11, 6, key=_KEY),
    "position": lambda: Position(jnp.zeros((4, 6))),
    "tied_head": lambda: TiedHead(nn.Embedding(11, 6, key=_KEY)),
    "layer_norm": lambda: nn.LayerNorm(6),
    "layer_norm_no_bias": lambda: nn.LayerNorm(6, use_bias=False),
    "rms_norm": lambda: nn.RMSNorm(6, use_bias=False),
    "group_norm": lambda: nn.GroupNorm(2, 6),
    "instance_norm": lambda: nn.GroupNorm(6, 6),
    "batch_norm": _batch_norm,
    "lstm": lambda: Recurrent(_lstm(3)),
    "lstm_stacked": lambda: Stacked([Recurrent(_lstm(3)), Recurrent(_lstm(5))]),
    "lstm_bidirectional": lambda: Bidirectional(Recurrent(_lstm(3)), Recurrent(_lstm(3), reverse=True)),
    "gru": lambda: Recurrent(nn.GRUCell(3, 5, key=_KEY)),
    "attention": lambda: _attention(True),
    "attention_no_bias": lambda: _attention(False),
    "attention_packed": lambda: Packed(_linear(6, 18), _linear(6, 6)),
    "attention_separate": lambda: Separate(*(_linear(6, 6) for _ in range(4)), 3),
    "attention_grouped": lambda: Separate(*(_linear(8, size, use_bias=False) for size in (8, 4, 4, 8)), 2),
    "prelu": lambda: Slopes(nn.PReLU(jnp.zeros(6))),
    "scalar": lambda: Scalar(jnp.zeros(())),
    "class_token": lambda: ClassToken(jnp.zeros((1, 6))),
    "flatten": Flattened,
}
BUILD: Mapping[str, Callable[[], Any]] = {name: _build(name, make) for name, make in _MAKE.items()}
