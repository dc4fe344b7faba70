"""A recommender as DLRM: a table for each category, products of all pairs, a logit for a click."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

DENSE, WIDTH, TABLES = 6, 8, (11, 17, 5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, WIDTH) for size in TABLES])
        self.bottom1, self.bottom2 = nn.Linear(DENSE, 16), nn.Linear(16, WIDTH)
        self.top1, self.top2, self.top3 = nn.Linear(WIDTH + 6, 16), nn.Linear(16, 12), nn.Linear(12, 1)

    def forward(self, batch: Any) -> Any:
        dense = torch.log1p(batch["dense"])
        x = functional.relu(self.bottom2(functional.relu(self.bottom1(dense))))
        parts = [x, *(table(batch["categories"][:, number]) for number, table in enumerate(self.tables))]
        stacked = torch.stack(parts, 1)
        products = stacked @ stacked.mT
        rows, columns = torch.tril_indices(4, 4, -1)
        y = torch.cat([x, products[:, rows, columns].to(x.dtype)], 1)
        y = functional.relu(self.top1(y))
        y = functional.relu(self.top2(y))
        return self.top3(y)[:, 0]


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.binary_cross_entropy_with_logits(model(batch).float(), batch["clicked"])
