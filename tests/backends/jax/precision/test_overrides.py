"""Module paths in autocast: overrides and the report in each library, inside loops, remat, jit and shared modules."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp.errors import PolicyError
from polyamp.recipe import overrides

MIXED = polyamp.Policy("mixed_float16")
X = jnp.ones((2, 4))
NARROW, WIDE = ("float16", "float16"), ("float32", "float32")


def policy(**overrides: str) -> polyamp.Policy:
    return polyamp.Policy("mixed_float16", overrides={k.replace("__", "/"): v for k, v in overrides.items()})


class Shared(nnx.Module):
    """Two blocks that call one linear layer, which belongs to the first."""

    def __init__(self) -> None:
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.second = Caller(self.first)

    def __call__(self, x: Any) -> Any:
        return self.second(self.first(x))


class Caller(nnx.Module):
    def __init__(self, layer: nnx.Linear) -> None:
        self.layer = layer
        self.own = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        with jax.named_scope("mine"):
            return jax.nn.softmax(self.own(self.layer(x)))


def test_a_shared_module_has_one_path_wherever_it_is_called(products: Any) -> None:
    assert products(policy(first="float32").autocast(Shared()), X) == [WIDE, WIDE, NARROW]
    assert products(policy(second__own="float32").autocast(Shared()), X) == [NARROW, NARROW, WIDE]
    modules = {row.module for row in polyamp.explain(Shared(), MIXED, X).operations}
    assert modules == {"first", "second", "second/own"}, "the user's own scope does not hide the module"


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        x = linen.Dense(4, use_bias=False, name="up")(x)
        return jax.nn.softmax(linen.Dense(4, use_bias=False, name="down")(x)), None


class LinenStack(linen.Module):
    how: str

    @linen.compact
    def __call__(self, x: Any) -> Any:
        if self.how == "scan":
            scanned = linen.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scanned(name="block")(x)[0]
        return {"remat": linen.remat(LinenBlock), "jit": linen.jit(LinenBlock), "plain": LinenBlock}[self.how](
            name="block"
        )(x)[0]


class NnxBlock(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: Any) -> Any:
        return jax.nn.softmax(self.down(self.up(x)))


class NnxStack(nnx.Module):
    def __init__(self, how: str) -> None:
        self.block, self.how = NnxBlock(), how

    def __call__(self, x: Any) -> Any:
        call = {"remat": nnx.remat, "jit": nnx.jit, "plain": lambda f: f}[self.how](lambda block, x: block(x))
        return call(self.block, x)


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.up = eqx.nn.Linear(4, 4, use_bias=False, key=key)
        self.down = eqx.nn.Linear(4, 4, use_bias=False, key=key)

    def __call__(self, x: Any) -> Any:
        return jax.nn.softmax(jax.vmap(self.down)(jax.vmap(self.up)(x)))


class EquinoxStack(eqx.Module):
    block: EquinoxBlock
    how: str

    def __init__(self, how: str) -> None:
        key = jax.random.key(0)
        self.block = EquinoxBlock(key) if how != "scan" else eqx.filter_vmap(EquinoxBlock)(jax.random.split(key, 3))
        self.how = how

    def __call__(self, x: Any) -> Any:
        if self.how == "scan":
            arrays, static = eqx.partition(self.block, eqx.is_array)
            return jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), x, arrays)[0]
        return {"remat": eqx.filter_checkpoint, "jit": eqx.filter_jit, "plain": lambda f: f}[self.how](self.block)(x)


class HaikuBlock(hk.Module):
    def __call__(self, x: Any) -> Any:
        return jax.nn.softmax(hk.Linear(4, False, name="down")(hk.Linear(4, False, name="up")(x)))


def stack(library: str, how: str) -> Any:
    if library == "linen":
        return LinenStack(how), LinenStack(how).init(jax.random.key(0), X)
    if library == "nnx":
        return NnxStack(how)
    if library == "equinox":
        return EquinoxStack(how)

    def forward(x: Any) -> Any:
        block = HaikuBlock(name="block")
        return (hk.remat(block) if how == "remat" else block)(x)

    transformed = hk.transform(forward)
    return transformed, transformed.init(jax.random.key(0), X)


STACKS = [
    *(("linen", how) for how in ("plain", "remat", "scan", "jit")),
    *(("nnx", how) for how in ("plain", "remat", "jit")),
    *(("equinox", how) for how in ("plain", "remat", "scan", "jit")),
    *(("haiku", how) for how in ("plain", "remat")),
]


@pytest.mark.parametrize(("library", "how"), STACKS)
def test_overrides_name_modules_also_inside_loops_and_remat(library: str, how: str, products: Any) -> None:
    model = stack(library, how)
    for _ in range(2):  # the second time JAX and the libraries find what they have traced
        assert products(policy(block__down="float32").autocast(model), X) == [NARROW, WIDE]
        assert products(MIXED.autocast(model), X) == [NARROW, NARROW]
        rows = polyamp.explain(model, policy(block__up="float32"), X).operations
        assert {(r.module, r.name, r.dtype) for r in rows if r.name in ("dot_general", "exp")} == {
            ("block/up", "dot_general", "float32"),
            ("block/down", "dot_general", "float16"),
            ("block", "exp", "float32"),
        }
    derivative = jax.grad(lambda x: policy(block__down="float32").autocast(model)(x)[:, 0].sum())
    if how == "plain":
        assert products(derivative, X) == [NARROW, WIDE, WIDE, NARROW]
    with pytest.raises(PolicyError, match=r"'block/dwn' matches no module path. Nearest: 'block/down'"):
        policy(block__dwn="float32").autocast(model)


class Same(hk.Module):
    def __call__(self, x: Any) -> Any:
        x = jnp.exp(x)
        return hk.Linear(4, False, name="block")(x) if self.name == "block" else Same(name="block")(x)


def test_a_module_with_the_name_of_the_one_around_it_keeps_its_own_path() -> None:
    transformed = hk.transform(lambda x: Same(name="block")(x))
    model = transformed, transformed.init(jax.random.key(0), X)
    rows = [(row.module, row.name) for row in polyamp.explain(model, MIXED, X).operations]
    assert rows == [("block", "exp"), ("block/block", "dot_general")]


class Strict(eqx.Module, strict=True):
    """A final class, with a converter and a method."""

    weight: Any = eqx.field(converter=jnp.asarray)
    layers: dict[str, Any]
    activation: Any

    def __call__(self, x: Any) -> Any:
        return self.activation(self.layers["inner"](x @ self.weight))


def test_equinox_modules_of_every_kind_are_named() -> None:
    inner = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Lambda(jnp.exp)])
    model = Strict(np.eye(4, dtype="f4"), {"inner": inner}, eqx.nn.PReLU(0.1))
    rows = polyamp.explain(model, MIXED, X[0]).operations
    found = {(row.module, row.name) for row in rows if row.name in ("dot_general", "exp", "mul")}
    assert found >= {
        ("", "dot_general"),
        ("layers/inner/layers/0", "dot_general"),
        ("layers/inner/layers/1", "exp"),
        ("activation", "mul"),
    }
    assert type(model) is Strict
    assert type(model.layers["inner"]) is eqx.nn.Sequential, "the user's own model is as it was"


def test_naming_modules_makes_no_class_twice() -> None:
    model = EquinoxStack("plain")
    run = policy(block__down="float32").autocast(model)
    run(X)
    before = len(eqx.nn.Linear.__subclasses__())
    run(X)
    assert len(eqx.nn.Linear.__subclasses__()) == before, "JAX keeps every registered class for ever"


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s05_a_step_matches_no_glob(
    make: Any, recipe: Any, batch: Any, loss_fn: Any, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    own = recipe(polyamp.Policy("mixed_float16", mode=mode, overrides={made.layers[1]: "float32"}))
    state, step = polyamp.init(made.model, own, **made.options), polyamp.train_step(loss_fn, own)

    def matched(*_: Any) -> bool:
        raise AssertionError("the plan of init says where overrides apply")

    monkeypatch.setattr(overrides, "covers", matched)
    _, result = step(state, batch())
    assert not bool(result.skipped)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_s05_modules_without_parameters_can_be_named(make_kind: Any, kind: str) -> None:
    model = make_kind(kind, dropout=True).model
    policy(dropout="float32").autocast(model)
    with pytest.raises(PolicyError, match=r"'dropuot' matches no module path. Nearest: 'dropout'"):
        policy(dropuot="float32").autocast(model)
