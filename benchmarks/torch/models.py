"""The four workloads of `workloads` as torch modules, with their batches and losses; `workloads` and
`peers` train them, and `step` the transformer block.

The models stand on the device that `device` names; convolutions lie channels last, which is what oneDNN and cuDNN want.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import workloads
from benchmarks.common.workloads import Workload

Batch = tuple[torch.Tensor, torch.Tensor]


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mlp(workload: Workload) -> nn.Module:
    """Square Linear layers with tanh between them; orthogonal, so that a hundred of them pass gradients on."""
    layers: list[nn.Module] = []
    for _ in range(workload.layers):
        linear = nn.Linear(workload.width, workload.width)
        nn.init.orthogonal_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def block(width: int, heads: int) -> nn.Module:
    """A pre-norm transformer encoder layer without dropout."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class CausalBlock(nn.Module):
    """Pre-norm causal attention and a feed-forward part, as GPT-2 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.feed_forward(self.norm_forward(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, causal blocks, a last norm, a head."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.tokens = nn.Embedding(workload.vocabulary, width)
        self.positions = nn.Parameter(torch.randn(workload.length, width) * 0.02)
        self.blocks = nn.Sequential(*(CausalBlock(width, workload.heads) for _ in range(workload.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, workload.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
        return logits


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        past = [] if same else [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.past = nn.Sequential(*past)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.past(x))


def resnet(workload: Workload) -> nn.Module:
    """A stem, three stages, each but the first twice as wide and half as high as the one before, and a head."""
    width = workload.width
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(3):
        for number in range(workload.layers):
            first = number == 0 and stage > 0
            parts.append(Residual(width // 2 if first else width, width, 2 if first else 1))
        width *= 2
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width // 2, workload.vocabulary))


def build(workload: Workload) -> nn.Module:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    match workload.name:
        case "mlp":
            model = mlp(workload)
        case "block":
            model = block(workload.width, workload.heads)
        case "gpt":
            model = GPT(workload)
        case _:
            model = resnet(workload).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # nn.Module.to has no such overload
    return model.to(device())


def batch(workload: Workload) -> Batch:
    """`workloads.data` as torch wants it: images channels first, classes and tokens int64."""
    inputs, targets = (torch.from_numpy(array) for array in workloads.data(workload))
    if workload.name == "resnet":
        inputs = inputs.permute(0, 3, 1, 2)  # which leaves the memory channels last
    inputs, targets = (each if each.is_floating_point() else each.long() for each in (inputs, targets))
    return inputs.to(device()), targets.to(device())


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy for classes, else the mean squared error; float32."""
    if targets.is_floating_point():
        return functional.mse_loss(outputs.float(), targets)
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def loss_fn(model: Any, pair: Batch) -> torch.Tensor:
    """The loss as a polyamp user writes it."""
    return loss_of(model(pair[0]), pair[1])
