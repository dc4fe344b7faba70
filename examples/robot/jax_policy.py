"""The policy in flax nnx: an action-chunking transformer, as it was trained first."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from arm import CHUNK, JOINTS, PIXELS
from flax import nnx
from jax.nn import initializers

WIDTH, HEADS, HIDDEN, BLOCKS, PATCH = 32, 4, 64, 2, 4
small = initializers.normal(0.02)


class EncoderBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.pre_attention = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.pre_mlp = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        tokens = tokens + self.attention(self.pre_attention(tokens))
        return tokens + self.down(nnx.gelu(self.up(self.pre_mlp(tokens))))


class ChunkPolicy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        patches, size = (PIXELS // PATCH) ** 2, (PATCH, PATCH)
        self.patchify = nnx.Conv(2, WIDTH, size, strides=size, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(small(rngs.params(), (patches, WIDTH)))
        self.proprioception = nnx.Linear(2, WIDTH, rngs=rngs)
        self.joint_tokens = nnx.Param(small(rngs.params(), (JOINTS, WIDTH)))
        self.queries = nnx.Param(small(rngs.params(), (CHUNK, WIDTH)))
        self.blocks = nnx.List([EncoderBlock(rngs) for _ in range(BLOCKS)])
        self.final_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.to_actions = nnx.Linear(WIDTH, JOINTS, rngs=rngs)

    def __call__(self, image: Any, joints: Any) -> Any:
        """(n, 16, 16, 2) and (n, 2) -> (n, 8, 2): the next eight actions."""
        patches = self.patchify(image)
        patches = patches.reshape(len(image), -1, WIDTH) + self.positions[...]
        angles = jnp.stack([jnp.sin(joints), jnp.cos(joints)], axis=-1)
        body = self.proprioception(angles) + self.joint_tokens[...]
        queries = jnp.broadcast_to(self.queries[...], (len(image), CHUNK, WIDTH))
        tokens = jnp.concatenate([patches, body, queries], axis=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.to_actions(self.final_norm(tokens[:, -CHUNK:]))
