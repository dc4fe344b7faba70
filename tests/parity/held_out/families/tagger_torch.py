"""A tagger over a recurrent layer of either direction, its GRU cells written out over linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, UNITS, WORDS, TAGS = 12, 8, 31, 7


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.gates = nn.Linear(WIDTH, 3 * UNITS), nn.Linear(UNITS, 2 * UNITS, bias=False)
        self.candidate = nn.Linear(UNITS, UNITS)

    def forward(self, x: Any, h: Any) -> Any:
        r_in, z_in, n_in = self.inputs(x).chunk(3, -1)
        r_h, z_h = self.gates(h).chunk(2, -1)
        r, z = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
        n = torch.tanh(n_in + r * self.candidate(h))
        return (1.0 - z) * n + z * h


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.forwards, self.backwards = nn.Embedding(WORDS, WIDTH), Cell(), Cell()
        self.norm, self.head = nn.LayerNorm(2 * UNITS, eps=1e-5), nn.Linear(2 * UNITS, TAGS)

    def forward(self, batch: Any) -> Any:
        x = self.embed(batch["tokens"])
        length = x.shape[1]
        ahead, behind = [], []
        h = x.new_zeros(len(x), UNITS)
        for place in range(length):
            h = self.forwards(x[:, place], h)
            ahead.append(h)
        h = x.new_zeros(len(x), UNITS)
        for place in reversed(range(length)):
            h = self.backwards(x[:, place], h)
            behind.insert(0, h)
        states = torch.cat([torch.stack(ahead, 1), torch.stack(behind, 1)], -1)
        return self.head(self.norm(states))


def loss_fn(model: Any, batch: Any) -> Any:
    logits, tags = model(batch).float(), batch["tags"].long()
    losses = functional.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    counted = (tags > 0).float()
    return (losses * counted).sum() / counted.sum()
