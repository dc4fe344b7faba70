"""`scaled_value_and_grad` takes nnx and equinox modules, with the results of flax's and equinox's own functions."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import polyamp
from polyamp.errors import LossScaleError
from polyamp_jax import scaled_value_and_grad

SCALER = polyamp.LossScaler(init_scale=2.0**8, growth_interval=4)
POLICY = polyamp.Policy("mixed_float16")
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X[:, :2]


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def plain(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def mixed(model: Any, x: Any, y: Any) -> Any:
    return plain(POLICY.autocast(model), x, y)


@pytest.mark.parametrize("has_aux", [False, True])
def test_an_nnx_module_has_the_results_of_nnx_value_and_grad(has_aux: bool) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return (plain(model, x, y), {"y": model.last.bias[...]}) if has_aux else plain(model, x, y)

    mine, theirs = Net(), Net()
    value, grads, finite = scaled_value_and_grad(loss, SCALER, has_aux=has_aux)(SCALER.init("jax"), mine, X, Y)
    wanted, wanted_grads = nnx.value_and_grad(loss, has_aux=has_aux)(theirs, X, Y)
    assert jax.tree.structure((value, grads)) == jax.tree.structure((wanted, wanted_grads))
    assert type(grads) is type(wanted_grads)
    for one, other in zip(jax.tree.leaves((value, grads)), jax.tree.leaves((wanted, wanted_grads)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert bool(finite)
    for one, other in zip(jax.tree.leaves(nnx.state(mine)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=1e-6)  # statistics and streams moved, in the object itself
    assert int(mine.drop.rngs.count[...]) > 0


def test_a_loop_of_ones_own_over_an_nnx_module_trains() -> None:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graded = SCALER.native("jax")(mixed)

    @nnx.jit
    def step(model: Any, optimizer: Any, scale_state: Any, x: Any, y: Any) -> Any:
        loss, grads, finite = graded(scale_state, model, x, y)
        optimizer.update(model, grads)
        return loss, SCALER.update(scale_state, finite)

    scale_state = SCALER.init("jax")
    losses = []
    for _ in range(30):
        loss, scale_state = step(model, optimizer, scale_state, X, Y)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    assert float(scale_state.scale) > SCALER.init_scale


def test_nnx_arguments_are_chosen_by_filters_too() -> None:
    model = Net()
    argnums = nnx.DiffState(0, nnx.PathContains("last"))
    _, grads, _ = scaled_value_and_grad(plain, SCALER, argnums=argnums)(SCALER.init("jax"), model, X, Y)
    assert list(grads) == ["last"]


@pytest.mark.parametrize("argnums", [0, (0,), (0, 1)])
def test_an_equinox_module_has_the_results_of_filter_value_and_grad(argnums: Any) -> None:
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    graded = scaled_value_and_grad(loss, SCALER, argnums=argnums)
    value, grads, finite = graded(SCALER.init("jax"), model, jnp.asarray(X), Y)
    wanted, wanted_grads = eqx.filter_value_and_grad(loss)(model, X, Y)
    first = grads if argnums == 0 else grads[0]
    assert type(grads) is (eqx.nn.MLP if argnums == 0 else tuple)
    assert jax.tree.structure(first) == jax.tree.structure(wanted_grads)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    if argnums == (0, 1):
        assert grads[1].shape == X.shape
    assert bool(finite)
    updated = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, first))
    assert float(loss(updated, X, Y)) < float(value)


def test_an_overflow_in_a_module_is_found() -> None:
    _, grads, finite = scaled_value_and_grad(mixed, SCALER)(SCALER.init("jax"), Net(), X * np.inf, Y)
    assert not bool(finite)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_a_module_in_the_place_of_the_scale_state_is_refused() -> None:
    with pytest.raises(LossScaleError, match=r"first argument .* is the loss-scale state"):
        scaled_value_and_grad(plain, SCALER)(Net(), X, Y)
