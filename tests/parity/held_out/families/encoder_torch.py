"""An encoder as BERT's: norms behind the sums, a mask of padding, a pooler; dropout behind each part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, WORDS, HIDDEN, LENGTH, CLASSES, BLOCKS, RATE = 16, 2, 29, 32, 6, 5, 2, 0.1


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.kind, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout = nn.Dropout(RATE)

    def forward(self, tokens: Any, kinds: Any) -> Any:
        x = self.word(tokens) + self.kind(kinds) + self.position(torch.arange(tokens.shape[1]))
        return self.dropout(self.norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Any, mask: Any) -> Any:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores + (1.0 - mask[:, None, None, :]) * -1e4
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return self.dense(mixed.transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout1, self.dropout2 = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Any, mask: Any) -> Any:
        x = self.norm1(x + self.dropout1(self.attention(x, mask)))
        return self.norm2(x + self.dropout2(self.down(functional.gelu(self.up(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.layers = Embeddings(), nn.ModuleList([Layer() for _ in range(BLOCKS)])
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: Any) -> Any:
        x = self.embeddings(batch["tokens"], batch["kinds"])
        for layer in self.layers:
            x = layer(x, batch["mask"])
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch).float(), batch["labels"].long(), label_smoothing=0.1)
