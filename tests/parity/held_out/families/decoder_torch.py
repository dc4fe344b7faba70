"""A decoder as LLaMA's: RMSNorm, rotary positions, fewer key heads than query heads, SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, SIZE, WORDS, HIDDEN, BLOCKS = 16, 4, 4, 23, 24, 2


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def rotate(x: Any) -> Any:
    """Rotary positions of [batch, heads, length, size], halves as in LLaMA."""
    positions = torch.arange(x.shape[-2], dtype=torch.float32)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)
    angles = torch.cat([angles, angles], -1)
    one, two = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-two, one], -1) * angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = (each(x).reshape(rows, length, -1, SIZE).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = rotate(q), rotate(k)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(2, 3) / SIZE**0.5
        mask = torch.ones(length, length).tril() > 0
        scores = scores.masked_fill(~mask, -1e4)
        weights = scores.softmax(-1).to(v.dtype)
        return self.o((weights @ v).transpose(1, 2).reshape(rows, length, WIDTH))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = RMSNorm(), Attention(), RMSNorm(), MLP()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, batch: Any) -> Any:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = model(batch)[:, :-1].float()
    labels = batch["tokens"][:, 1:].long()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
