"""A description as a flax nnx module, as a linen module with its variables, or as a function with parameters.

Called by the worker.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import polyamp
from polyamp_jax.step.averages import averaged_parameters
from tests.fuzz.grammar import CLAMP, LENGTH, Description, walk
from tests.fuzz.problem import Weights, widths

FLOAT32 = polyamp.Policy("float32")
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "hand_softmax": lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    "log_gate": lambda x: jnp.log(1.0 - jax.nn.sigmoid(x * 3.0) + 1e-3),
    "inner": lambda x: x * jnp.einsum("...d,...d->...", x, x)[..., None] * 0.1,
    "cumsum": lambda x: jnp.cumsum(x, -1) * 0.3,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "hand_rms": lambda x: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3),
    "square": lambda x: jnp.power(x, 2.0) * 0.3,
}


def build(description: Description, weights: Weights) -> Any:
    """The model with these weights, in the form that the description names."""
    kind = form(description)
    policy = description["policy"]
    if policy["name"] == "mixed_float16" and policy.get("mode") == "cast":
        description = _by_hand(description)
    if kind == "nnx":
        return NnxNet(description, weights)
    params: dict[str, dict[str, Any]] = {}
    running: dict[str, dict[str, Any]] = {}
    for path, value in weights.items():
        name, _, array = path.partition("/")
        if array in ("mean", "variance"):
            running.setdefault(name, {})[_FLAX.get(array, array)] = jnp.array(value)
        else:
            params.setdefault(name, {})[array] = jnp.array(value)
    if kind == "function":
        return (lambda params, x: _outputs(description, FunctionParts(description, params), x)), params
    variables: dict[str, Any] = {"params": params}
    if running:
        variables["batch_stats"] = running
    return LinenNet(json.dumps(description)), variables


def _by_hand(description: Description) -> Description:
    """Attention written out: JAX's own asks for a product of float16 that JAX does not have on CPUs."""
    changed = copy.deepcopy(description)
    for layer in walk(changed["layers"]):
        if layer["op"] == "attention":
            layer["native"] = False
    return changed


def form(description: Description) -> str:
    """ "nnx", "linen" or "function", which has no running statistics."""
    kind: str = description["models"]["jax"]
    stateful = any(layer["op"] == "batch_norm" for layer in walk(description["layers"]))
    return "linen" if kind == "function" and stateful else kind


def running(state: Any, description: Description, updates: int) -> Weights:
    """Running statistics by name."""
    found: Weights = {}
    statistics = state.running.statistics
    statistics = statistics.get("batch_stats", statistics) if isinstance(statistics, dict) else {}
    for name, arrays in statistics.items():
        for array, value in arrays.items():
            if array in ("mean", "var"):
                found[f"{name}/{'variance' if array == 'var' else array}"] = np.array(value)
    return found


def parameters(state: Any, description: Description) -> Weights:
    """The parameters by the description's names."""
    return {f"{name}/{array}": np.array(v) for name, arrays in state.params.items() for array, v in arrays.items()}


def averages(state: Any, description: Description) -> Weights:
    """The averages of the parameters, likewise."""
    return parameters(dataclasses.replace(state, params=averaged_parameters(state)), description)


_FLAX = {"variance": "var"}


def _outputs(description: Description, parts: Any, x: Any) -> tuple[Any, ...]:
    h = _through(description["layers"], parts, x)
    return tuple(_head(head, parts, h) for head in description["heads"])


def _through(layers: list[Any], parts: Any, h: Any) -> Any:
    for layer in layers:
        op = layer["op"]
        if op in ACTIVATIONS:
            h = ACTIVATIONS[op](h)
        elif op == "residual":
            h = h + _through(layer["layers"], parts, h)
        elif op == "region":
            inner = layer["layers"]
            h = FLOAT32.autocast(lambda given, inner=inner: _through(inner, parts, given))(h)
        elif op == "tied":
            h = parts(layer["of"], h)
        elif op == "detached":
            h = h + jax.lax.stop_gradient(parts(layer["name"], h))
        elif op == "zeroed":
            h = h + parts(layer["name"], h) * 0.0
        elif op != "unused":
            h = parts(layer["name"], h)
    return h


def _head(head: dict[str, Any], parts: Any, h: Any) -> Any:
    if head["pool"] == "mean":
        h = h.mean(tuple(range(1, h.ndim - 1)))
    elif head["pool"] == "flatten":
        h = h.reshape(h.shape[0], -1)
    elif head["pool"] == "last":
        h = h[:, -1]
    return parts.attend(head["tied"], h) if "tied" in head else parts(head["name"], h)


class FunctionParts:
    """Every layer as plain functions of its arrays."""

    def __init__(self, description: Description, params: Any) -> None:
        self.params = params
        self.layers = {layer["name"]: layer for layer in walk(description["layers"]) if "name" in layer}

    def __call__(self, name: str, h: Any) -> Any:
        with jax.named_scope(name):
            return apply(self.layers.get(name, {"op": "dense"}), self.params[name], h)

    def attend(self, name: str, h: Any) -> Any:
        """Logits over the embedding's rows."""
        return h @ self.params[name]["table"].T


class Part(nnx.Module):
    """One layer's arrays under their names."""

    def __init__(self, layer: dict[str, Any], own: Weights) -> None:
        self.op = json.dumps(layer)
        for name, value in own.items():
            setattr(self, name, nnx.Param(jnp.array(value)))

    def __call__(self, h: Any) -> Any:
        """The layer's output."""
        arrays = {name: getattr(self, name)[...] for name in _ARRAYS if hasattr(self, name)}
        return apply(json.loads(self.op), arrays, h)

    def attend(self, h: Any) -> Any:
        """Logits over the embedding's rows."""
        return h @ self.table[...].T


class Clamped(nnx.Linear):
    """Writes its kernel within bounds before it uses it; the gradient is that of the kernel that was written."""

    def __call__(self, x: Any, **options: Any) -> Any:
        """The product with the kernel that was written."""
        kernel = self.kernel[...]
        self.kernel[...] = kernel + jax.lax.stop_gradient(jnp.clip(kernel, -CLAMP, CLAMP) - kernel)
        return super().__call__(x, **options)


class NnxNet(nnx.Module):
    """Layers by name: flax's own where it has one, `Part` for the rest."""

    def __init__(self, description: Description, weights: Weights) -> None:
        self.description = json.dumps(description)
        given = widths(description)
        for layer in [*walk(description["layers"]), *({"op": "dense", **head} for head in description["heads"])]:
            if "name" in layer and "tied" not in layer:
                own = {k.partition("/")[2]: v for k, v in weights.items() if k.startswith(f"{layer['name']}/")}
                setattr(self, layer["name"], _nnx_layer(layer, own, given[layer["name"]]))

    def __call__(self, x: Any) -> Any:
        """One output per head."""
        return _outputs(json.loads(self.description), NnxParts(self), x)


class NnxParts:
    """The layers of an nnx module by name."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, name: str, h: Any) -> Any:
        return getattr(self.module, name)(h)

    def attend(self, name: str, h: Any) -> Any:
        """Logits over the embedding's rows."""
        return getattr(self.module, name).attend(h)


def _nnx_layer(layer: dict[str, Any], own: Weights, n: int) -> Any:
    op, rngs = layer["op"], nnx.Rngs(0)
    stored = next(iter(own.values())).dtype
    made: Any
    if op in ("dense", "unused", "detached", "zeroed"):
        kind = Clamped if layer.get("clamp") else nnx.Linear
        made = kind(n, layer["width"], use_bias="bias" in own, param_dtype=stored, rngs=rngs)
    elif op == "conv":
        made = nnx.Conv(n, layer["width"], (3, 3), use_bias="bias" in own, param_dtype=stored, rngs=rngs)
    elif op == "layer_norm":
        made = nnx.LayerNorm(n, epsilon=1e-5, use_fast_variance=False, param_dtype=stored, rngs=rngs)
    elif op == "batch_norm":
        made = nnx.BatchNorm(n, momentum=0.9, epsilon=1e-5, use_fast_variance=False, param_dtype=stored, rngs=rngs)
    elif op == "group_norm":
        made = nnx.GroupNorm(n, num_groups=2, epsilon=1e-5, use_fast_variance=False, param_dtype=stored, rngs=rngs)
    elif op == "rms_norm":
        made = nnx.RMSNorm(n, epsilon=1e-5, param_dtype=stored, rngs=rngs)
    else:
        return Part(layer, own)
    for name, value in own.items():
        if name not in ("mean", "variance"):
            getattr(made, name)[...] = jnp.array(value)
    return made


class LinenNet(linen.Module):
    """flax's own layers where it has one, `LinenPart` for the rest."""

    description: str

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """One output per head."""
        description = json.loads(self.description)
        return _outputs(description, LinenParts(description), x)


class LinenParts:
    """The layers of a linen module by name, each made once; inside `compact`, linen gives them their scopes."""

    def __init__(self, description: Description) -> None:
        self.layers = {layer["name"]: layer for layer in walk(description["layers"]) if "name" in layer}
        self.heads = {head["name"]: {"op": "dense", **head} for head in description["heads"]}
        self.made: dict[str, Any] = {}

    def _get(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = _linen_layer(self.layers.get(name) or self.heads[name], name)
        return self.made[name]

    def __call__(self, name: str, h: Any) -> Any:
        return self._get(name)(h)

    def attend(self, name: str, h: Any) -> Any:
        """Logits over the embedding's rows."""
        return self._get(name).attend(h)


def _linen_layer(layer: dict[str, Any], name: str) -> Any:
    op, bias = layer["op"], layer.get("bias", True)
    if op in ("dense", "unused", "detached", "zeroed"):
        return linen.Dense(layer["width"], use_bias=bias, name=name)
    if op == "conv":
        return linen.Conv(layer["width"], (3, 3), use_bias=bias, name=name)
    if op == "layer_norm":
        return linen.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)
    if op == "batch_norm":
        return linen.BatchNorm(False, momentum=0.9, epsilon=1e-5, use_fast_variance=False, name=name)
    if op == "group_norm":
        return linen.GroupNorm(2, epsilon=1e-5, use_fast_variance=False, name=name)
    if op == "rms_norm":
        return linen.RMSNorm(epsilon=1e-5, name=name)
    return LinenPart(json.dumps(layer), name=name)


class LinenPart(linen.Module):
    """One layer's arrays under their names; given ones, never initialised."""

    layer: str

    def __call__(self, h: Any) -> Any:
        """The layer's output."""
        return apply(json.loads(self.layer), self.variables["params"], h)

    def attend(self, h: Any) -> Any:
        """Logits over the embedding's rows."""
        return h @ self.variables["params"]["table"].T


_ARRAYS = ("kernel", "bias", "scale", "table", "query", "key", "value", "out", "input", "recurrent")


def apply(layer: dict[str, Any], own: Any, x: Any) -> Any:
    """One layer written in JAX, for functions and for what flax has no layer of this form for."""
    op = layer["op"]
    if op == "conv":
        x = jax.lax.conv_general_dilated(x, own["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x + own["bias"] if "bias" in own else x
    if op == "embedding":
        return own["table"][x]
    if op == "positions":
        return x + own["table"]
    if op == "scale":
        return x * own["scale"]
    if op in ("rms_norm", "layer_norm", "group_norm"):
        return _normalized(op, own, x.astype(jnp.float32)).astype(x.dtype)
    if op == "attention":
        return _attention(layer, own, x)
    if op == "rnn":

        def cell(h: Any, step: Any) -> tuple[Any, Any]:
            h = jnp.tanh(step @ own["input"] + h @ own["recurrent"] + own["bias"]).astype(h.dtype)
            return h, h

        start = jnp.zeros((x.shape[0], own["bias"].shape[0]), x.dtype)
        return jax.lax.scan(cell, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)
    if op == "gru":

        def gate(h: Any, step: Any) -> tuple[Any, Any]:
            ri, zi, ni = jnp.split(step @ own["input"], 3, -1)
            rh, zh, nh = jnp.split(h @ own["recurrent"], 3, -1)
            z = jax.nn.sigmoid(zi + zh)
            n = jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh)
            h = ((1 - z) * n + z * h).astype(h.dtype)
            return h, h

        start = jnp.zeros((x.shape[0], own["recurrent"].shape[0]), x.dtype)
        return jax.lax.scan(gate, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)
    x = x @ own["kernel"]
    return x + own["bias"] if "bias" in own else x


def _normalized(op: str, own: Any, x: Any) -> Any:
    """A normalisation of float32, as flax's compute theirs whatever the dtype of the input."""
    if op == "rms_norm":
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * own["scale"]
    if op == "layer_norm":
        return jax.nn.standardize(x, epsilon=1e-5) * own["scale"] + own["bias"]
    grouped = x.reshape(*x.shape[:-1], 2, -1)
    return jax.nn.standardize(grouped, (1, 2, 4), epsilon=1e-5).reshape(x.shape) * own["scale"] + own["bias"]


def _attention(layer: dict[str, Any], own: Any, x: Any) -> Any:
    q, k, v = ((x @ own[part]).reshape(*x.shape[:-1], layer["heads"], -1) for part in ("query", "key", "value"))
    if layer["native"]:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=layer["causal"])
    else:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        if layer["causal"]:
            scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e4)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(x.shape) @ own["out"]
