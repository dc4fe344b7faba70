"""The demo's problem: 1,797 handwritten digits and a one-block transformer with the same weights everywhere.

An 8x8 image is eight tokens, its rows. `initial_weights` names every array once, dense kernels as (in, out); each
backend's harness builds its model from them:

    x      : float32 (batch, 8, 8), pixels in [0, 1]
    h      = x @ embed + bias                                          (batch, 8, WIDTH)
    h     += out(softmax(q k^T / sqrt(WIDTH / HEADS)) v) of norm1(h)   multi-head self-attention
    h     += mlp2(relu(mlp1(norm2(h))))
    logits = head(flatten(norm3(h)))                                   (batch, 10)

Data: the digits set that scikit-learn bundles (UCI Optical Recognition of Handwritten Digits, test part).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

POLICIES: Final = ("float32", "mixed_bfloat16", "mixed_float16")
STEPS: Final = 200
BATCH_SIZE: Final = 64
TIMEOUT: Final = 900.0
"""Seconds a framework may take for all its policies before its process is ended."""
ROWS: Final = 8
WIDTH: Final = 32
HEADS: Final = 4
HIDDEN: Final = 64
CLASSES: Final = 10
EPSILON: Final = 1e-5
"""Added to the variance in every layer normalisation."""

DENSE: Final[dict[str, tuple[int, int]]] = {
    "embed": (ROWS, WIDTH),
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "mlp1": (WIDTH, HIDDEN),
    "mlp2": (HIDDEN, WIDTH),
    "head": (ROWS * WIDTH, CLASSES),
}
"""Dense layer -> (inputs, outputs); its arrays are `<name>/kernel` and `<name>/bias`."""
NORMS: Final = ("norm1", "norm2", "norm3")
"""Layer normalisations over WIDTH; their arrays are `<name>/scale` and `<name>/bias`."""


class DigitsData(NamedTuple):
    """Training and held-out digits: images float32 (n, 8, 8) in [0, 1], labels int32 (n,)."""

    train_x: Array
    train_y: Array
    test_x: Array
    test_y: Array


def load(seed: int = 0) -> DigitsData:
    """Return the digits, shuffled with `seed`: 1,437 to train on and 360 held out."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = (data.images[order] / 16.0).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    split = len(labels) * 4 // 5
    return DigitsData(images[:split], labels[:split], images[split:], labels[split:])


def batches(data: DigitsData, *, size: int, steps: int, seed: int = 0) -> Iterator[dict[str, Array]]:
    """Yield `steps` training batches {"x", "y"}, reshuffled every epoch, without an epoch's incomplete last batch."""
    import numpy as np

    rng = np.random.default_rng(seed)
    done = 0
    while done < steps:
        order = rng.permutation(len(data.train_y))
        for start in range(0, len(order) - size + 1, size):
            if done == steps:
                return
            rows = order[start : start + size]
            yield {"x": data.train_x[rows], "y": data.train_y[rows]}
            done += 1


def problem(*, size: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Return all arrays of a training: "weights", the batches "x" and "y" (steps, size, ...), "test_x", "test_y"."""
    import numpy as np

    data = load(seed)
    found = list(batches(data, size=size, steps=steps, seed=seed))
    stacked = {name: np.stack([batch[name] for batch in found]) for name in ("x", "y")}
    return {"weights": initial_weights(seed), **stacked, "test_x": data.test_x, "test_y": data.test_y}


def initial_weights(seed: int = 0) -> dict[str, Array]:
    """Return the initial weights: kernels uniform in +-sqrt(3 / inputs) (variance 1 / inputs), biases 0, scales 1."""
    import numpy as np

    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, (inputs, outputs) in DENSE.items():
        limit = (3.0 / inputs) ** 0.5
        weights[f"{name}/kernel"] = rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32)
        weights[f"{name}/bias"] = np.zeros(outputs, np.float32)
    for name in NORMS:
        weights[f"{name}/scale"] = np.ones(WIDTH, np.float32)
        weights[f"{name}/bias"] = np.zeros(WIDTH, np.float32)
    return weights
