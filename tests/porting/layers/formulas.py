"""The textbook formula of each kind of layer, in NumPy over its canonical arrays: what says that the layout is the
right one. Framework-free; every framework's tests compare their layers' outputs with it.

`output(case, layers)` computes a case of `cases.py` in float64, `one(layer, inputs)` a single layer. A layer is
anything with `kind`, `arrays` and `attributes`, such as `polyamp.porting.Layer`; channels are last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from tests.porting.layers.cases import inputs

Array = np.ndarray[Any, Any]


class Described(Protocol):
    """A layer in the canonical layout."""

    @property
    def kind(self) -> str: ...
    @property
    def arrays(self) -> Mapping[str, Any]: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...


class _Cell(NamedTuple):
    """A layer without some of its attributes."""

    kind: str
    arrays: Mapping[str, Any]
    attributes: Mapping[str, Any]


def one(layer: Described, x: Array) -> Array:
    """What a layer makes of its input; tokens go in as integers."""
    arrays = {
        name: np.asarray(array).astype(np.float64) for name, array in layer.arrays.items()
    }  # float64, so that the framework's rounding is the only one
    if np.asarray(x).dtype.kind == "f":
        x = np.asarray(x, np.float64)
    return _activated(_FORMULAS[layer.kind](x, arrays, layer.attributes), layer)


def chain(layers: Iterable[Described], x: Array) -> Array:
    """Layers one after another."""
    for layer in layers:
        x = one(layer, x)
    return x


def output(case: str, layers: Mapping[str, Described]) -> Array:
    """What a case's layers, by path, make of its inputs, whatever order they are listed in."""
    x = inputs(case)
    found = list(layers.values())
    if case in _CASES:
        return _CASES[case](layers, x)
    with_arrays = [layer for layer in found if layer.arrays]
    assert len(with_arrays) == 1, f"{case}: one layer was expected, not {list(layers)}"
    return one(with_arrays[0], x)


# Single layers


def _dense(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    kernel = arrays["kernel"]
    if x.shape[-1] != kernel.shape[0]:  # several axes are summed over
        axes = next(n for n in range(2, x.ndim) if math.prod(x.shape[-n:]) == kernel.shape[0])
        x = x.reshape(*x.shape[:-axes], -1)
    return np.asarray(x @ kernel + arrays.get("bias", 0.0))


def _same(length: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    total = max((-(-length // stride) - 1) * stride + dilation * (kernel - 1) + 1 - length, 0)
    return total // 2, total - total // 2


def _conv(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    kernel = arrays["kernel"]
    spatial, rank = kernel.shape[:-2], kernel.ndim - 2
    strides, dilation = attributes.get("strides") or [1] * rank, attributes.get("dilation") or [1] * rank
    groups, padding = attributes.get("groups", 1), attributes.get("padding", "valid")
    if padding == "same":
        pads = [_same(*row) for row in zip(x.shape[1:-1], spatial, strides, dilation, strict=True)]
    elif padding == "causal":
        pads = [((spatial[0] - 1) * dilation[0], 0)]
    else:
        pads = [(0, 0)] * rank if padding == "valid" else [(before, after) for before, after in padding]
    mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    chosen: Any = mode[attributes.get("padding_mode", "zeros")]
    x = np.pad(x, [(0, 0), *pads, (0, 0)], chosen)
    reach = [d * (k - 1) + 1 for k, d in zip(spatial, dilation, strict=True)]
    sizes = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:-1], reach, strides, strict=True)]
    features = kernel.shape[-1] // groups
    parts = []
    for group, part in enumerate(np.split(x, groups, -1)):
        total = np.zeros((x.shape[0], *sizes, features))
        for place in np.ndindex(*spatial):
            window = tuple(
                slice(p * d, p * d + s * (n - 1) + 1, s)
                for p, d, s, n in zip(place, dilation, strides, sizes, strict=True)
            )
            total += part[(slice(None), *window)] @ kernel[place][:, group * features : (group + 1) * features]
        parts.append(total)
    return np.asarray(np.concatenate(parts, -1) + arrays.get("bias", 0.0))


def _conv_transpose(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    kernel = arrays["kernel"]
    spatial, rank = kernel.shape[:-2], kernel.ndim - 2
    strides, dilation = attributes.get("strides") or [1] * rank, attributes.get("dilation") or [1] * rank
    groups, cut = attributes.get("groups", 1), attributes.get("padding", "valid")
    reach = [d * (k - 1) + 1 for k, d in zip(spatial, dilation, strict=True)]
    sizes = [(n - 1) * s + r for n, s, r in zip(x.shape[1:-1], strides, reach, strict=True)]
    parts = []
    for part, weights in zip(np.split(x, groups, -1), np.split(kernel, groups, -2), strict=True):
        total = np.zeros((x.shape[0], *sizes, kernel.shape[-1]))
        for place in np.ndindex(*spatial):
            window = tuple(
                slice(p * d, p * d + s * (n - 1) + 1, s)
                for p, d, s, n in zip(place, dilation, strides, x.shape[1:-1], strict=True)
            )
            total[(slice(None), *window)] += part @ weights[place]
        parts.append(total)
    whole = np.concatenate(parts, -1)
    for axis, (before, after) in enumerate([(0, 0)] * rank if cut == "valid" else cut, 1):
        added = [(0, 0)] * whole.ndim
        added[axis] = (max(-before, 0), max(-after, 0))
        whole = np.pad(whole, added)
        whole = whole.take(range(max(before, 0), whole.shape[axis] - max(after, 0)), axis)
    return np.asarray(whole + arrays.get("bias", 0.0))


def _embedding(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    return np.asarray(arrays["table"][x] * (attributes.get("scale") or 1.0))


def _normalized(x: Array, axes: tuple[int, ...], arrays: Mapping[str, Array], epsilon: float) -> Array:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    scaled = (x - mean) / np.sqrt(variance + epsilon) * arrays.get("scale", 1.0)
    return np.asarray(scaled + arrays.get("bias", 0.0))


def _layer_norm(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    return _normalized(x, tuple(range(-attributes.get("axes", 1), 0)), arrays, attributes["epsilon"])


def _rms_norm(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    mean = (x * x).mean(-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + attributes["epsilon"]) * arrays.get("scale", 1.0))


def _group_norm(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    channels, groups = x.shape[-1], attributes["groups"]
    apart = x.reshape(*x.shape[:-1], groups, channels // groups)
    axes = (*range(1, x.ndim - 1), x.ndim)
    if "mean" in arrays:
        scaled = (x - arrays["mean"]) / np.sqrt(arrays["variance"] + attributes["epsilon"])
    else:
        scaled = _normalized(apart, axes, {}, attributes["epsilon"]).reshape(x.shape)
    return np.asarray(scaled * arrays.get("scale", 1.0) + arrays.get("bias", 0.0))


def _batch_norm(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    scaled = (x - arrays["mean"]) / np.sqrt(arrays["variance"] + attributes["epsilon"])
    return np.asarray(scaled * arrays.get("scale", 1.0) + arrays.get("bias", 0.0))


def _lstm_step(x: Array, state: list[Array], arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> list[Array]:
    total = x @ arrays["input_kernel"] + state[0] @ arrays["recurrent_kernel"]
    total = total + arrays.get("bias", 0.0) + arrays.get("recurrent_bias", 0.0)
    enter, forget, candidate, leave = np.split(total, 4, -1)
    cell = _sigmoid(forget) * state[1] + _sigmoid(enter) * np.tanh(candidate)
    hidden = _sigmoid(leave) * np.tanh(cell)
    return [hidden @ arrays["projection_kernel"] if "projection_kernel" in arrays else hidden, cell]


def _gru_step(x: Array, state: list[Array], arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> list[Array]:
    """The new state is update * old + (1 - update) * candidate."""
    units = arrays["recurrent_kernel"].shape[0]
    entered = x @ arrays["input_kernel"] + arrays.get("bias", 0.0)
    own = arrays.get("recurrent_bias", np.zeros(3 * units))
    kernel = arrays["recurrent_kernel"]
    gates = _sigmoid(entered[:, : 2 * units] + state[0] @ kernel[:, : 2 * units] + own[: 2 * units])
    reset, update = np.split(gates, 2, -1)
    if attributes["reset"] == "after":
        inner = reset * (state[0] @ kernel[:, 2 * units :] + own[2 * units :])
    else:
        inner = (reset * state[0]) @ kernel[:, 2 * units :] + own[2 * units :]
    return [update * state[0] + (1 - update) * np.tanh(entered[:, 2 * units :] + inner)]


def _rnn_step(x: Array, state: list[Array], arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> list[Array]:
    total = x @ arrays["input_kernel"] + state[0] @ arrays["recurrent_kernel"]
    total = total + arrays.get("bias", 0.0) + arrays.get("recurrent_bias", 0.0)
    return [ACTIVATIONS[attributes.get("activation", "tanh")](total)]


def _recurrent(step: Callable[..., list[Array]]) -> Callable[..., Array]:
    def whole(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
        rows = x.shape[0]
        state = [np.zeros((rows, arrays["recurrent_kernel"].shape[0]))]
        state.append(np.zeros((rows, arrays["recurrent_kernel"].shape[1] // 4)))
        outputs = []
        reverse = bool(attributes.get("reverse", False))
        for time in range(x.shape[1])[:: -1 if reverse else 1]:
            state = step(x[:, time], state, arrays, attributes)
            outputs.append(state[0])
        return np.stack(outputs[:: -1 if reverse else 1], 1)

    return whole


def _attention(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    """Self-attention without a mask; query head i uses key head i // (heads / key heads)."""
    query, key, value = (
        np.einsum("btf,fhd->bthd", x, arrays[f"{name}_kernel"]) + arrays.get(f"{name}_bias", 0.0)
        for name in ("query", "key", "value")
    )
    repeats = query.shape[2] // key.shape[2]
    key, value = key.repeat(repeats, 2), value.repeat(repeats, 2)
    scale = attributes.get("scale") or 1 / math.sqrt(query.shape[-1])
    weights = _softmax(np.einsum("bqhd,bkhd->bhqk", query, key) * scale)
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, value)
    return np.asarray(np.einsum("bqhd,hdf->bqf", mixed, arrays["output_kernel"]) + arrays.get("output_bias", 0.0))


def _prelu(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    return np.where(x > 0, x, x * arrays["slope"])


def _flatten(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    first = attributes["channels"] == "first"
    return (np.moveaxis(x, -1, 1) if first else x).reshape(x.shape[0], -1)


def _unchanged(x: Array, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Array:
    return x


_FORMULAS: Final[Mapping[str, Callable[..., Array]]] = {
    "dense": _dense,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "lstm": _recurrent(_lstm_step),
    "gru": _recurrent(_gru_step),
    "simple_rnn": _recurrent(_rnn_step),
    "attention": _attention,
    "prelu": _prelu,
    "activation": _unchanged,  # `_activated` does it
    "dropout": _unchanged,
    "flatten": _flatten,
}


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sigmoid": _sigmoid,
    "tanh": lambda x: np.asarray(np.tanh(x)),
    "silu": lambda x: x * _sigmoid(x),
    "softmax": _softmax,
}


def _activated(x: Array, layer: Described) -> Array:
    if layer.kind in ("lstm", "gru", "simple_rnn"):
        return x
    return ACTIVATIONS[layer.attributes.get("activation") or "linear"](x)


# Cases of several layers


def _of(layers: Mapping[str, Described], *kinds: str) -> list[Described]:
    return [layer for layer in layers.values() if layer.kind in kinds]


def _plain(layer: Described, x: Array) -> Array:
    """A layer without the activation that may be its attribute or a layer of its own."""
    arrays = {name: np.asarray(array).astype(np.float64) for name, array in layer.arrays.items()}
    return _FORMULAS[layer.kind](np.asarray(x, np.float64), arrays, layer.attributes)


def _mlp(layers: Mapping[str, Described], x: Array) -> Array:
    first, second = sorted(_of(layers, "dense"), key=lambda layer: int(layer.arrays["kernel"].shape[0]))
    return _plain(second, _gelu(_plain(first, x)))


def _separable(layers: Mapping[str, Described], x: Array) -> Array:
    return chain(sorted(_of(layers, "conv"), key=lambda layer: -int(layer.arrays["kernel"].shape[0])), x)


def _value(layers: Mapping[str, Described]) -> Array:
    (layer,) = _of(layers, "parameter", "embedding")
    return np.asarray(layer.arrays["value" if layer.kind == "parameter" else "table"]).astype(np.float64)


def _position(layers: Mapping[str, Described], x: Array) -> Array:
    return x + _value(layers).reshape(x.shape[1:])


def _scalar(layers: Mapping[str, Described], x: Array) -> Array:
    return x * _value(layers).reshape(())


def _class_token(layers: Mapping[str, Described], x: Array) -> Array:
    row = np.broadcast_to(_value(layers).reshape(1, 1, -1), (x.shape[0], 1, x.shape[-1]))
    return np.concatenate([row, x], 1)


def _tied_head(layers: Mapping[str, Described], x: Array) -> Array:
    table = np.asarray(_of(layers, "embedding")[0].arrays["table"]).astype(np.float64)
    return np.asarray(table[x] @ table.T)


def _stacked(layers: Mapping[str, Described], x: Array) -> Array:
    return chain(sorted(_of(layers, "lstm"), key=lambda layer: int(layer.arrays["input_kernel"].shape[0])), x)


def _bidirectional(layers: Mapping[str, Described], x: Array) -> Array:
    """Where a cell does not say which way it reads, its name does."""
    ways = {
        bool(layer.attributes.get("reverse", "back" in path)): layer
        for path, layer in layers.items()
        if layer.kind == "lstm"
    }
    turned = one(_Cell(ways[True].kind, ways[True].arrays, {}), x[:, ::-1])[:, ::-1]
    return np.concatenate([one(ways[False], x), turned], -1)


def _heads(heads: int, key_heads: int) -> Callable[..., Array]:
    """Attention as one layer, or by hand of dense ones: packed, or separate and told apart by their names' first
    letters (q, k, v; the output is the other one)."""

    def whole(layers: Mapping[str, Described], x: Array) -> Array:
        if found := _of(layers, "attention"):
            return one(found[0], x)
        dense = {path: layer for path, layer in layers.items() if layer.kind == "dense"}
        if len(dense) == 2:
            (last,) = (layer for layer in dense.values() if layer.arrays["kernel"].shape == (x.shape[-1],) * 2)
            (packed,) = (layer for layer in dense.values() if layer is not last)
            size = x.shape[-1] // heads
            parts = np.split(_plain(packed, x), [heads * size, (heads + key_heads) * size], -1)
        else:
            by_letter = {path.rpartition("/")[2].lstrip("_")[0]: layer for path, layer in dense.items()}
            parts = [_plain(by_letter.pop(letter), x) for letter in "qkv"]
            (last,) = by_letter.values()
        query, key, value = (
            part.reshape(*x.shape[:-1], number, -1)
            for part, number in zip(parts, (heads, key_heads, key_heads), strict=True)
        )
        key, value = key.repeat(heads // key_heads, 2), value.repeat(heads // key_heads, 2)
        weights = _softmax(np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1]))
        mixed = np.einsum("bhqk,bkhd->bqhd", weights, value)
        return _plain(last, mixed.reshape(*x.shape[:-1], -1))

    return whole


def _flattened(layers: Mapping[str, Described], x: Array) -> Array:
    (conv,), (dense,) = _of(layers, "conv"), _of(layers, "dense")
    found = np.maximum(_plain(conv, x), 0)
    return _plain(dense, _flatten(found, {}, {"channels": conv.attributes["channels"]}))


_CASES: Final[Mapping[str, Callable[[Mapping[str, Described], Array], Array]]] = {
    "mlp": _mlp,
    "conv2d_separable": _separable,
    "position": _position,
    "scalar": _scalar,
    "class_token": _class_token,
    "tied_head": _tied_head,
    "lstm_stacked": _stacked,
    "lstm_bidirectional": _bidirectional,
    "attention": _heads(2, 2),
    "attention_no_bias": _heads(2, 2),
    "attention_packed": _heads(2, 2),
    "attention_separate": _heads(2, 2),
    "attention_grouped": _heads(4, 2),
    "flatten": _flattened,
}
