"""JAX's transformations, shard_map and pmap around a function under autocast, and inside one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import polyamp
from tests.backends.jax.precision.cases import (
    XS,
    By,
    Plain,
    Table,
    W,
    X,
    check,
    close,
    compiled,
    equations,
    floats,
    layer,
)

case = Table()

RNG = np.random.default_rng(1)
DW, DX = (jnp.asarray(RNG.normal(size=(4, 4)) / 2, jnp.float32) for _ in range(2))
OUT = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)


def program(ops: Any) -> Callable[..., Any]:
    """(w, x) -> an array in float32, with products, a 16-bit tanh and a float32 exp."""
    return lambda w, x: ops.exp(ops.dot(jnp.tanh(ops.dot(x, w)), w))


def summed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.sum(function(w, x) * OUT)


def through_a_solver(function: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function of x, transposed."""

    def run(w: Any, x: Any) -> Any:
        (out,) = jax.linear_transpose(lambda x: function(w, x), x)(OUT)
        return out

    return run


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": jax.jit,
    "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x * jnp.ones((3, 1, 1))),
    "vmap of the weights": lambda f: lambda w, x: jax.vmap(f, (0, None))(w * jnp.ones((3, 1, 1)), x),
    "vmap with names": lambda f: (
        lambda w, x: jax.vmap(lambda w, x: jax.lax.psum(f(w, x), "batch"), (None, 0), axis_name="batch")(
            w, x * jnp.ones((3, 1, 1))
        )
    ),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (DW, DX)),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](OUT),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](DW, DX),
    "grad": lambda f: jax.grad(summed(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(summed(f)),
    "grad of grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(summed(f))(w, x) * DW), (0, 1)),
    "hessian": lambda f: jax.hessian(summed(f)),
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "jacrev": lambda f: jax.jacrev(f, 1),
    "checkpoint": lambda f: jax.grad(summed(jax.checkpoint(f))),
    "vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(summed(f)), (None, 0))(w, x * jnp.ones((3, 1, 1))),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, x * jnp.ones((3, 1, 1))) * OUT)),
    "named_call": lambda f: jax.named_call(f, name="inner"),
    "named_scope": lambda f: jax.named_scope("inner")(f),
}
TOLERANCES = {"float16": 1e-2, "bfloat16": 8e-2}


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float16") for name in TRANSFORMS] + [(name, "bfloat16") for name in ("vmap", "grad", "hessian")],
)
def test_transformations(name: str, inside: bool, dtype: str) -> None:
    transform, policy = TRANSFORMS[name], polyamp.Policy(compute=dtype, output="float32")
    plain = program(Plain())
    run = policy.autocast(transform(plain)) if inside else transform(policy.autocast(plain))
    found = equations(run, W, X)
    products = [floats(e.invars) for e in found if e.primitive.name == "dot_general"]
    assert len(products) >= len([e for e in equations(transform(plain), W, X) if e.primitive.name == "dot_general"]) > 0
    assert all(dtypes == {dtype} for dtypes in products), products
    for sensitive in ("exp", "reduce_sum"):
        assert all(floats(e.invars) == {"float32"} for e in found if e.primitive.name == sensitive), sensitive
    got, want = compiled(run)(W, X), compiled(transform(plain))(W, X)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float32"}
    close(got, want, TOLERANCES[dtype])
    by_hand = compiled(transform(program(By(dtype))))(W, X)
    close(got, by_hand, TOLERANCES[dtype] / 2 if inside else 1e-6)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_linear_transpose(inside: bool) -> None:
    def linear(w: Any, x: Any) -> Any:
        return (x @ w) * 2

    policy = polyamp.Policy("mixed_float16")
    run = policy.autocast(through_a_solver(linear)) if inside else through_a_solver(policy.autocast(linear))
    products = [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == "dot_general"]
    assert products == [{"float16"}]
    got = run(W, X)
    assert got.dtype == jnp.float32
    close(got, (OUT * 2).astype("float16") @ W.T.astype("float16"), 1e-6)


def test_per_example_gradients_under_vmap_have_the_examples_axis() -> None:
    run = jax.vmap(jax.grad(summed(polyamp.Policy("mixed_float16").autocast(program(Plain())))), (None, 0))
    got = run(W, XS)
    assert got.shape == (5, 4, 4)
    one = jax.grad(summed(polyamp.Policy("mixed_float16").autocast(program(Plain()))))
    close(got, jnp.stack([one(W, x) for x in XS]), 4e-3)


def test_autocast_within_autocast_keeps_the_inner_policy() -> None:
    inner = polyamp.Policy("mixed_bfloat16").autocast(lambda w, x: x @ w)
    run = polyamp.Policy("mixed_float16").autocast(lambda w, x: inner(w, x @ w))
    products = [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == "dot_general"]
    assert products[0] == {"float16"}
    got = run(W, X)
    assert got.dtype == jnp.float32
    close(got, X @ W @ W, 4e-2)


def test_a_cached_jit_is_traced_once_per_policy() -> None:
    calls = []

    @jax.jit
    def inner(w: Any, x: Any) -> Any:
        calls.append(1)
        return x @ w

    run = jax.jit(polyamp.Policy("mixed_float16").autocast(lambda w, x: inner(w, inner(w, x) + inner(w, x))))
    run(W, X)
    run(W, X)
    assert len(calls) == 1
    found = [e for e in equations(run, W, X) if e.params.get("name") == "inner"]
    assert len(found) == 3
    assert found[0].params["jaxpr"] is found[1].params["jaxpr"], "one rewritten program for equal calls"
    check(lambda ops: jax.jit(lambda w, x: ops.dot(x, w)), (W, X), {"dot_general": "compute"}, "float16")


# shards

SUMMED = 5e-3  # by hand the gradients of the shards are summed in 16 bits, under autocast in float32


def mesh(axes: tuple[str, ...] = ("d",)) -> Any:
    devices = np.array(jax.devices()[: 2 if jax.device_count() > 1 else 1])
    return jax.sharding.Mesh(devices.reshape((-1,) + (1,) * (len(axes) - 1)), axes)


@case((W, X), grad=(0, 1), hand=SUMMED)
def shard_map(ops: Any) -> Any:
    return jax.shard_map(layer(ops), mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d"))


@case((W, X), grad=(0, 1), hand=SUMMED)
def shard_map_with_a_sum(ops: Any) -> Any:
    def inner(w: Any, x: Any) -> Any:
        return lax.psum(layer(ops)(w, x), "d")

    return jax.shard_map(inner, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())


@case((W, X), grad=(0, 1))
def shard_map_without_checks(ops: Any) -> Any:
    def inner(w: Any, x: Any) -> Any:
        return lax.pmean(layer(ops)(w, x), "d")

    return jax.shard_map(inner, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P(), check_vma=False)


@case((W, X), grad=(0, 1), hand=SUMMED)
def shard_map_over_one_axis_of_two(ops: Any) -> Any:
    return jax.jit(
        jax.shard_map(layer(ops), mesh=mesh(("d", "m")), in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"})
    )


@case((W, X), grad=(0, 1), hand=SUMMED, under=lambda policy, fn: sharded(policy.autocast(fn)))
def autocast_inside_shard_map(ops: Any) -> Any:
    return lambda w, x: ops.keep(layer(ops)(w, x))


def sharded(function: Any) -> Any:
    return jax.shard_map(function, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d"))


@case((W, X[None]), grad=(0, 1))
def pmap(ops: Any) -> Any:
    return jax.pmap(lambda w, x: lax.psum(layer(ops)(w, x), "d"), "d", in_axes=(None, 0))


@case((W, X[None]), grad=(0, 1), lost=("transpose",), under=lambda p, f: jax.pmap(p.autocast(f), in_axes=(None, 0)))
def autocast_inside_pmap(ops: Any) -> Any:
    return lambda w, x: layer(ops)(w, x)


@pytest.mark.parametrize(("name", "dtype"), case.parameters())
def test_shards_run_in_the_dtypes_of_the_lists(name: str, dtype: str) -> None:
    case.programs[name](dtype)
