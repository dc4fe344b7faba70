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


def masked(x: jax.Array) -> jax.Array:
    """A mask of -1e9 that the program itself casts, with a row that has nothing else: the policy would leave it."""
    x = x.astype(jnp.float16)
    mask = jnp.zeros((4, 8), jnp.float32).at[0].set(-1e9).astype(x.dtype)
    return jnp.exp(x + mask - (x + mask).max(-1, keepdims=True)).astype(x.dtype)


PLANTS: dict[str, tuple[Callable[[jax.Array], jax.Array], str, bool | None]] = {
    "activations above 65504": (product, "dot_general", True),
    "in a scan": (scanned, "dot_general", True),
    "under remat": (jax.checkpoint(product), "", True),
    "a mask of -1e9": (masked, "convert_element_type", None),
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


def test_the_iteration_of_a_scan_is_named_and_its_line() -> None:
    """8 * 100**2 fits float16, times 100 once more does not."""
    model = Plain(scanned)
    model.first.kernel[...], model.first.bias[...] = jnp.zeros((8, 8)), jnp.full((8,), 8.0)

    report = found(model)

    assert (report.operation, report.iterations) == ("dot_general", [1])
    assert "  operation: dot_general, in iteration 1 of a scan\n    given float16 from " in str(report)
    assert report.place is not None
    assert "jax.lax.scan" in report.place.code


def test_the_first_iterations_of_scans_in_scans_and_from_the_end() -> None:
    steps = jnp.array([1.0, 100.0, 1.0, 100.0, 1.0])

    def inner(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry @ (x * jnp.eye(8)), None

    def outer(carry: jax.Array, _: Any) -> tuple[jax.Array, jax.Array]:
        carry, _ = jax.lax.scan(inner, carry, steps, reverse=True)
        return carry, carry.sum()

    report = found(Plain(lambda x: jax.lax.scan(outer, x, None, length=3)[0]))

    assert (report.operation, report.iterations) == ("dot_general", [1, 3]), "1e4 fits float16; from the end, 3 is next"


def test_a_loss_in_16_bits_and_a_rate_that_diverged() -> None:
    def narrow(model: Any, batch: Any) -> Any:
        return jnp.square(model(batch["x"]).astype(jnp.float16) * 3000).sum()

    report = polyamp.find_nonfinite(narrow, "mixed_float16", Plain(jnp.tanh), BATCH)
    assert (report.origin, report.module, report.by_precision, report.own_cast) == ("forward", "", None, "float16")
    model = Plain(jnp.tanh)
    model.head.kernel[...] = jnp.full_like(model.head.kernel[...], 3e38)
    diverged = found(model)
    assert (diverged.origin, diverged.by_precision) == ("forward", False)


def test_a_mask_of_minus_infinity_before_a_softmax_is_no_fault() -> None:
    def softmax(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(x > 0.5, -jnp.inf, x))

    assert found(Plain(softmax)).origin == "none"


def test_a_parameter_that_is_not_finite() -> None:
    model = Plain(jnp.tanh)
    model.first.kernel[...] = model.first.kernel[...].at[0, 0].set(jnp.inf)
    report = found(model)
    assert (report.origin, report.module) == ("parameters", "first/kernel")


def test_a_gradient_that_is_not_finite_stands_between_two_modules() -> None:
    """The untaken branch of the middle module has an infinite slope; the forward pass is finite."""
    report = found(Plain(lambda x: jnp.where(x > 1e9, jnp.sqrt(x - x), x)), loss_scale=1.0)
    assert (report.origin, report.module, report.finite_until) == ("backward", "first", "middle")
    assert report.operation == "sqrt"
    assert report.place is not None
    assert "jnp.sqrt(x - x)" in report.place.code
    assert "between first and middle: the gradient that enters middle is finite" in str(report)


def test_the_call_in_the_message_of_a_stuck_scale_works() -> None:
    """A compiled step consumes its state, and the error comes when the step has run."""
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.sgd(0.1),
        scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=1),
    )
    batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int32)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]) / 0.0, batch["y"])

    state = polyamp.init(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    with pytest.raises(polyamp.LossScaleStuckError) as caught:
        step(state, batch)
    report = eval(caught.value.call, {"polyamp": polyamp, "loss_fn": loss_fn, "state": state, "batch": batch})
    assert (report.origin, report.by_precision) == ("forward", False)
