"""Sizes of the zoo's language models, and the pieces that several of its models in flax share."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import torch
from flax import linen

from tests.porting.public.zoo.case import VOCABULARY, Batch

WIDTH: Final = 32
HEADS: Final = 4
HIDDEN: Final = 48
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
}  # fmt: skip


def shapes(module: Any, batch: Batch) -> Any:
    """The module with its variables' shapes."""
    return module, jax.eval_shape(module.init, jax.random.key(0), *batch)


class Only(torch.nn.Module):
    """Mixed into a model of transformers: its forward pass takes positional inputs, and returns one field."""

    FIELD = "logits"
    INPUTS: tuple[str, ...] = ("input_ids",)

    def forward(self, *inputs: Any) -> Any:
        options = {} if self.INPUTS == ("pixel_values",) else {"use_cache": False}
        output = super().forward(**dict(zip(self.INPUTS, inputs, strict=True)), **options)
        return getattr(output, self.FIELD)


def heads_of(x: Any, heads: int = HEADS) -> Any:
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(q: Any, k: Any, v: Any, scale: float | None = None, bias: Any = 0.0, causal: bool = False) -> Any:
    """Attention over (batch, length, heads, size), with fewer heads of keys and values if there are fewer."""
    k, v = (each.repeat(q.shape[2] // each.shape[2], 2) for each in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def rotate(x: Any) -> Any:
    """Rotary positions of halves; (batch, length, heads, size)."""
    size = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(0, size, 2) / size)
    sine, cosine = (jnp.concatenate([each, each], -1)[:, None] for each in (jnp.sin(angles), jnp.cos(angles)))
    left, right = jnp.split(x, 2, -1)
    return x * cosine + jnp.concatenate([-right, left], -1) * sine


class Named(linen.Module):
    """A list of layers under a name of its own: `layer/0`, `layer/1`."""

    kind: Any
    count: int = 2

    @linen.compact
    def __call__(self, x: Any, *rest: Any) -> Any:
        for number in range(self.count):
            x = self.kind(name=str(number))(x, *rest)
        return x


class DenseGeneral(linen.Module):
    """T5X's and MaxText's dense layer: a kernel over any axes."""

    features: tuple[int, ...]
    axes: int = 1

    @linen.compact
    def __call__(self, x: Any) -> Any:
        shape = (*x.shape[x.ndim - self.axes :], *self.features)
        kernel = self.param("kernel", linen.initializers.normal(0.2), shape)
        return jnp.tensordot(x, kernel, self.axes)


class RMSNorm(linen.Module):
    epsilon: float = 1e-6

    @linen.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", linen.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon) * scale
