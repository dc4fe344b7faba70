"""Steps inside `shard_map`, with its checks and without, and `pmap` (S9): the result of one replica with all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.errors import ArgumentError, GradientError, UnsupportedError
from polyamp.results import StepResult
from polyamp_jax import scaled_value_and_grad
from tests.backends.jax.distributed import meshes
from tests.backends.jax.distributed.meshes import apart, bits, loss_fn, mesh, whole_batch

WAYS = ("checked", "unchecked", "pmap")
EVERYWHERE = P()
CHECKING = polyamp.LossScaler(init_scale=2.0**8, growth_interval=4)
NAMED: dict[str, dict[str, Any]] = {"checked": {}, "unchecked": {"axis_name": "data"}, "pmap": {"axis_name": "data"}}


def over_replicas(way: str, function: Callable[..., Any], out: Any = EVERYWHERE) -> Callable[..., Any]:
    """`function(state, batch)` on four replicas, each with its part of the batch. Results of pmap are stacked."""
    if way == "pmap":
        mapped = jax.pmap(function, axis_name="data", in_axes=(None, 0))

        def call(state: Any, batch: Any) -> Any:
            found = mapped(state, jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch))
            for leaf in jax.tree.leaves(found[0]):
                assert len({bits(leaf[number])[0] for number in range(4)}) == 1
            return jax.tree.map(lambda leaf: leaf[0], found)

        return call
    mapped = jax.shard_map(
        function, mesh=mesh(), in_specs=(P(), P("data")), out_specs=(P(), out), check_vma=way == "checked"
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("policy", "mode", "windows"), [("float32", "autocast", 1), ("mixed_float16", "cast", 2)])
def test_s09_replicas_equal_one_with_all_rows(way: str, policy: str, mode: str, windows: int, make_kind: Any) -> None:
    """50 steps, some of which overflow in one replica; fewer of pmap, which takes the state apart each time."""
    made = make_kind("function")
    late = polyamp.Group(kind="vector", trainable_after=4, clip_norm=0.01)
    recipe = polyamp.Recipe(
        policy=polyamp.Policy(policy, mode=mode),
        optimizer=polyamp.adamw(1e-2, eps=1e-3, groups=[late]),
        scaler=CHECKING,
        clip_norm=0.3,
        accumulate_steps=windows,
    )
    state, alone = (polyamp.init(made.model, recipe) for _ in range(2))
    step = over_replicas(way, polyamp.train_step(loss_fn, recipe, **NAMED[way]))
    one = polyamp.train_step(loss_fn, recipe)
    for number in range(10 if way == "pmap" else 50):
        poisoned = (number * 7) % meshes.ROWS if number % 5 == 4 else None
        batch = whole_batch(number, poisoned=poisoned)
        before = state
        state, result = step(state, batch)
        alone, expected = one(alone, batch)
        if way != "pmap":
            for leaf in jax.tree.leaves((state, result)):
                assert len({bits(leaf, device)[0] for device in range(4)}) == 1
        assert bool(result.skipped) == (poisoned is not None)
        assert (float(result.scale), int(result.step)) == (float(expected.scale), int(expected.step))
        if poisoned is not None:
            assert bits((state.params, state.opt_state)) == bits((before.params, before.opt_state))
    assert apart(state.params, alone.params) < (1e-6 if policy == "float32" else 2e-3)
    loose = 1e-5 if policy == "float32" else 5e-3
    np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=loose)


def test_s09_the_sum_and_mean_trap() -> None:
    """What plain JAX gives: the sum over the replicas, also behind a pmean; and without the checks, each one's own."""
    w, batch = jnp.ones((4, 3)), whole_batch(0)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(1.0))
    state = polyamp.init((lambda p, x: x @ p, w), recipe)
    loss = lambda p, b: jnp.mean((b["x"] @ p * b["gain"] - b["y"]) ** 2)  # noqa: E731
    right = jax.grad(loss)(w, batch)

    def plain(p: Any, b: Any) -> Any:
        return p, jax.grad(loss)(p, b)

    def averaged(p: Any, b: Any) -> Any:
        return p, jax.lax.pmean(jax.grad(loss)(p, b), "data")

    def ours(s: Any, b: Any) -> Any:
        return s, polyamp.value_and_grad(loss_fn)(s, b)[1].values

    np.testing.assert_allclose(over_replicas("checked", plain)(w, batch)[1], 4 * right, rtol=1e-5)
    np.testing.assert_allclose(over_replicas("checked", averaged)(w, batch)[1], 4 * right, rtol=1e-5)
    np.testing.assert_allclose(over_replicas("unchecked", averaged)(w, batch)[1], right, rtol=1e-5)
    np.testing.assert_allclose(over_replicas("checked", ours)(state, batch)[1], right, rtol=1e-5)
    already = lambda m, b: jax.lax.pmean(loss_fn(m, b), "data")  # noqa: E731  # a loss that is the mean of all rows
    for way in WAYS:
        step = polyamp.train_step(already, recipe, **NAMED[way])
        new, result = over_replicas(way, step)(state, batch)
        np.testing.assert_allclose(new.params, w - right, rtol=1e-5)
        np.testing.assert_allclose(float(result.loss), float(loss(w, batch)), rtol=1e-6)


@pytest.mark.parametrize("windows", [1, 2])
def test_s09_parameters_sharded_inside_shard_map(windows: int) -> None:
    """Each replica holds a part and gathers the whole in loss_fn: the norm is that of all parts, in one all-reduce."""
    recipe = polyamp.Recipe(
        policy="float32",
        optimizer=polyamp.adamw(1e-2, eps=1e-3),
        scaler=CHECKING,
        clip_norm=0.1,
        accumulate_steps=windows,
    )
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.zeros(3)}
    apply_fn = lambda p, x: x @ p["w"] + p["b"]  # noqa: E731

    def gathered(model: Any, batch: Any) -> Any:
        whole = {"w": jax.lax.all_gather(model.params["w"], "data", tiled=True), "b": model.params["b"]}
        return polyamp.losses.mean_squared_error(apply_fn(whole, batch["x"]) * batch["gain"], batch["y"])

    state, alone = (polyamp.init((apply_fn, params), recipe) for _ in range(2))
    specs = jax.tree.map(lambda leaf: P("data") if leaf.shape == (4, 3) else P(), state)
    mapped = jax.shard_map(
        polyamp.train_step(gathered, recipe), mesh=mesh(), in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    step, one = jax.jit(mapped), polyamp.train_step(loss_fn, recipe)
    _, _, reductions = meshes.sent(step.lower(state, whole_batch(0)).compile().as_text())
    assert sum("f32[4]{" in line for line in reductions) == 1
    for number in range(16):
        batch = whole_batch(number, poisoned=number if number % 4 == 1 else None)
        state, result = step(state, batch)
        alone, expected = one(alone, batch)
        assert bool(result.skipped) == bool(expected.skipped) == (number % 4 == 1)
        if not result.skipped:
            np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=1e-5)
    assert apart(state.params, alone.params) < 1e-6


@pytest.mark.parametrize("optimizer", [polyamp.lamb(1e-2, eps=1e-3), polyamp.muon(1e-2), polyamp.adafactor(1e-2)])
def test_s09_a_formula_of_whole_parameters_refuses_shards_inside_shard_map(optimizer: Any) -> None:
    """Replicated parameters are whole on each device."""
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=CHECKING)
    params = {"w_kernel": jax.random.normal(jax.random.key(0), (4, 3)), "b_bias": jnp.zeros(3)}

    def loss(model: Any, batch: Any) -> Any:
        w = model.params["w_kernel"]
        whole = jax.lax.all_gather(w, "data", tiled=True) if len(w) == 1 else w
        return polyamp.losses.mean_squared_error(batch["x"] @ whole + model.params["b_bias"], batch["y"])

    state = polyamp.init((lambda p, x: x, params), recipe)
    alone = polyamp.init((lambda p, x: x, params), recipe)
    step = polyamp.train_step(loss, recipe)
    rows = jax.tree.map(lambda leaf: P("data") if leaf.shape[:1] == (4,) else P(), state)
    with pytest.raises(
        UnsupportedError, match=rf"{optimizer.tag} needs each parameter.*'w_kernel' is divided over data"
    ):
        jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(rows, P("data")), out_specs=(rows, P())))(
            state, whole_batch(0)
        )
    whole = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=(P(), P())))
    for number in range(3):
        state, _ = whole(state, whole_batch(number))
        alone, _ = step(alone, whole_batch(number))
    assert apart(state.params, alone.params) < 1e-5


@pytest.mark.parametrize(("way", "windows"), [("checked", 1), ("checked", 2), ("unchecked", 2), ("pmap", 1)])
def test_s12_statistics_are_the_mean_and_masks_each_replicas_own(way: str, windows: int, make_kind: Any) -> None:
    made = make_kind("nnx", norm=True, dropout=True)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=windows)
    state = polyamp.init(made.model, recipe)

    def masks(model: Any, batch: Any) -> Any:
        dropped = model.dropout(jnp.ones((64,)))
        return loss_fn(model, batch), dropped + 0.0 * batch["x"][0, 0]

    step = polyamp.train_step(masks, recipe, **NAMED[way])
    batch = whole_batch(0)
    if way == "pmap":
        run = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=(None, 0))
        seen = run(state, jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch))[1].aux
        new, _ = over_replicas(way, step)(state, batch)
    else:
        out = StepResult(P(), P("data") if windows == 1 else P(None, "data"), P(), P(), P(), P())
        new, result = over_replicas(way, step, out)(state, batch)
        seen = result.aux
        for leaf in jax.tree.leaves(new):
            assert len({bits(leaf, device)[0] for device in range(4)}) == 1
    drawn = np.asarray(seen).reshape(-1, 64)
    assert len({mask.tobytes() for mask in drawn}) == len(drawn) == 4 * windows
    alone = polyamp.train_step(masks, recipe, donate=False)
    rows = [{name: array[4 * n : 4 * n + 4] for name, array in batch.items()} for n in range(4)]
    parts = [alone(state, own)[0] for own in rows]
    means = jax.tree.map(lambda *each: sum(each) / 4, *(part.running.statistics for part in parts))
    assert apart(new.running.statistics, means) < 1e-6
    assert bits(new.running.streams) == bits(parts[0].running.streams)


@pytest.mark.parametrize(("way", "windows"), [("checked", 1), ("checked", 2), ("pmap", 2)])
def test_s12_a_parameter_that_the_pass_writes_is_the_same_on_all_replicas(way: str, windows: int) -> None:
    """Spectral normalization depends on weights alone: four replicas are one with all rows."""

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.first = nnx.SpectralNorm(nnx.Linear(4, 8, rngs=rngs), rngs=rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.first(x, update_stats=True)))

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=windows)
    step, alone = polyamp.train_step(loss_fn, recipe, **NAMED[way]), polyamp.train_step(loss_fn, recipe)
    several, one = over_replicas(way, step), polyamp.init(Net(), recipe)
    state = polyamp.init(Net(), recipe)
    for number in range(3):
        batch = whole_batch(number)
        state, _ = several(state, batch)
        # a micro-batch of one device is those of the replicas together: what it meets was written by the one before
        rows = jax.tree.map(lambda x: x.reshape(4, windows, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape), batch)
        one, _ = alone(one, rows)
    if way != "pmap":
        for leaf in jax.tree.leaves(state.params):
            assert len({bits(leaf, device)[0] for device in range(4)}) == 1
    assert apart(state.params, one.params) < 1e-5
    norm = np.linalg.svd(np.asarray(state.params["first"]["layer_instance"]["kernel"]), compute_uv=False)[0]
    assert norm < 1.2


@pytest.mark.parametrize("way", WAYS)
def test_s09_halves_and_loops_by_hand_are_the_same(way: str) -> None:
    """`value_and_grad` with `apply_gradients`, and `scaled_value_and_grad`, whose flag is that of all replicas."""
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.5), clip_norm=1.0)
    w = jnp.full((4, 3), 0.5)
    state = polyamp.init((lambda p, x: x @ p, w), recipe)
    scaler, scale = recipe.loss_scaler, recipe.loss_scaler.init("jax")

    def halves(state: Any, batch: Any) -> Any:
        value, gradients = polyamp.value_and_grad(loss_fn, **NAMED[way])(state, batch)
        new, result = polyamp.apply_gradients(state, gradients)
        return new, (value, result)

    loss = lambda p, b: jnp.mean((b["x"] @ p * b["gain"] - b["y"]) ** 2)  # noqa: E731
    graded = scaled_value_and_grad(loss, scaler, **NAMED[way])
    for poisoned in (None, 9):
        batch = whole_batch(0, poisoned=poisoned)
        expected, once = polyamp.train_step(loss_fn, recipe, donate=False)(state, batch)
        new, (value, result) = over_replicas(way, halves)(state, batch)
        assert bool(result.skipped) == (poisoned is not None)
        assert apart(new.params, expected.params) < 1e-3
        value, grads, finite = over_replicas(way, lambda p, b: (p, graded(scale, p, b)))(w, batch)[1]
        assert bool(finite) == (poisoned is None)
        if poisoned is None:
            np.testing.assert_allclose(grads, jax.grad(loss)(w, batch), rtol=1e-5)
            np.testing.assert_allclose([float(value), float(once.loss)], float(loss(w, batch)), rtol=1e-3)


def test_what_cannot_be_known_is_refused_by_name() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((lambda p, x: x @ p, jnp.ones((4, 3))), recipe)
    graded = scaled_value_and_grad(lambda p, b: jnp.mean(b["x"] @ p), recipe.loss_scaler)
    calls: dict[str, Callable[..., Any]] = {
        "train_step": polyamp.train_step(loss_fn, recipe),
        "value_and_grad": lambda s, b: (s, polyamp.value_and_grad(loss_fn)(s, b)[0]),
        "scaled_value_and_grad": lambda s, b: (s, graded(s.scale_state, s.params, b)[0]),
    }
    for name, call in calls.items():
        for way in ("unchecked", "pmap"):
            with pytest.raises(UnsupportedError, match=rf"^{name} inside pmap.*'data'.*axis_name='data'"):
                over_replicas(way, call)(state, whole_batch(0))
    wrong = polyamp.train_step(loss_fn, recipe, axis_name=("data", "rows"))
    for way in WAYS:
        with pytest.raises(ArgumentError, match=r"Mapped here: 'data'. Received: 'rows'"):
            over_replicas(way, wrong)(state, whole_batch(0))
    with pytest.raises(ArgumentError, match=r"none: this is not inside shard_map.*leave axis_name out"):
        polyamp.train_step(loss_fn, recipe, axis_name="data", donate=False)(state, whole_batch(0))
    with pytest.raises(ArgumentError, match=r"axis_name must be the name of an axis.*Received: 3"):
        polyamp.train_step(loss_fn, recipe, axis_name=3)(state, whole_batch(0))

    def gathered(model: Any, batch: Any) -> Any:
        whole = jax.lax.all_gather(model.params, "data", tiled=True)
        return polyamp.losses.mean_squared_error(batch["x"] @ whole[:4], batch["y"])

    def contrasted(model: Any, batch: Any) -> Any:  # gathers what the model computes, which is as it should be
        every = jax.lax.all_gather(model(batch["x"]), "data", tiled=True)
        return jnp.mean((model(batch["x"]) @ every.T) ** 2)

    for way in WAYS[1:]:
        with pytest.raises(UnsupportedError, match=r"loss_fn gathers 'params' from the replicas.*check_vma=True"):
            over_replicas(way, polyamp.train_step(gathered, recipe, **NAMED[way]))(state, whole_batch(0))
        new, _ = over_replicas(way, polyamp.train_step(contrasted, recipe, **NAMED[way]))(state, whole_batch(0))
        alone, _ = polyamp.train_step(lambda m, b: jnp.mean((m(b["x"]) @ m(b["x"]).T) ** 2), recipe, donate=False)(
            state, whole_batch(0)
        )
        np.testing.assert_allclose(new.params, alone.params, rtol=1e-5)

    def unreduced(state: Any, batch: Any) -> Any:
        _, gradients = polyamp.value_and_grad(loss_fn)(state, batch)
        own = gradients.values * batch["gain"][0, 0]
        return polyamp.apply_gradients(state, gradients._replace(values=own))

    with pytest.raises(GradientError, match=r"varies over 'data'.*jax\.lax\.pmean"):
        over_replicas("checked", unreduced)(state, whole_batch(0))


def test_vmap_makes_no_replicas() -> None:
    """Each of an ensemble decides for itself, and averages nothing, whatever the axis is called."""
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    state = polyamp.init((lambda p, x: x @ p, jnp.ones((4, 3))), recipe)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
    parts = [whole_batch(0), whole_batch(1, poisoned=3)]
    both = jax.tree.map(lambda *each: jnp.stack(each), *parts)
    name: dict[str, Any] = {"axis_name": "data"} if jax.__version_info__ >= (0, 8) else {}  # there it looks like pmap
    new, result = jax.vmap(polyamp.train_step(loss_fn, recipe, donate=False), **name)(states, both)
    assert result.skipped.tolist() == [False, True]
    alone, _ = polyamp.train_step(loss_fn, recipe, donate=False)(state, parts[0])
    np.testing.assert_allclose(new.params[0], alone.params, rtol=1e-6)
