"""The cases of `cases.py` in torch: `BUILD`, `MISSING` and `run`, as that file says. Images go in channels first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Array = np.ndarray[Any, Any]

_IMAGES: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.InstanceNorm2d, nn.BatchNorm2d, nn.PReLU),
)
"""Modules before whose axes the channels come."""


class JoinedDense(nn.Module):
    """A dense layer over two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x.flatten(-2))


class Position(nn.Module):
    """A learned table that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, 4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position


class TiedHead(nn.Module):
    """An embedding whose table is the output's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


class Scalar(nn.Module):
    """A learned factor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ClassToken(nn.Module):
    """A learned row before the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, key_heads: int) -> torch.Tensor:
    """Attention over rows whose features are heads side by side."""

    def apart(x: torch.Tensor, number: int) -> torch.Tensor:
        return x.unflatten(-1, (number, -1)).transpose(1, 2).repeat_interleave(heads // number, 1)

    mixed = functional.scaled_dot_product_attention(apart(query, heads), apart(key, key_heads), apart(value, key_heads))
    return mixed.transpose(1, 2).flatten(-2)


class PackedAttention(nn.Module):
    """Attention by hand: one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.out = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_attended(*self.qkv(x).chunk(3, -1), 2, 2))


class SeparateAttention(nn.Module):
    """Attention by hand: three projections; fewer heads for keys and values than for queries if so said."""

    def __init__(self, features: int, heads: int, key_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        narrow = features // heads * key_heads
        self.q_proj = nn.Linear(features, features, bias=bias)
        self.k_proj = nn.Linear(features, narrow, bias=bias)
        self.v_proj = nn.Linear(features, narrow, bias=bias)
        self.o_proj = nn.Linear(features, features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(_attended(*projected, self.heads, self.key_heads))


def _layers() -> dict[str, Callable[[], nn.Module]]:
    return {
        "dense": lambda: nn.Linear(5, 7),
        "dense_no_bias": lambda: nn.Linear(5, 7, bias=False),
        "dense_square": lambda: nn.Linear(6, 6),
        "einsum_dense": lambda: nn.Linear(6, 8),
        "einsum_dense_joins": JoinedDense,
        "mlp": lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)),
        "conv1d": lambda: nn.Conv1d(3, 4, 3, padding="same"),
        "conv1d_dilated": lambda: nn.Conv1d(3, 4, 3, dilation=2),
        "conv2d": lambda: nn.Conv2d(3, 4, (3, 2), bias=False),
        "conv2d_square": lambda: nn.Conv2d(3, 3, 3, padding=1),
        "conv2d_explicit": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
        "conv2d_same_strided": lambda: nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, stride=2)),
        "conv2d_grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
        "conv2d_depthwise": lambda: nn.Conv2d(3, 6, 3, groups=3),
        "conv2d_separable": lambda: nn.Sequential(nn.Conv2d(3, 3, 3, groups=3, bias=False), nn.Conv2d(3, 5, 1)),
        "conv3d": lambda: nn.Conv3d(2, 3, (2, 3, 2)),
        "conv_transpose1d": lambda: nn.ConvTranspose1d(3, 4, 3, stride=2),
        "conv_transpose2d": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
        "conv_transpose2d_square": lambda: nn.ConvTranspose2d(3, 3, 3),
        "conv_transpose3d": lambda: nn.ConvTranspose3d(2, 3, 2, stride=2),
        "embedding": lambda: nn.Embedding(11, 6),
        "position": Position,
        "tied_head": TiedHead,
        "layer_norm": lambda: nn.LayerNorm(6),
        "layer_norm_no_bias": lambda: nn.LayerNorm(6, bias=False),
        "rms_norm": lambda: nn.RMSNorm(6, eps=1e-5),
        "group_norm": lambda: nn.GroupNorm(2, 6),
        "instance_norm": lambda: nn.InstanceNorm2d(6, affine=True),
        "batch_norm": lambda: nn.BatchNorm2d(6),
        "lstm": lambda: nn.LSTM(3, 5, batch_first=True),
        "lstm_stacked": lambda: nn.LSTM(3, 5, num_layers=2, batch_first=True),
        "lstm_bidirectional": lambda: nn.LSTM(3, 5, batch_first=True, bidirectional=True),
        "gru": lambda: nn.GRU(3, 5, batch_first=True),
        "simple_rnn": lambda: nn.RNN(3, 5, batch_first=True),
        "attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
        "attention_no_bias": lambda: nn.MultiheadAttention(6, 2, bias=False, batch_first=True),
        "attention_packed": PackedAttention,
        "attention_separate": lambda: SeparateAttention(6, 2, 2, bias=True),
        "attention_grouped": lambda: SeparateAttention(8, 4, 2, bias=False),
        "prelu": lambda: nn.PReLU(6),
        "scalar": Scalar,
        "class_token": ClassToken,
        "flatten": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 7)),
    }


def _with_random_weights(make: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = make().eval()
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    values = torch.randn(tensor.shape, generator=drawn)
                    tensor.copy_(values.abs() + 0.5 if name.endswith("running_var") else values)
        return model

    return build


BUILD: Final[Mapping[str, Callable[[], nn.Module]]] = {
    name: _with_random_weights(make, seed) for seed, (name, make) in enumerate(_layers().items())
}
MISSING: Final[Mapping[str, str]] = {"gru_before": "torch's GRU is reset after the product alone"}


def run(model: nn.Module, inputs: Array) -> Array:
    """The output of a case's model, channels last."""
    first = model[0] if isinstance(model, nn.Sequential) else model
    moved = isinstance(first, (*_IMAGES, nn.ConstantPad1d, nn.ConstantPad2d))
    x = torch.from_numpy(np.moveaxis(inputs, -1, 1).copy() if moved else inputs)
    with torch.no_grad():
        output = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
    values: Array = (output if isinstance(output, torch.Tensor) else output[0]).numpy()
    return np.moveaxis(values, 1, -1) if moved and values.ndim == inputs.ndim else values
