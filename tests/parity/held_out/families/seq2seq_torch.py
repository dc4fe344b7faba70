"""An encoder and a decoder as T5's: relative position biases, no scale in the attention, tied embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, SIZE, WORDS, HIDDEN, DISTANCES = 16, 2, 8, 19, 32, 5


class T5Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Any, memory: Any, bias: Any) -> Any:
        q = self.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k = self.k(memory).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        v = self.v(memory).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        scores = q @ k.mT
        if bias is not None:
            scores = scores + bias
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -1e4).triu(1)
        weights = functional.softmax(scores.float(), -1).type_as(v)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.wo(functional.gelu(self.wi(x), approximate="tanh"))


class Side(nn.Module):
    def __init__(self, decodes: bool) -> None:
        super().__init__()
        self.relative = nn.Embedding(2 * DISTANCES + 1, HEADS)
        self.norm1, self.attention = T5Norm(), Attention(decodes)
        if decodes:
            self.norm2, self.cross = T5Norm(), Attention(False)
        self.norm3, self.mlp, self.last_norm = T5Norm(), FeedForward(), T5Norm()

    def forward(self, x: Any, memory: Any = None) -> Any:
        places = torch.arange(x.shape[1])
        apart = (places[None, :] - places[:, None]).clamp(-DISTANCES, DISTANCES) + DISTANCES
        bias = self.relative(apart).permute(2, 0, 1)
        y = self.norm1(x)
        x = x + self.attention(y, y, bias)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory, None)
        x = x + self.mlp(self.norm3(x))
        return self.last_norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = Side(False), Side(True)

    def forward(self, batch: Any) -> Any:
        memory = self.encoder(self.shared(batch["source"]))
        out = self.decoder(self.shared(batch["target"]), memory)
        return functional.linear(out * WIDTH**-0.5, self.shared.weight)


def loss_fn(model: Any, batch: Any) -> Any:
    logits, labels = model(batch).float(), batch["labels"].long()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
