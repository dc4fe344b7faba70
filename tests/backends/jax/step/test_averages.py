"""S34 in JAX: optax's averages, steps inside a scan, models of every library, states whose arrays are gone."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
from polyamp.errors import CheckpointError
from polyamp_jax.step.averages import averaged_values

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss_fn(model: Any, x: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(x), x[:, :2])


def recipe(ema: polyamp.Ema, **settings: Any) -> polyamp.Recipe:
    return polyamp.Recipe(optimizer=polyamp.adamw(0.05), ema=ema, **settings)


def test_s34_averages_are_those_of_optax_and_a_scan_moves_them() -> None:
    """From the second move on; the first copies, for which optax is given the parameters."""
    dense = linen.Dense(2)
    variables = dense.init(jax.random.key(0), X)
    made = recipe(polyamp.Ema(0.9))
    state = polyamp.init((dense, variables), made)
    step = polyamp.train_step(loss_fn, made, donate=False)
    theirs = None
    for _ in range(5):
        state, _ = step(state, X)
        params = state.params
        theirs = params if theirs is None else optax.incremental_update(params, theirs, 0.1)
    found = state.averages["model"]
    for name, leaf in theirs.items():  # type: ignore[union-attr]  # set by the first step
        (own,) = (value for path, value in found.items() if path.endswith(name))
        np.testing.assert_allclose(own, leaf, rtol=1e-6, atol=1e-7)

    start = polyamp.init((dense, variables), made)
    scanned, results = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s, X), s, None, length=5))(start)
    for name, value in scanned.averages["model"].items():
        np.testing.assert_allclose(value, found[name], rtol=1e-6, atol=1e-7)
    assert results.step.shape == (5,)


@pytest.mark.parametrize("kind", ["nnx", "equinox", "function"])
def test_s34_models_of_other_libraries(kind: str) -> None:
    def apply_fn(params: Any, x: Any) -> Any:
        return x @ params["w"]

    kinds: dict[str, Any] = {
        "nnx": lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        "equinox": lambda: eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0)),
        "function": lambda: (apply_fn, {"w": jnp.ones((4, 2))}),
    }

    def loss(model: Any, x: Any) -> Any:
        return polyamp.losses.mean_squared_error(jax.vmap(model)(x) if kind == "equinox" else model(x), x[:, :2])

    made = recipe(polyamp.Ema(0.5))
    state = polyamp.init(kinds[kind](), made)
    step = polyamp.train_step(loss, made)
    history = []
    for _ in range(3):
        state, _ = step(state, X)
        history.append(jax.tree.map(np.array, jax.tree.leaves(state.params)))
    model = polyamp.averaged_model(state)
    leaves = jax.tree.leaves(polyamp.init(model, made).params)
    state, _ = step(state, X)  # donates the state's arrays, and not the model's
    for leaf, one, two, three in zip(leaves, *history, strict=True):
        np.testing.assert_allclose(leaf, 0.25 * one + 0.25 * two + 0.5 * three, rtol=1e-5, atol=1e-6)


def test_s34_a_donated_state_has_no_averages_left() -> None:
    made = recipe(polyamp.Ema(0.5))
    before = polyamp.init(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), made)
    polyamp.train_step(loss_fn, made)(before, X)
    for call in (polyamp.averaged, polyamp.averaged_model):
        with pytest.raises(CheckpointError, match="donated to a step"):
            call(before)


@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 1), ("float16", 1), ("float32", 0)])
def test_s34_an_average_is_of_the_stored_value(dtype: str, count: int) -> None:
    """The rounding to 16 bits is said in the program: a GPU's compiler leaves out the one of the parameter's cast."""
    recipe = polyamp.Recipe(policy="float32", ema=polyamp.Ema(0.9))

    def averages(value: Any) -> Any:
        return averaged_values({"w": value.astype(dtype)}, {}, ["w"], recipe)["model"]["w"]

    text = str(jax.make_jaxpr(averages)(jnp.float32(1 / 3)))
    assert text.count("reduce_precision") == count
    assert float(averages(jnp.float32(1 / 3))) == float(jnp.asarray(1 / 3, dtype))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_s34_the_averaged_model_inside_of_jit(kind: str) -> None:
    dense = linen.Dense(2)
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0)) if kind == "nnx" else (dense, dense.init(jax.random.key(0), X))
    made = recipe(polyamp.Ema(0.9), policy="mixed_float16")
    state = polyamp.init(model, made)
    for _ in range(2):
        state, _ = polyamp.train_step(loss_fn, made)(state, X)

    def evaluate(state: Any, x: Any) -> Any:
        with polyamp.averaged(state) as averaged:
            return made.policy.autocast(averaged)(x)

    np.testing.assert_allclose(jax.jit(evaluate)(state, X), evaluate(state, X), rtol=2e-3, atol=2e-3)
