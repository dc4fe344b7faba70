"""S12 in a loop of one's own: `select` leaves parameters and optimizer states alone where the gradients overflowed."""

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
from polyamp.errors import ArgumentError
from polyamp_jax import scaled_value_and_grad, select

SCALER = polyamp.LossScaler(init_scale=2.0**8)
POLICY = polyamp.Policy("mixed_float16")
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BAD = np.where(np.arange(8)[:, None] == 3, np.inf, X).astype(np.float32)


def bits(tree: Any) -> list[bytes]:
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in tree]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def same_bits(one: Any, other: Any) -> bool:
    arrays = [[leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)] for tree in (one, other)]
    assert arrays[0]
    return bits(arrays[0]) == bits(arrays[1])


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.parametrize("compiled", [False, True])
def test_s12_nnx_objects_are_left_alone_in_place(compiled: bool) -> None:
    """The loop of docs/guides/jax_models.md. Without `select` every parameter is NaN after the overflow."""
    net = Net()
    optimizer = nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)
    graded = scaled_value_and_grad(lambda net, x: jnp.mean((POLICY.autocast(net)(x) - 1.0) ** 2), SCALER)

    def step(net: Any, optimizer: Any, scale_state: Any, x: Any) -> Any:
        before = nnx.clone((net, optimizer))
        loss, grads, finite = graded(scale_state, net, x)
        optimizer.update(net, grads)
        select(finite, (net, optimizer), before)
        return loss, SCALER.update(scale_state, finite), finite

    if compiled:
        step = nnx.jit(step)

    def now() -> Any:
        return jax.tree.map(np.asarray, nnx.state((net, optimizer), nnx.Not(nnx.RngState)))

    scale_state = SCALER.init("jax")
    start = now()
    _, scale_state, finite = step(net, optimizer, scale_state, X)
    assert bool(finite)
    first, count = now(), int(net.drop.rngs.count[...])
    assert not same_bits(start, first)
    _, scale_state, finite = step(net, optimizer, scale_state, BAD)
    assert not bool(finite)
    assert same_bits(first, now()), "parameters, statistics, moments and the optimizer's count"
    assert int(net.drop.rngs.count[...]) > count, "the stream moves on"
    assert float(scale_state.scale) == SCALER.init_scale / 2
    loss, _, finite = step(net, optimizer, scale_state, X)
    assert bool(finite)
    assert np.isfinite(float(loss))
    assert not same_bits(first, now())


@pytest.mark.parametrize("compiled", [False, True])
def test_s12_pytrees_equinox_modules_and_optax_states_are_chosen(compiled: bool) -> None:
    net = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2))
    graded = scaled_value_and_grad(lambda net, x: jnp.mean(jax.vmap(net)(x) ** 2), SCALER)

    def step(net: Any, opt_state: Any, scale_state: Any, x: Any) -> Any:
        _, grads, finite = graded(scale_state, net, x)
        updates, new_opt_state = optimizer.update(grads, opt_state, eqx.filter(net, eqx.is_inexact_array))
        kept = select(finite, (eqx.apply_updates(net, updates), new_opt_state), (net, opt_state))
        return *kept, SCALER.update(scale_state, finite)

    run: Any = eqx.filter_jit(step) if compiled else step
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    one, one_state, scale_state = run(net, opt_state, SCALER.init("jax"), X)
    assert not same_bits(net, one)
    assert jax.tree.structure((one, one_state)) == jax.tree.structure((net, opt_state))
    two, two_state, _ = run(one, one_state, scale_state, BAD)
    assert same_bits((one, one_state[1]), (two, two_state[1]))
    assert int(two_state[1][0].count) == 1


@pytest.mark.parametrize("flag", [True, False, np.bool_(True), np.bool_(False)])
def test_s12_select_chooses_bits(flag: Any) -> None:
    values = np.array([-0.0, np.nan, np.inf, 1e-45, 3.0], np.float32)
    new = {"a": jnp.asarray(values), "n": jnp.arange(5), "k": jax.random.key(1), "none": None, "name": "adam", "t": 2}
    old = {**new, "a": jnp.asarray(values[::-1].copy()), "n": jnp.zeros(5, jnp.int32), "k": jax.random.key(2)}
    got = select(flag, new, old)
    wanted = new if flag else old
    assert [got[k].tobytes() for k in "an"] == [np.asarray(wanted[k]).tobytes() for k in "an"]
    assert got["a"].dtype == "float32"
    assert (got["name"], got["t"], got["none"]) == ("adam", 2, None)
    assert bits([got["k"]]) == bits([new["k"]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: ({"w": jnp.ones(2)}, True, {"w": jnp.ones(2)}), r"finite must be a boolean scalar.*swapped"),
        (lambda: (jnp.ones(2) > 0, jnp.ones(2), jnp.ones(2)), r"finite must be a boolean scalar"),
        (lambda: (True, {"w": jnp.ones(2)}, {"v": jnp.ones(2)}), r"must be of one structure"),
        (lambda: (True, {"w": jnp.ones(2)}, {"w": jnp.ones(3)}), r"new\['w'\] is float32\[2\] and old is float32\[3\]"),
        (lambda: (True, {"t": 2}, {"t": 1}), r"new\['t'\] is .*Only arrays can be chosen"),
        (lambda: (lambda net: (True, net, net))(Net()), r"old shares its variables with new.*nnx\.clone"),
        (lambda: (lambda net: (True, net, nnx.Linear(4, 4, rngs=nnx.Rngs(0))))(Net()), r"must be of one structure"),
    ],
)
def test_s20_select_says_what_it_cannot_choose(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        select(*arguments())


def test_a_state_of_nnx_beside_an_optax_state_is_a_pytree() -> None:
    network = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    _, params, rest = nnx.split(network, nnx.Param, ...)
    network(jnp.ones((1, 2)))
    after = nnx.split(network, nnx.Param, ...)[2]
    optimizer = optax.adam(0.1)
    before = optimizer.init(params)
    updates, moved = optimizer.update(jax.tree.map(jnp.ones_like, params), before, params)
    new = (optax.apply_updates(params, updates), moved, after)
    for finite in (False, True):
        chosen, slots, streams = jax.jit(select)(jnp.bool_(finite), new, (params, before, rest))
        change = float(jnp.abs(chosen["layers"][0]["kernel"][...] - params["layers"][0]["kernel"][...]).max())
        assert (change > 0.05, int(slots[0].count)) == (finite, int(finite))
        assert int(streams["layers"][1]["rngs"]["count"][...]) == 1  # streams advance in both cases
