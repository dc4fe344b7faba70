"""The four workloads of `workloads` as flax linen modules. `workloads` and `peers` train them.

With the default dtype they are ordinary float32 code, without a cast in the traced program: that is what polyamp gets.
Given a 16-bit dtype they are what a flax expert writes for mixed precision: parameters float32, matrix products,
convolutions and their biases in 16 bits, normalisation, softmax, gelu and the residual stream in float32. These are
the dtypes of `torch.autocast` on CUDA, and of polyamp's mode "autocast".
"""

# flax has no types for mypy: its base class is Any and its decorators are untyped.
# mypy: disable-error-code="misc, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import workloads
from benchmarks.common.workloads import Workload

STAGES: Final = 3


class Mlp(nn.Module):
    """Dense layers with tanh between them; (batch, width) to the same shape."""

    sizes: Workload
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(self.sizes.layers):
            x = nn.Dense(self.sizes.width, dtype=self.dtype)(x if number == 0 else jnp.tanh(x))
        return x


class Attention(nn.Module):
    """Self-attention; (batch, length, width) to the same shape."""

    sizes: Workload
    causal: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        heads = self.sizes.heads
        qkv = nn.Dense(3 * width, dtype=self.dtype)(x).reshape(batch, length, 3, heads, width // heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = (jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5).astype(jnp.float32)
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.finfo(jnp.float32).min)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores).astype(self.dtype), value)
        return nn.Dense(width, dtype=self.dtype)(mixed.reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm layer: attention and a gelu MLP, each added to the residual stream."""

    sizes: Workload
    causal: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = self.sizes.width
        x = x + Attention(self.sizes, self.causal, self.dtype)(nn.LayerNorm(dtype=jnp.float32)(x))
        hidden = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=jnp.float32)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(hidden.astype(jnp.float32)))


class Gpt(nn.Module):
    """Integer tokens (batch, length) to logits (batch, length, vocabulary)."""

    sizes: Workload
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        sizes = self.sizes
        positions = self.param("positions", nn.initializers.normal(0.02), (sizes.length, sizes.width))
        x = nn.Embed(sizes.vocabulary, sizes.width)(tokens) + positions
        for _ in range(sizes.layers):
            x = Block(sizes, causal=True, dtype=self.dtype)(x)
        return nn.Dense(sizes.vocabulary, dtype=self.dtype)(nn.LayerNorm(dtype=jnp.float32)(x))


class Residual(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a sum around them; channels last."""

    width: int
    stride: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.relu(_norm(nn.Conv(self.width, (3, 3), strides, use_bias=False, dtype=self.dtype)(x)))
        y = _norm(nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(y))
        if x.shape[-1] != self.width:
            x = _norm(nn.Conv(self.width, (1, 1), strides, use_bias=False, dtype=self.dtype)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images (batch, height, width, 3) to logits (batch, classes); the width doubles and the sides halve by stage."""

    sizes: Workload
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        sizes = self.sizes
        x = nn.relu(_norm(nn.Conv(sizes.width, (3, 3), use_bias=False, dtype=self.dtype)(images)))
        for stage in range(STAGES):
            for number in range(sizes.layers):
                x = Residual(sizes.width * 2**stage, 2 if stage and number == 0 else 1, self.dtype)(x)
        return nn.Dense(sizes.vocabulary, dtype=self.dtype)(x.mean((1, 2)))


def _norm(x: jax.Array) -> jax.Array:
    """Batch normalisation by the statistics of the batch, which also move the running ones."""
    return nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=jnp.float32)(x)


_MODELS: Final[dict[str, Any]] = {"mlp": Mlp, "block": Block, "gpt": Gpt, "resnet": ResNet}


def model(workload: Workload, dtype: Any = jnp.float32) -> Any:
    """The module of a workload, which computes in `dtype` where 16 bits are enough."""
    return _MODELS[workload.name](workload, dtype=dtype)


def variables(workload: Workload) -> Any:
    """The float32 variables that every variant of it starts from, drawn by NumPy: compiling flax's `init` takes longer
    than training does here."""
    inputs, _ = workloads.data(workload)
    shapes = jax.eval_shape(model(workload).init, jax.random.key(0), inputs)
    rng = np.random.default_rng(0)

    def leaf(path: Any, shape: Any) -> jax.Array:
        kind = path[-1].key
        if kind in ("bias", "mean", "scale", "var"):
            return jnp.full(shape.shape, float(kind in ("scale", "var")), jnp.float32)
        spread = math.prod(shape.shape[:-1]) ** -0.5 if kind == "kernel" else 0.02
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) * np.float32(spread))

    return jax.tree_util.tree_map_with_path(leaf, shapes)
