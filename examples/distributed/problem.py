"""What the three programs of this folder share: the recipe, the loss, the data, and the weights to start from.

Nothing here knows a framework, or how many replicas there are; a program only says which part of a batch is its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import polyamp
from polyamp.demo import digits

RECIPE = Path(__file__).with_name("recipe.toml")
PIXELS, HIDDEN, CLASSES = 64, 32, 10
BATCH = 64
"""Rows of a step's batch, those of all replicas together."""


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy of the digits: the mean over the rows that it is given."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def recipe(arguments: argparse.Namespace) -> polyamp.Recipe:
    """That of the file, with another policy where `--policy` asks for it."""
    found = polyamp.Recipe.load(RECIPE)
    return found.replace(policy=arguments.policy) if arguments.policy else found


def batches(steps: int, replica: int = 0, replicas: int = 1) -> Iterator[dict[str, Any]]:
    """Training batches, or of each the part of one replica: `x` float32 (rows, 64), `y` int32 (rows,)."""
    for batch in digits.batches(digits.load(), size=BATCH, steps=steps):
        x, y = batch["x"].reshape(BATCH, PIXELS), batch["y"]
        mine = slice(replica * BATCH // replicas, (replica + 1) * BATCH // replicas)
        yield {"x": x[mine], "y": y[mine]}


def held_out() -> tuple[Any, Any]:
    """Images float32 (360, 64) and labels int32 (360,) that are not trained on."""
    data = digits.load()
    return data.test_x.reshape(-1, PIXELS), data.test_y


def weights() -> list[tuple[Any, Any]]:
    """Kernel (inputs, outputs) and bias of both layers, the same in every framework."""
    rng = np.random.default_rng(0)
    sizes = [(PIXELS, HIDDEN), (HIDDEN, CLASSES)]
    kernels = [rng.uniform(-1, 1, size).astype(np.float32) * (3 / size[0]) ** 0.5 for size in sizes]
    return [(kernel.astype(np.float32), np.zeros(kernel.shape[1], np.float32)) for kernel in kernels]


def arguments(description: str | None, **more: Any) -> argparse.Namespace:
    """`--steps`, `--policy`, and what a program has beside them: name -> its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--policy", help="instead of the recipe's, such as float32")
    for name, default in more.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **kind)
    return parser.parse_args()


def report(results: Iterable[Any], logits: Any, what: str) -> None:
    """Every tenth loss, then where the training ended; `logits` are those of the held-out images."""
    each = list(results)
    for number, result in enumerate(each):
        if number % 10 == 0 or number == len(each) - 1:
            print(f"step {number:2}  loss {float(result.loss):.6f}")
    accuracy = float(np.mean(np.argmax(np.asarray(logits), axis=-1) == held_out()[1]))
    skipped = sum(bool(result.skipped) for result in each)
    print(f"{what}: scale {float(each[-1].scale):g}, skipped {skipped}, accuracy {accuracy:.3f}")
