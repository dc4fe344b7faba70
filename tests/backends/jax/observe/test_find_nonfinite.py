"""`polyamp.find_nonfinite` in JAX: planted faults, in a scan and under remat too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp import losses
from polyamp.nonfinite.report import NonfiniteReport


class Middle(nnx.Module):
    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x)


class Plain(nnx.Module):
    """Three layers, the middle one a function of the test."""

    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.middle = Middle(function)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.middle(self.first(x)))


def product(x: jax.Array) -> jax.Array:
    return (x * 300.0) @ (3000.0 * jnp.eye(8)) @ jnp.eye(8)


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry @ (100.0 * jnp.eye(8)), None), x, None, length=4)[0]


PLANTS: dict[str, tuple[Callable[[jax.Array], jax.Array], str, bool]] = {
    "activations above 65504": (product, "dot_general", True),
    "in a scan": (scanned, "scan", True),
    "under remat": (jax.checkpoint(product), "", True),
    "a variance of zero": (lambda x: x / (x - x).std(-1, keepdims=True), "div", False),
    "exp of a large number": (lambda x: jnp.exp(x * 0 + 1000.0), "exp", False),
}
RNG = np.random.default_rng(1)
BATCH = {"x": RNG.normal(size=(4, 8)).astype(np.float32), "y": np.array([0, 1, 2, 0])}


def loss_fn(model: Any, batch: Any) -> Any:
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def found(model: Any, batch: Any = None, **options: Any) -> NonfiniteReport:
    return polyamp.find_nonfinite(loss_fn, "mixed_float16", model, BATCH if batch is None else batch, **options)


@pytest.mark.parametrize("name", list(PLANTS))
def test_a_planted_fault_is_named(name: str) -> None:
    function, operation, by_precision = PLANTS[name]
    report = found(Plain(function))
    assert (report.origin, report.module) == ("forward", "middle"), str(report)
    assert report.operation == operation or not operation, str(report)
    assert report.by_precision is by_precision


def test_what_is_finite_bad_data_and_gradients_that_overflow() -> None:
    assert found(Plain(jnp.tanh)).origin == "none"
    bad = {**BATCH, "x": np.where(np.arange(4)[:, None] == 2, np.nan, BATCH["x"])}
    assert str(found(Plain(jnp.tanh), bad)) == (
        "The batch is not finite: 8 elements of batch['x']. This is no matter of precision."
    )
    report = found(Plain(jnp.tanh), loss_scale=2.0**40)
    assert (report.origin, report.by_precision) == ("backward", True)
