"""A U-Net of a diffusion model: group norms, SiLU, an embedding of the time, nearest neighbours on the way up."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, CHANNELS, GROUPS = 8, 3, 4


def time_embedding(times: Any) -> Any:
    rates = torch.exp(-torch.arange(WIDTH // 2, dtype=torch.float32) * (9.210340371976184 / (WIDTH // 2)))
    angles = times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inputs, eps=1e-6), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(WIDTH, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, outputs, eps=1e-6), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Any, t: Any) -> Any:
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(t))[:, :, None, None]
        h = self.conv2(functional.silu(self.norm2(h)))
        return self.shortcut(x) + h


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time1, self.time2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.down = Block(WIDTH, WIDTH)
        self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.middle = Block(WIDTH, 2 * WIDTH)
        self.larger = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.up = Block(2 * WIDTH, WIDTH)
        self.norm = nn.GroupNorm(GROUPS, WIDTH, eps=1e-6)
        self.out = nn.Conv2d(WIDTH, CHANNELS, 3, padding=1)

    def forward(self, batch: Any) -> Any:
        t = self.time2(functional.silu(self.time1(time_embedding(batch["times"]))))
        x = self.stem(batch["images"])
        skip = self.down(x, t)
        x = self.middle(self.smaller(skip), t)
        x = self.larger(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up(torch.cat([x, skip], 1), t)
        return self.out(functional.silu(self.norm(x)))


def loss_fn(model: Any, batch: Any) -> Any:
    return (model(batch).float() - batch["noise"]).square().mean()
