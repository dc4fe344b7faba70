"""What the examples share: a small classifier in each framework, and batches of scikit-learn's handwritten digits."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polyamp.demo import digits

PIXELS, CLASSES = 64, 10


def torch_mlp(inputs: int, hidden: int, outputs: int) -> Any:
    """An `nn.Module`."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))


def tensorflow_mlp(inputs: int, hidden: int, outputs: int) -> Any:
    """A `keras.Model`."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((inputs,)), keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(outputs)]
    return keras.Sequential(layers)


def jax_mlp(inputs: int, hidden: int, outputs: int) -> Any:
    """A flax linen module with its variables."""
    import flax.linen as nn
    import jax

    module = nn.Sequential([nn.Dense(hidden), nn.relu, nn.Dense(outputs)])
    return module, module.init(jax.random.key(0), np.ones((1, inputs), np.float32))


MODELS: dict[str, Callable[[int, int, int], Any]] = {
    "torch": torch_mlp,
    "tensorflow": tensorflow_mlp,
    "jax": jax_mlp,
}


def mlp(framework: str, inputs: int = PIXELS, hidden: int = 64, outputs: int = CLASSES) -> Any:
    """The classifier in one framework."""
    return MODELS[framework](inputs, hidden, outputs)


def batches(steps: int, size: int = 64) -> Iterator[dict[str, Any]]:
    """Training batches: `x` float32 (size, 64), pixels in [0, 1]; `y` int32 (size,)."""
    for batch in digits.batches(digits.load(), size=size, steps=steps):
        yield {"x": batch["x"].reshape(size, PIXELS), "y": batch["y"]}


def arguments(description: str | None, *, steps: int = 60) -> argparse.Namespace:
    """`--framework` and `--steps`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--framework", choices=MODELS, default="torch")
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args()


def report(first: Any, last: Any, **more: Any) -> None:
    """One closing line."""
    extra = "".join(f", {name.replace('_', ' ')} {value}" for name, value in more.items())
    print(f"loss {float(first):.4f} -> {float(last):.4f}{extra}")
