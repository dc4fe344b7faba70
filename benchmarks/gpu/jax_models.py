"""The workloads of `gpu` for JAX: GPT-2 small and its blocks as functions, and two of `benchmarks.jax.models`.

The transformer is plain JAX, as experts write it for accelerators. Its blocks are one `lax.scan` over stacked weights,
so it compiles as fast with twelve blocks as with one. In a block, `jax.checkpoint` keeps the results of the matrix
products with weights and computes the rest again, attention too, so that scores are not kept. With
`compute=jnp.float32` no cast is left in the traced program: that is what polyamp gets.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.common.workloads import Workload
from benchmarks.gpu import devices
from benchmarks.jax import models

_EPSILON: Final = 1e-5
_SAVED: Final = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


class Model(NamedTuple):
    """A workload's model.

    Attributes:
        subject: what `polyamp.init` takes.
        variables: float32, "params" and, with batch normalisation, "batch_stats".
        apply: `(variables, inputs, dtype) -> (outputs in float32, new statistics)`, the model with handwritten casts.
    """

    subject: Any
    variables: Any
    apply: Any


def model(workload: Workload) -> Model:
    """The model with the same weights every time."""
    if workload.name in ("mlp", "resnet"):
        variables = models.variables(workload)
        return Model((models.model(workload), variables), variables, functools.partial(_apply_linen, workload))
    params = initial(workload)
    plain = functools.partial(forward, workload, compute=jnp.float32)

    def apply(variables: Any, inputs: Any, dtype: Any) -> tuple[Any, Any]:
        return forward(workload, variables["params"], inputs, compute=dtype), {}

    return Model((plain, params), {"params": params}, apply)


def _apply_linen(workload: Workload, variables: Any, inputs: Any, dtype: Any) -> tuple[Any, Any]:
    module = models.model(workload, jnp.dtype(dtype))
    outputs, changed = module.apply(variables, inputs, mutable=["batch_stats"])
    return outputs.astype(jnp.float32), changed.get("batch_stats", {})


def loss_of(outputs: Any, targets: Any) -> Any:
    """Cross-entropy for integers, else the mean squared error."""
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, targets).mean()
    return jnp.mean(jnp.square(outputs - targets))


# --- the transformer


def initial(workload: Workload) -> Any:
    """Its parameters: of the blocks stacked along a new first axis, layer by layer."""
    width, layers = workload.width, workload.layers

    def make(key: Any) -> Any:
        keys = iter(jax.random.split(key, 7))

        def normal(*shape: int) -> Any:
            return 0.02 * jax.random.normal(next(keys), shape)

        def dense(inputs: int, outputs: int) -> Any:
            return {"kernel": normal(layers, inputs, outputs), "bias": jnp.zeros((layers, outputs))}

        def norm(*axes: int) -> Any:
            return {"scale": jnp.ones((*axes, width)), "bias": jnp.zeros((*axes, width))}

        params: dict[str, Any] = {
            "blocks": {
                "norm1": norm(layers),
                "qkv": dense(width, 3 * width),
                "out": dense(width, width),
                "norm2": norm(layers),
                "up": dense(width, 4 * width),
                "down": dense(4 * width, width),
            }
        }
        if workload.vocabulary:
            params |= {
                "tokens": normal(workload.vocabulary, width),
                "positions": normal(workload.length, width),
                "norm": norm(),
                "head": normal(width, workload.vocabulary),
            }
        return params

    params = jax.jit(make)(jax.random.key(0))
    counted = sum(leaf.size for name, leaf in _named(params) if name not in ("tokens", "positions"))
    assert counted == devices.parameters(workload)
    return params


def _named(params: Any) -> list[tuple[str, Any]]:
    return [(path[0].key, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


def forward(workload: Workload, params: Any, inputs: Any, *, compute: Any) -> Any:
    """Outputs in float32: of "block" features like the inputs, of "gpt" logits.

    Matrix products with their biases run in `compute`; norms, softmax, gelu and the residual stream in float32.
    """

    def block(x: Any, weights: Any) -> tuple[Any, None]:
        x = x + _attention(workload.heads, weights, _norm(weights["norm1"], x), compute)
        hidden = _dense(weights["up"], _norm(weights["norm2"], x), compute).astype(jnp.float32)
        return x + _dense(weights["down"], jax.nn.gelu(hidden), compute).astype(jnp.float32), None

    x = inputs
    if workload.vocabulary:
        x = params["tokens"][inputs] + params["positions"]
    x, _ = jax.lax.scan(jax.checkpoint(block, policy=_SAVED, prevent_cse=False), x, params["blocks"])
    if not workload.vocabulary:
        return x
    return (_norm(params["norm"], x).astype(compute) @ params["head"].astype(compute)).astype(jnp.float32)


def _attention(heads: int, weights: Any, x: Any, compute: Any) -> Any:
    batch, length, width = x.shape
    qkv = _dense(weights["qkv"], x, compute).reshape(batch, length, 3, heads, width // heads)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = (jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(jnp.float32).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(compute), value)
    return _dense(weights["out"], mixed.reshape(batch, length, width), compute).astype(jnp.float32)


def _dense(weights: Any, x: Any, compute: Any) -> Any:
    return x.astype(compute) @ weights["kernel"].astype(compute) + weights["bias"].astype(compute)


def _norm(weights: Any, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + _EPSILON) * weights["scale"] + weights["bias"]
