"""S29: an equinox model in `loss_fn` under equinox's own functions; copies of it run under the policy too."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.errors import RecipeError

WIDTH = 4
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MODES = ["autocast", "cast"]


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    drop: eqx.nn.Dropout
    table: Any
    gain: Any

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 2)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]
        self.drop = eqx.nn.Dropout(0.5)
        self.table = jnp.arange(3)
        self.gain = jnp.asarray(1.5)

    @property
    def scale(self) -> Any:
        return jnp.exp(self.gain)

    def encode(self, x: Any) -> Any:
        return jax.nn.relu(self.layers[0](x))

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.drop(self.layers[1](self.encode(x)), key=key) * self.scale


def is_linear(node: Any) -> bool:
    return isinstance(node, eqx.nn.Linear)


def weights(model: Any) -> Any:
    """equinox's own example of a penalty and of an initialization."""
    return [node.weight for node in jax.tree.leaves(model, is_leaf=is_linear) if is_linear(node)]


def _penalty(model: Any, x: Any) -> Any:
    model = eqx.nn.inference_mode(model)
    return jnp.mean(jax.vmap(model)(x) ** 2) + 0.1 * sum(jnp.sum(weight**2) for weight in weights(model))


def _tree_at(model: Any, x: Any) -> Any:
    model = eqx.nn.inference_mode(model)
    noisy = eqx.tree_at(weights, model, [weight * 0.5 for weight in weights(model)])
    swapped = eqx.tree_at(lambda m: m.layers[0], model, model.layers[1])
    methods = jax.vmap(noisy.encode)(x) + jax.vmap(noisy.layers[1])(x) + noisy.scale
    return jnp.mean((jax.vmap(noisy)(x) - jax.vmap(swapped)(x)) ** 2) + jnp.mean(methods)


def _partition(model: Any, x: Any) -> Any:
    model = eqx.nn.inference_mode(model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    frozen = eqx.combine(jax.tree.map(jax.lax.stop_gradient, params), static)
    return jnp.mean((jax.vmap(frozen)(x) - jax.vmap(eqx.combine(params, static))(x) - 1.0) ** 2)


def _filter(model: Any, x: Any) -> Any:
    arrays = eqx.filter(model, eqx.is_array)
    integers = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(arrays) if leaf.dtype.kind == "i")
    rates = jax.tree.leaves(eqx.filter(model, lambda leaf: isinstance(leaf, float)))
    run = eqx.filter_checkpoint(lambda model, x: jax.vmap(model)(x))
    return jnp.mean(run(eqx.nn.inference_mode(model), x)) + integers + sum(rates) + model.gain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_fn", [_penalty, _tree_at, _partition, _filter])
def test_s29_equinoxs_functions_give_what_they_give_by_hand(
    loss_fn: Any, mode: Any, products: Any, backend: Any
) -> None:
    expected, grads = eqx.filter_value_and_grad(loss_fn)(Net(), X)
    assert abs(float(expected)) > 1e-2
    recipe = polyamp.Recipe(policy=polyamp.Policy("float32", mode=mode), optimizer=polyamp.sgd(0.1))
    value, gradients = polyamp.value_and_grad(loss_fn)(polyamp.init(Net(), recipe), X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients.values), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    mixed = polyamp.Recipe(policy=polyamp.Policy("mixed_float16", mode=mode), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Net(), mixed)
    if loss_fn is _tree_at and mode == "cast":  # what is read is a cast, and no leaf of the model
        with pytest.raises(RecipeError, match=r"eqx\.tree_at\(where, model, \.\.\.\): with mode='cast'"):
            polyamp.value_and_grad(loss_fn)(state, X)
        return
    assert set(products(backend.train_step(loss_fn, mixed, compile=False), state, X)) == {("float16", "float16")}
    value, _ = polyamp.value_and_grad(loss_fn)(state, X)
    np.testing.assert_allclose(value, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_s5_a_copy_follows_the_overrides_of_its_place(mode: Any, products: Any, backend: Any) -> None:
    policy = polyamp.Policy("mixed_float16", mode=mode, overrides={"layers/1": "float32"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Net(), recipe)

    def loss_of(number: int) -> Any:
        def loss_fn(model: Any, x: Any) -> Any:
            assert isinstance(model, Net)
            assert {str(weight.dtype) for weight in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))} == {
                "float32"
            }
            layer = jax.tree.map(lambda leaf: 2.0 * leaf if eqx.is_inexact_array(leaf) else leaf, model.layers[number])
            read = model.layers[number].weight
            assert read.dtype == ("float32" if number or mode == "autocast" else "float16")
            y = jax.vmap(layer)(x)
            assert y.dtype == "float32"
            return jnp.mean(y**2)

        return loss_fn

    for number, dtype in ((0, "float16"), (1, "float32")):
        step = backend.train_step(loss_of(number), recipe, compile=False)
        assert set(products(step, state, X)) == {(dtype, dtype)}


def test_s29_outside_of_a_step_copies_run_under_the_policy() -> None:
    bound = polyamp.Policy("mixed_float16").autocast(eqx.nn.inference_mode(Net()))
    assert isinstance(bound, Net)
    doubled = eqx.tree_at(lambda m: m.gain, bound, bound.gain + jnp.log(2.0))
    np.testing.assert_allclose(doubled(X[0]), 2.0 * bound(X[0]), rtol=1e-5)
    native = eqx.nn.inference_mode(Net())
    np.testing.assert_allclose(bound(X[0]), native(jnp.asarray(X[0])), rtol=2e-2, atol=2e-3)
    assert np.any(np.asarray(bound(X[0])) != np.asarray(native(jnp.asarray(X[0])))), "the product is of float16"
    assert sorted(polyamp.parameters(bound)) == sorted(polyamp.parameters(native))


def test_s29_a_copy_whose_state_would_be_lost_is_refused() -> None:
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self) -> None:
            self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")

        def __call__(self, x: Any, state: Any) -> Any:
            return self.norm(x, state)

    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(eqx.nn.make_with_state(Normed)(), recipe, axis_name="batch")

    def loss_fn(model: Any, x: Any) -> Any:
        return jnp.mean(eqx.filter_checkpoint(lambda model, x: model(x))(model, x))

    with pytest.raises(RecipeError, match="call no transformation of JAX on a function of the model"):
        polyamp.value_and_grad(loss_fn)(state, X)
