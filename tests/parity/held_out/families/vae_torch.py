"""A variational autoencoder; the noise of its code comes with the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

PIXELS, HIDDEN, CODE = 20, 16, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = nn.Linear(PIXELS, HIDDEN), nn.LayerNorm(HIDDEN, eps=1e-5)
        self.mean, self.log_variance = nn.Linear(HIDDEN, CODE), nn.Linear(HIDDEN, CODE)
        self.decoder1, self.decoder2 = nn.Linear(CODE, HIDDEN), nn.Linear(HIDDEN, PIXELS)

    def forward(self, batch: Any) -> Any:
        h = torch.tanh(self.norm(self.encoder(batch["x"])))
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + torch.exp(0.5 * log_variance) * batch["noise"]
        return self.decoder2(functional.elu(self.decoder1(code))), mean, log_variance


def loss_fn(model: Any, batch: Any) -> Any:
    logits, mean, log_variance = (each.float() for each in model(batch))
    bits = functional.binary_cross_entropy_with_logits(logits, batch["x"], reduction="none").sum(-1).mean()
    divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
    return bits + divergence
