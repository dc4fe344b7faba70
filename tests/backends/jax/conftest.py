"""One small network in every kind of JAX model, and how to look inside a traced step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp.contract import registry
from tests import xla

xla.quick()  # before the first program is compiled
WIDTHS = (4, 8, 8, 3)
RATE = 0.5


class Made(NamedTuple):
    """A model in its native form, what `init` needs beside it, and the names of its three layers' modules."""

    model: Any
    options: dict[str, Any]
    layers: tuple[str, str, str]


class LinenNet(linen.Module):
    norm: bool
    dropout: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(WIDTHS[1], name="first")(x)
        if self.norm:
            x = linen.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)
        x = linen.relu(linen.Dense(WIDTHS[2], name="second")(x))
        if self.dropout:
            x = linen.Dropout(RATE, deterministic=False)(x)
        return linen.Dense(WIDTHS[3], name="third")(x)


class NnxNet(nnx.Module):
    def __init__(self, norm: bool, dropout: bool, rngs: nnx.Rngs) -> None:
        layers = [nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(WIDTHS)]
        self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers  # from flax 0.12
        self.norm = nnx.BatchNorm(WIDTHS[1], momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(RATE, rngs=rngs) if dropout else None

    def __call__(self, x: Any) -> Any:
        x = self.layers[0](x)
        if self.norm is not None:
            x = self.norm(x)
        x = nnx.relu(self.layers[1](x))
        if self.dropout is not None:
            x = self.dropout(x)
        return self.layers[2](x)


class EquinoxNet(eqx.Module):
    """One example at a time, as equinox has it; `init(..., axis_name="batch")` maps it over the batch."""

    layers: list[eqx.nn.Linear]
    norm: eqx.nn.BatchNorm | None
    dropout: eqx.nn.Dropout | None

    def __init__(self, norm: bool, dropout: bool, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(a, b, key=k) for a, b, k in zip(WIDTHS, WIDTHS[1:], keys, strict=False)]
        self.norm = eqx.nn.BatchNorm(WIDTHS[1], "batch", momentum=0.9, mode="batch") if norm else None
        self.dropout = eqx.nn.Dropout(RATE) if dropout else None

    def __call__(self, x: Any, state: Any = None, *, key: Any = None) -> Any:
        x = self.layers[0](x)
        if self.norm is not None:
            x, state = self.norm(x, state)
        x = jax.nn.relu(self.layers[1](x))
        if self.dropout is not None:
            x = self.dropout(x, key=key)
        x = self.layers[2](x)
        return x if state is None else (x, state)


def make_linen(*, norm: bool = False, dropout: bool = False) -> Made:
    module = LinenNet(norm, dropout)
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones((2, WIDTHS[0])))
    return Made((module, variables), {"rngs": {"dropout": 0}} if dropout else {}, ("first", "second", "third"))


def make_nnx(*, norm: bool = False, dropout: bool = False) -> Made:
    return Made(NnxNet(norm, dropout, nnx.Rngs(0)), {}, ("layers/0", "layers/1", "layers/2"))


def make_equinox(*, norm: bool = False, dropout: bool = False) -> Made:
    module, state = eqx.nn.make_with_state(EquinoxNet)(norm, dropout, jax.random.key(0))
    options: dict[str, Any] = {"axis_name": "batch", **({"rngs": 0} if dropout else {})}
    return Made((module, state) if norm else module, options, ("layers/0", "layers/1", "layers/2"))


def make_haiku(*, norm: bool = False, dropout: bool = False) -> Made:
    def forward(x: Any) -> Any:
        x = hk.Linear(WIDTHS[1], name="first")(x)
        if norm:
            x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)
        x = jax.nn.relu(hk.Linear(WIDTHS[2], name="second")(x))
        if dropout:
            x = hk.dropout(hk.next_rng_key(), RATE, x)
        return hk.Linear(WIDTHS[3], name="third")(x)

    transformed = (hk.transform_with_state if norm else hk.transform)(forward)
    arrays = transformed.init(jax.random.key(0), jnp.ones((2, WIDTHS[0])))
    return Made((transformed, arrays), {"rngs": 0} if dropout else {}, ("first", "second", "third"))


def make_function(*, norm: bool = False, dropout: bool = False) -> Made:
    assert not norm, "(apply_fn, params) has no running state"

    def apply_fn(params: Any, x: Any, rng: Any = None) -> Any:
        x = x @ params["first"]["w"]
        x = jax.nn.relu(x @ params["second"]["w"])
        if dropout:
            x = jnp.where(jax.random.bernoulli(rng, 1 - RATE, x.shape), x / (1 - RATE), 0.0).astype(x.dtype)
        return x @ params["third"]["w"]

    keys = jax.random.split(jax.random.key(0), 3)
    names = ("first", "second", "third")
    params = {
        name: {"w": jax.random.normal(key, (a, b)) / a**0.5}
        for name, key, a, b in zip(names, keys, WIDTHS, WIDTHS[1:], strict=False)
    }
    return Made((apply_fn, params), {"rngs": 0} if dropout else {}, names)


KINDS: dict[str, Callable[..., Made]] = {
    "linen": make_linen,
    "nnx": make_nnx,
    "equinox": make_equinox,
    "haiku": make_haiku,
    "function": make_function,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[..., Made]:
    """Makes the network in each kind of model: `make(norm=..., dropout=...)`."""
    return KINDS[request.param]


@pytest.fixture
def make_kind() -> Callable[..., Made]:
    """Makes one kind by name."""
    return lambda kind, **features: KINDS[kind](**features)


def loss_fn(model: Any, batch: Any) -> Any:
    """Mean squared error of the gained output."""
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


@pytest.fixture(name="loss_fn")
def loss_fn_fixture() -> Any:
    return loss_fn


@pytest.fixture
def batch() -> Callable[..., dict[str, Any]]:
    """Makes a batch; a `gain` of inf makes every gradient overflow."""

    def made(seed: int = 0, *, size: int = 8, gain: float = 1.0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(size, WIDTHS[0])).astype(np.float32)
        y = np.tanh(x[:, : WIDTHS[-1]])
        return {"x": x, "y": y, "gain": np.full((size, WIDTHS[-1]), gain, np.float32)}

    return made


@pytest.fixture
def recipe() -> Callable[..., polyamp.Recipe]:
    """Makes a recipe with plain SGD unless told otherwise."""

    def made(policy: Any = "mixed_float16", **settings: Any) -> polyamp.Recipe:
        settings.setdefault("optimizer", polyamp.sgd(0.1))
        return polyamp.Recipe(policy=policy, **settings)

    return made


@pytest.fixture
def backend() -> Any:
    return registry.get("jax")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


@pytest.fixture
def equations() -> Callable[..., list[Any]]:
    """All equations of a function's jaxpr, inner jaxprs included: `equations(function, *args)`."""
    return lambda function, *args: list(_equations(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.fixture
def products(equations: Any) -> Callable[..., list[tuple[str, ...]]]:
    """The input dtypes of every matrix product that a function traces, in order."""

    def found(function: Any, *args: Any) -> list[tuple[str, ...]]:
        return [
            tuple(str(v.aval.dtype) for v in equation.invars)
            for equation in equations(function, *args)
            if equation.primitive.name == "dot_general"
        ]

    return found
