"""How far training with products in 8 bits is from bfloat16's (S36): digits and a small GPT, in torch, on any device.

    python benchmarks/float8.py [--steps 300] [--seeds 3] [--device cpu]

Prints, per model and seed, the mean loss of the last tenth under both policies, their ratio, and the largest distance
of the smoothed curves. A device without 8-bit products multiplies the same numbers in float32, so that the losses are
those of one that has them, and times are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import polyamp

Batches = Iterator[Any]
WINDOW = 20
"""Steps over which a curve is averaged."""


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus attention plus the MLP, (rows, length, width)."""
        rows, length, width = x.shape
        parts = self.qkv(self.first_norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        made = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(made.transpose(1, 2).reshape(rows, length, width))
        sum_: torch.Tensor = x + self.mlp(self.second_norm(x))
        return sum_


class GPT(nn.Module):
    """Two blocks over characters."""

    def __init__(self, words: int = 64, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (rows, length, words)."""
        logits: torch.Tensor = self.lm_head(self.norm(self.blocks(self.tokens(tokens) + self.places)))
        return logits


def digit_batches(seed: int) -> Batches:
    """Yield batches of scikit-learn's digits."""
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(images), 64)
        yield torch.tensor(images[rows] / 16.0, dtype=torch.float32), torch.tensor(labels[rows])


def text_batches(seed: int) -> Batches:
    """Yield batches of a Markov chain over 64 words, whose entropy is the least loss."""
    chain = np.random.default_rng(0)
    tables = chain.dirichlet(np.full(64, 0.05), 64).cumsum(axis=1)
    rng = np.random.default_rng(seed)
    while True:
        tokens = np.zeros((16, 33), np.int64)
        tokens[:, 0] = rng.integers(0, 64, 16)
        for place in range(32):
            draws = rng.random((16, 1))
            tokens[:, place + 1] = np.minimum((tables[tokens[:, place]] < draws).sum(axis=1), 63)
        yield torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])


def digits_model() -> nn.Module:
    """Return a perceptron over 64 pixels; its last layer, of 10 classes, stays in bfloat16."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batches]]] = {
    "digits": (digits_model, digit_batches),
    "gpt": (GPT, text_batches),
}


def loss_fn(model: Any, batch: Any) -> Any:
    """Return the mean cross entropy."""
    inputs, targets = batch
    logits = model(inputs)
    return polyamp.losses.softmax_cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def train(name: str, policy: polyamp.Policy, seed: int, steps: int, device: str) -> np.ndarray[Any, Any]:
    """Return the losses of a training."""
    make, batches = PROBLEMS[name]
    torch.manual_seed(seed)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
    state, step = polyamp.init(make().to(device), recipe), polyamp.train_step(loss_fn, recipe)
    losses = []
    for _, batch in zip(range(steps), batches(seed), strict=False):
        state, result = step(state, batch)
        losses.append(float(result.loss))
    return np.array(losses)


def main() -> None:
    """Print one line per model and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    emulate = options.device == "cpu"
    policies = (
        polyamp.Policy("mixed_bfloat16"),
        polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=emulate)),
    )
    print("model   seed  bfloat16  float8   ratio   largest distance of the curves")
    for name in PROBLEMS:
        for seed in range(options.seeds):
            half, narrow = (train(name, policy, seed, options.steps, options.device) for policy in policies)
            kernel = np.full(WINDOW, 1.0 / WINDOW)
            curves = [np.convolve(each, kernel, mode="valid") for each in (half, narrow)]
            apart = np.abs(curves[1] / curves[0] - 1.0).max()
            ends = [each[-max(1, options.steps // 10) :].mean() for each in (half, narrow)]
            print(f"{name:7} {seed:4}  {ends[0]:8.4f}  {ends[1]:7.4f}  {ends[1] / ends[0]:6.4f}  {apart:.4f}")


if __name__ == "__main__":
    main()
