"""The same policy in PyTorch, written for itself: other names, packed attention, channels first."""

from __future__ import annotations

import torch
from arm import CHUNK, JOINTS, PIXELS
from torch import nn

EMBED, HEADS, MLP, DEPTH, PATCH = 32, 4, 64, 2, 4


class Block(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(EMBED, eps=eps)
        self.attn = nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(EMBED, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(EMBED, MLP), nn.GELU(approximate="tanh"), nn.Linear(MLP, EMBED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ActionTransformer(nn.Module):
    """`eps` is torch's default; flax's is 1e-6."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(2, EMBED, kernel_size=PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn((PIXELS // PATCH) ** 2, EMBED))
        self.state_proj = nn.Linear(2, EMBED)
        self.state_embed = nn.Parameter(0.02 * torch.randn(JOINTS, EMBED))
        self.action_queries = nn.Parameter(0.02 * torch.randn(CHUNK, EMBED))
        self.layers = nn.ModuleList(Block(eps) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(EMBED, eps=eps)
        self.action_head = nn.Linear(EMBED, JOINTS)

    def forward(self, image: torch.Tensor, qpos: torch.Tensor) -> torch.Tensor:
        """(n, 2, 16, 16) and (n, 2) -> (n, 8, 2): the next eight actions."""
        x = self.patch_embed(image).flatten(2).transpose(1, 2) + self.pos_embed
        state = self.state_proj(torch.stack([qpos.sin(), qpos.cos()], dim=-1)) + self.state_embed
        queries = self.action_queries.expand(len(image), -1, -1)
        x = torch.cat([x, state, queries], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.action_head(self.norm(x[:, -CHUNK:]))
