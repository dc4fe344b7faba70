"""A convolutional net of the kind of EfficientNet and ConvNeXt: depthwise kernels, squeeze and excitation, a scale per
layer, batch norm in one block and layer norm in the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, CHANNELS, CLASSES = 8, 3, 5


class Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Any) -> Any:
        gates = torch.sigmoid(self.expand(functional.silu(self.reduce(x.mean((2, 3))))))
        return x * gates[:, :, None, None]


class MBConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
        self.norm1 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)
        self.squeeze = Squeeze()
        self.project = nn.Conv2d(WIDTH, WIDTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)

    def forward(self, x: Any) -> Any:
        h = functional.silu(self.norm1(self.depthwise(x)))
        return x + self.norm2(self.project(self.squeeze(h)))


class NeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.down(functional.gelu(self.up(h)))
        return x + (h * self.gamma).permute(0, 3, 1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 2, stride=2)
        self.mbconv, self.next = MBConv(), NeXt()
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, batch: Any) -> Any:
        x = self.next(self.mbconv(self.stem(batch["images"])))
        return self.head(self.norm(x.mean((2, 3))))


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch).float(), batch["labels"].long())
