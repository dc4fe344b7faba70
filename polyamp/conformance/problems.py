"""Small training problems of the suite: weights, batches, loss functions, and functions that read a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

import polyamp
from polyamp.contract.harness import DenseWeights

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend
    from polyamp.contract.harness import Harness

Array = np.ndarray[Any, Any]
Batch = dict[str, Any]


def layers(sizes: Sequence[int] = (4, 8, 3), seed: int = 0) -> list[DenseWeights]:
    """Return weights of an MLP, with kernels of variance 1 / inputs."""
    rng = np.random.default_rng(seed)
    made = []
    for inputs, outputs in pairwise(sizes):
        limit = (3.0 / inputs) ** 0.5
        kernel = rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32)
        made.append(DenseWeights(kernel, rng.uniform(-0.1, 0.1, outputs).astype(np.float32)))
    return made


def batch(seed: int = 0, *, size: int = 8, inputs: int = 4, outputs: int = 3, gain: float = 1.0) -> Batch:
    """Return a regression batch; a `gain` of inf makes every gradient overflow."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, inputs)).astype(np.float32),
        "y": rng.normal(size=(size, outputs)).astype(np.float32),
        "gain": np.full((size, outputs), gain, np.float32),
    }


def split_rows(whole: Batch, lengths: Sequence[int]) -> list[Batch]:
    """Return a batch in micro-batches of these lengths."""
    ends = np.cumsum(lengths)
    return [{k: v[end - n : end] for k, v in whole.items()} for n, end in zip(lengths, ends, strict=True)]


def loss_fn(model: Any, batch: Batch) -> Any:
    """Return the mean squared error of the outputs times the gain."""
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def loss_and_aux(model: Any, batch: Batch) -> Any:
    """Return the same loss, with itself as aux."""
    loss = loss_fn(model, batch)
    return loss, {"loss": loss}


def recipe(policy: str | polyamp.Policy = "float32", **settings: Any) -> polyamp.Recipe:
    """Return a recipe, by default with plain SGD."""
    settings.setdefault("optimizer", polyamp.sgd(0.1))
    return polyamp.Recipe(policy=policy, **settings)


def stateful_recipe() -> polyamp.Recipe:
    """Return a recipe with moments, counts, a schedule and a scale that moves."""
    return recipe(
        "mixed_float16",
        optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(0.05, 2, 12), weight_decay=0.1),
        scaler=polyamp.LossScaler(init_scale=64.0, growth_interval=2),
        clip_norm=1.0,
    )


def is_on_cpu(backend: Backend) -> bool:
    """Return whether the suite runs on a CPU, where two programs of one operation have the same bits."""
    return backend.info().devices[0].lower().startswith("cpu")


def train(
    harness: Harness, made: polyamp.Recipe, batches: Iterable[Batch], *, weights: Sequence[DenseWeights] | None = None
) -> tuple[Any, list[polyamp.StepResult]]:
    """Train on `batches` from the same initial weights and return the state and the results."""
    return advance(polyamp.init(harness.mlp(weights or layers()), made), batches)


def advance(
    state: Any, batches: Iterable[Any], loss: Any = loss_fn, **options: Any
) -> tuple[Any, list[polyamp.StepResult]]:
    """Run a step on each batch with the state's recipe, and return the state and the results.

    `options` are those of `train_step`.
    """
    step = polyamp.train_step(loss, state.recipe, **options)
    results = []
    for item in batches:
        state, result = step(state, item)
        results.append(result)
    return state, results


def flat_weights(harness: Harness, state: Any) -> Array:
    """Return all weights of an MLP state as one vector."""
    return np.concatenate([part.ravel() for layer in harness.weights(state) for part in layer])


def changed_arrays(before: dict[str, Array], after: dict[str, Array]) -> list[str]:
    """Return names of the arrays that changed, except the loss scale and the random-number streams."""
    return [
        name
        for name in before
        if not name.startswith(("loss_scale/", "rng/")) and before[name].tobytes() != after[name].tobytes()
    ]


def to_float(backend: Backend, value: Any) -> float:
    """Return a device scalar as a Python float."""
    return float(backend.to_numpy(value))


def relative_difference(a: Any, b: Any) -> float:
    """Return the largest elementwise distance, relative to the larger magnitude of the two curves at that point."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-12)))


def modules_of(state: Any) -> list[str]:
    """Return the modules that have parameters, in order."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in state.groups.numbers))
