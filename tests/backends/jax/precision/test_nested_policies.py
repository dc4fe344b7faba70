"""S3: of the policies around a call in `loss_fn` the innermost decides, for the call of the model too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp.errors import PolicyError, TraceError
from polyamp_jax import keep_precision

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
POLICIES = {
    "float32": polyamp.Policy("float32"),
    "autocast": polyamp.Policy(compute="bfloat16"),
    "cast": polyamp.Policy(compute="bfloat16", mode="cast"),
    "inner": polyamp.Policy(compute="float16"),
    "inner cast": polyamp.Policy(compute="float16", mode="cast"),
}
COMPUTES = {"float32": "float32", "inner": "float16", "inner cast": "float16"}


class Net(nnx.Module):
    def __init__(self, norm: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if norm else None
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(jnp.tanh(x if self.norm is None else self.norm(x)))

    def encode(self, x: Any) -> Any:
        return self.first(x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2)(x)


def products(loss_fn: Any, outer: str, model: Any = None) -> set[str]:
    """Dtypes of the operands of the matrix products of a step."""
    made = polyamp.Recipe(policy=POLICIES[outer], optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Net() if model is None else model, made)
    step = polyamp.train_step(loss_fn, made, compile=False)
    jaxpr = jax.make_jaxpr(lambda state, batch: step(state, batch)[1].loss)(state, BATCH)
    found: set[str] = set()

    def walk(program: Any) -> None:
        for eqn in program.eqns:
            if eqn.primitive.name == "dot_general":
                found.add(str(eqn.invars[0].aval.dtype))
            for param in eqn.params.values():
                for item in param if isinstance(param, tuple | list) else (param,):
                    if hasattr(item, "jaxpr") or hasattr(item, "eqns"):
                        walk(getattr(item, "jaxpr", item))

    walk(jaxpr.jaxpr)
    return found


WAYS: dict[str, Any] = {
    "model": lambda policy, model, x: policy.autocast(model)(x),
    "function": lambda policy, model, x: policy.autocast(lambda x: model(x))(x),
    "method": lambda policy, model, x: policy.autocast(model.encode)(x),
    "method of": lambda policy, model, x: policy.autocast(model).encode(x),
    "part": lambda policy, model, x: policy.autocast(model.first)(x),
}


OUTER = ("float32", "autocast", "cast")


@pytest.mark.parametrize(
    ("outer", "inner", "way"),
    [
        (outer, [*COMPUTES][(number + shift) % len(COMPUTES)], way)  # any two of the three values meet
        for number, outer in enumerate(OUTER)
        for shift, way in enumerate(WAYS)
    ],
)
def test_s03_the_innermost_policy_holds_for_the_models_call(outer: str, inner: str, way: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(WAYS[way](POLICIES[inner], model, batch["x"]).astype(jnp.float32)))

    assert products(loss_fn, outer) == {COMPUTES[inner]}


@pytest.mark.parametrize("outer", ["autocast", "cast"])
def test_s03_a_float32_policy_inside_computes_with_the_masters_digits(outer: str) -> None:
    """In mode "cast" too, where the step has casts of them; gradients of both calls add up."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(POLICIES["float32"].autocast(model)(batch["x"]))), model(batch["x"])

    found = []
    for policy in (POLICIES[outer], POLICIES["float32"]):
        made = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler.off())
        value, grads = polyamp.value_and_grad(loss_fn)(polyamp.init(Net(), made), BATCH)
        found.append((value[0], grads.values))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for one, other in zip(*(jax.tree.leaves(values) for _, values in found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_s03_behind_the_region_the_steps_own_policy_holds_again() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        inside = POLICIES["float32"].autocast(POLICIES["inner"].autocast(model))(batch["x"])
        return jnp.mean(inside) + jnp.mean(model(batch["x"]))

    assert products(loss_fn, "autocast") == {"float16", "bfloat16"}, "a policy around the model is inside a function's"


def test_s03_what_stands_around_a_step_touches_nothing_in_it() -> None:
    made = polyamp.Recipe(policy=POLICIES["autocast"], optimizer=polyamp.sgd(0.1))
    state = polyamp.init((Linen(), Linen().init(jax.random.key(0), BATCH["x"])), made)
    half = polyamp.value_and_grad(lambda model, batch: jnp.mean(model(batch["x"]) ** 2), compile=False)
    around = POLICIES["inner"].autocast(lambda x: half(state, {"x": x})[0])
    wanted = float(half(state, BATCH)[0])
    assert float(keep_precision(lambda x: half(state, {"x": x})[0])(BATCH["x"])) == wanted
    jaxpr = str(jax.make_jaxpr(around)(BATCH["x"]))
    assert "bf16" in jaxpr
    assert float(jax.jit(around)(BATCH["x"])) == pytest.approx(wanted, rel=1e-3)


def test_s03_keep_precision_around_the_models_call() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean(keep_precision(lambda x: model(x))(batch["x"]))

    assert products(loss_fn, "autocast") == {"float32"}


def test_s12_running_statistics_move_under_an_inner_policy() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(POLICIES["inner"].autocast(model)(batch["x"])))

    made = polyamp.Recipe(policy=POLICIES["autocast"], optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    state, _ = polyamp.train_step(loss_fn, made)(polyamp.init(Net(norm=True), made), BATCH)
    assert np.abs(np.asarray(state.model.norm.mean[...])).max() > 1e-4

    def enclosed(model: Any, batch: Any) -> Any:
        return jnp.mean(POLICIES["inner"].autocast(lambda x: model(x))(batch["x"]))

    with pytest.raises(TraceError, match=r"policy\.autocast\(model\)\(x\), which hands them on"):
        polyamp.train_step(enclosed, made)(polyamp.init(Net(norm=True), made), BATCH)


def test_s05_overrides_of_an_inner_policy_name_the_models_modules() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        inner = polyamp.Policy(compute="float16", overrides={"last": "float32"})
        return jnp.mean(inner.autocast(model)(batch["x"]))

    assert products(loss_fn, "autocast") == {"float16", "float32"}

    def misspelt(model: Any, batch: Any) -> Any:
        return jnp.mean(polyamp.Policy("mixed_float16", overrides={"lost": "float32"}).autocast(model)(batch["x"]))

    with pytest.raises(PolicyError, match="'lost' matches no module path"):
        products(misspelt, "autocast")
