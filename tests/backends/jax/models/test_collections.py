"""S29: losses and intermediates that a linen, haiku or equinox model collects while it runs are read in `loss_fn`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import polyamp
import polyamp_jax
from polyamp.errors import TraceError

WIDTH = 6
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
MODES = ["autocast", "cast"]


class Sows(linen.Module):
    """Sows a feature and a loss, and keeps running statistics."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.Dense(WIDTH, name="dense")(x)
        self.sow("intermediates", "features", y)
        self.sow("losses", "penalty", jnp.mean(y**2))
        return linen.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(y)


def linen_loss(apply: Any) -> Any:
    """The loss of a loop by hand and of a step: `apply(x, mutable)` gives the output and the collections."""

    def loss_of(x: Any) -> Any:
        y, collected = apply(x, ["intermediates", "losses"])
        (features,), (penalty,) = collected["intermediates"]["features"], collected["losses"]["penalty"]
        return jnp.mean((y - x) ** 2) + 0.1 * penalty + 0.1 * jnp.mean(jnp.abs(features)), penalty

    return loss_of


def linen_by_hand(variables: Any, steps: int) -> tuple[list[float], Any]:
    params, stats, losses = variables["params"], variables["batch_stats"], []

    def loss_fn(params: Any, stats: Any) -> Any:
        kept = {}

        def apply(x: Any, mutable: list[str]) -> Any:
            y, changed = Sows().apply({"params": params, "batch_stats": stats}, x, mutable=[*mutable, "batch_stats"])
            kept.update(changed.pop("batch_stats"))
            return y, changed

        return linen_loss(apply)(X)[0], kept

    for _ in range(steps):
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(loss))
    return losses, params


def linen_step(model: Any, x: Any) -> Any:
    return linen_loss(lambda x, mutable: model(x, mutable=mutable))(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [False, True], ids=["plain", "with-sown-collections"])
def test_s29_what_linen_sows_is_read_through_mutable_and_is_fresh_each_step(mode: Any, whole: bool) -> None:
    """Today a raw TypeError; with the "losses" that `module.init` itself returns "changed its structure"."""
    variables = Sows().init(jax.random.key(0), X)
    assert "losses" in variables
    given = variables if whole else {name: variables[name] for name in ("params", "batch_stats")}
    recipe = polyamp.Recipe(policy=polyamp.Policy("float32", mode=mode), optimizer=polyamp.sgd(0.1))
    state, step = polyamp.init((Sows(), given), recipe), polyamp.train_step(linen_step, recipe)
    structure, losses = jax.tree.structure(state), []
    for _ in range(4):
        state, result = step(state, X)
        losses.append(float(result.loss))
    expected, params = linen_by_hand(variables, 4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert jax.tree.structure(state) == structure


@pytest.mark.parametrize("mode", MODES)
def test_s29_what_linen_sows_follows_the_policy_the_windows_and_the_halves(
    mode: Any, products: Any, backend: Any
) -> None:
    seen: dict[str, str] = {}

    def loss_fn(model: Any, x: Any) -> Any:
        y, collected = model(x, mutable=["intermediates", "losses"])
        (features,) = collected["intermediates"]["features"]
        (penalty,) = model.variables["losses"]["penalty"]
        seen.update(y=str(y.dtype), features=str(features.dtype))
        return jnp.mean(y**2) + 0.1 * penalty, penalty

    variables = Sows().init(jax.random.key(0), X)
    recipe = polyamp.Recipe(
        policy=polyamp.Policy("mixed_float16", mode=mode), optimizer=polyamp.sgd(0.1), accumulate_steps=4
    )
    state = polyamp.init((Sows(), variables), recipe)
    step = backend.train_step(loss_fn, recipe, compile=False)
    assert set(products(step, state, X)) == {("float16", "float16")}
    assert seen == {"y": "float32", "features": "float32"}
    (_, penalty), grads = polyamp.value_and_grad(loss_fn)(state, X)
    assert [n for n, g in backend.named_gradients(grads) if "dense" in n and g is not None]
    wide = Sows().apply(variables, X, mutable=["batch_stats", "losses"])[1]["losses"]["penalty"][-1]
    np.testing.assert_allclose(penalty, wide, rtol=1e-2)
    _, result = polyamp.train_step(loss_fn, recipe)(state, X)
    assert result.aux.shape == (4,)
    np.testing.assert_allclose(np.mean(result.aux), wide, rtol=1e-2)


def test_s29_outside_of_a_step_linen_collects_too() -> None:
    variables, policy = Sows().init(jax.random.key(0), X), polyamp.Policy("mixed_float16")
    y, collected = policy.autocast((Sows(), variables))(X, mutable=["intermediates", "batch_stats"])
    expected, own = Sows().apply(variables, X, mutable=["intermediates", "batch_stats"])
    assert sorted(collected) == sorted(own)
    for one, other in zip(jax.tree.leaves((y, collected)), jax.tree.leaves((expected, own)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)

    def loss_fn(params: Any) -> Any:
        return linen_step(policy.autocast((Sows(), {**variables, "params": params})), X)

    scaler = polyamp.LossScaler(init_scale=8.0)
    (loss, _), grads, finite = polyamp_jax.scaled_value_and_grad(loss_fn, scaler, has_aux=True)(
        scaler.init("jax"), variables["params"]
    )
    np.testing.assert_allclose(loss, linen_by_hand(variables, 1)[0][0], rtol=1e-2)
    assert bool(finite)
    assert sorted(grads) == sorted(variables["params"])


def test_s29_linens_other_ways_to_collect() -> None:
    variables = Sows().init(jax.random.key(0), X)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((Sows(), variables), recipe)

    def captured(model: Any, x: Any) -> Any:
        y, collected = model(x, mutable=["intermediates"], capture_intermediates=True)
        return jnp.mean(y), collected["intermediates"]["dense"]["__call__"][0]

    (_, seen), _ = polyamp.value_and_grad(captured)(state, X)
    np.testing.assert_allclose(seen, X @ np.asarray(variables["params"]["dense"]["kernel"]), rtol=1e-4, atol=1e-5)
    (_, every), _ = polyamp.value_and_grad(lambda m, x: (lambda out: (jnp.mean(out[0]), out[1]))(m(x, mutable=True)))(
        state, X
    )
    assert sorted(every) == ["batch_stats", "intermediates", "losses"]
    with pytest.raises(TraceError, match=r"mutable= names 'params'.*Name the other collections"):
        polyamp.value_and_grad(lambda m, x: jnp.mean(m(x, mutable=["params"])[0]))(state, X)


def _stateful(x: Any) -> Any:
    y = hk.Linear(WIDTH, name="dense")(x)
    hk.set_state("penalty", jnp.mean(y**2))
    return hk.BatchNorm(True, True, 0.9, name="norm")(y, is_training=True)


@pytest.mark.parametrize("mode", MODES)
def test_s29_what_haiku_sets_in_its_state_is_read_as_model_state(mode: Any) -> None:
    transformed = hk.without_apply_rng(hk.transform_with_state(_stateful))
    params, own = transformed.init(jax.random.key(0), X)

    def loss_of(y: Any, state: Any) -> Any:
        return jnp.mean((y - X) ** 2) + 0.1 * state["~"]["penalty"]

    def by_hand(params: Any, own: Any) -> Any:
        y, own = transformed.apply(params, own, X)
        return loss_of(y, own), own

    recipe = polyamp.Recipe(policy=polyamp.Policy("float32", mode=mode), optimizer=polyamp.sgd(0.1))
    state = polyamp.init((transformed, (params, own)), recipe)
    step = polyamp.train_step(lambda model, x: loss_of(model(x), model.state), recipe)
    for _ in range(3):
        state, result = step(state, X)
        (loss, own), grads = jax.value_and_grad(by_hand, has_aux=True)(params, own)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        np.testing.assert_allclose(result.loss, loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


class Keeps(eqx.Module):
    layer: eqx.nn.Linear
    penalty: eqx.nn.StateIndex

    def __init__(self, key: Any) -> None:
        self.layer = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.penalty = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x: Any, state: Any) -> Any:
        y = jax.vmap(self.layer)(x)
        return y, state.set(self.penalty, jnp.mean(y**2))


@pytest.mark.parametrize("mode", MODES)
def test_s29_what_equinox_sets_in_its_state_is_read_as_model_state(mode: Any) -> None:
    module, own = eqx.nn.make_with_state(Keeps)(jax.random.key(0))

    def by_hand(module: Any) -> Any:
        y, after = module(X, own)
        return jnp.mean((y - X) ** 2) + after.get(module.penalty)

    def loss_fn(model: Any, x: Any) -> Any:
        y = model(x)
        return jnp.mean((y - x) ** 2) + model.state.get(model.penalty)

    recipe = polyamp.Recipe(policy=polyamp.Policy("float32", mode=mode), optimizer=polyamp.sgd(0.1))
    state = polyamp.init((module, own), recipe)
    value, gradients = polyamp.value_and_grad(loss_fn)(state, X)
    loss, grads = eqx.filter_value_and_grad(by_hand)(module)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    np.testing.assert_allclose(gradients.values.layer.weight, grads.layer.weight, rtol=1e-5, atol=1e-6)
