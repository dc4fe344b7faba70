"""Counterparts of transformers' models in flax linen, written as flax's own examples write theirs.

A ResNet after flax's ImageNet example, a Vision Transformer after google-research/vision_transformer, a GPT-2. Used by
the blocks of docs/guides/moving_public_models.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class BottleneckResNetBlock(nn.Module):
    """Three convolutions; the one of 3x3 has the strides, as in ResNet v1.5."""

    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        residual = x
        y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides, padding=((1, 1), (1, 1)))(y)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(self.filters * 4, (1, 1))(y))
        if residual.shape != y.shape:
            residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    """`stage_sizes=[3, 4, 6, 3]` and `num_filters=64` are ResNet-50."""

    stage_sizes: Sequence[int]
    num_filters: int
    num_classes: int

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, size in enumerate(self.stage_sizes):
            for block in range(size):
                strides = (2, 2) if stage > 0 and block == 0 else (1, 1)
                x = BottleneckResNetBlock(self.num_filters * 2**stage, conv, norm, strides)(x)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class Encoder1DBlock(nn.Module):
    """A pre-norm block of a Vision Transformer."""

    mlp_dim: int
    num_heads: int
    epsilon: float

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        x = nn.LayerNorm(self.epsilon)(inputs)
        x = nn.MultiHeadDotProductAttention(num_heads=self.num_heads)(x, x) + inputs
        y = nn.gelu(nn.Dense(self.mlp_dim)(nn.LayerNorm(self.epsilon)(x)), approximate=False)
        return x + nn.Dense(x.shape[-1])(y)


class VisionTransformer(nn.Module):
    """With a class token."""

    num_classes: int
    patches: int
    hidden_size: int
    layers: int
    mlp_dim: int
    num_heads: int
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Any) -> Any:
        window = (self.patches, self.patches)
        x = nn.Conv(self.hidden_size, window, strides=window, padding="VALID", name="embedding")(x)
        x = x.reshape(x.shape[0], -1, self.hidden_size)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.hidden_size))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for number in range(self.layers):
            x = Encoder1DBlock(self.mlp_dim, self.num_heads, self.epsilon, name=f"encoderblock_{number}")(x)
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm(self.epsilon, name="encoder_norm")(x)[:, 0])


class GPT2Block(nn.Module):
    """A pre-norm block with masked attention."""

    num_heads: int

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        y = nn.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.num_heads, name="attn")(y, y, mask=mask)
        y = nn.LayerNorm(epsilon=1e-5, name="ln_2")(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], name="fc")(y), approximate=True)
        return x + nn.Dense(x.shape[-1], name="proj")(y)


class GPT2(nn.Module):
    """With a tied head."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int

    @nn.compact
    def __call__(self, input_ids: Any) -> Any:
        wte = nn.Embed(self.vocab_size, self.n_embd, name="wte")
        x = wte(input_ids) + nn.Embed(self.n_positions, self.n_embd, name="wpe")(jnp.arange(input_ids.shape[1]))
        mask = nn.make_causal_mask(input_ids)
        for number in range(self.n_layer):
            x = GPT2Block(self.n_head, name=f"h_{number}")(x, mask)
        return wte.attend(nn.LayerNorm(epsilon=1e-5, name="ln_f")(x))
