"""Programs at the edges of autocast: slices of constants, batched loop ends, masks, nesting, casts of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import polyamp
import polyamp_jax

HALF = polyamp.Policy("mixed_float16")
BRAIN = polyamp.Policy("mixed_bfloat16")
X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


def dtypes(function: Callable[..., Any], *args: Any, name: str) -> list[str]:
    """Result dtypes of the operations of one name, nested ones included."""

    def walk(jaxpr: Any) -> list[str]:
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == name:
                found.append(str(eqn.outvars[0].aval.dtype))
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                found += walk(inner) if hasattr(inner, "eqns") else []
        return found

    return walk(jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr)  # a new function: JAX keeps traces


def test_a_slice_of_a_constant_is_a_slice() -> None:
    def counts(x: Any) -> Any:
        return lax.scan(lambda c, k: (c + 1, k.sum()), 0, jnp.ones((5, 3)))[1]

    np.testing.assert_array_equal(BRAIN.autocast(counts)(X), np.full(5, 3.0))
    inside = BRAIN.autocast(jax.grad(lambda x: lax.map(lambda row: jnp.tanh(row @ W), x).sum()))(X)
    np.testing.assert_allclose(inside, jax.grad(lambda x: jnp.tanh(x @ W).sum())(X), rtol=2e-2)


def test_a_batched_end_of_a_loop() -> None:
    def one(n: Any, x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, x))[1]

    run = BRAIN.autocast(lambda n, x: jax.vmap(one)(n, x))
    found, wanted = run(jnp.arange(4), X), jax.vmap(one)(jnp.arange(4), X)
    np.testing.assert_allclose(found, wanted, rtol=2e-2)
    np.testing.assert_array_equal(found[0], X[0], "the example that ends at once stays as it is")
    assert dtypes(run, jnp.arange(4), X, name="dot_general") == ["bfloat16"]


def test_a_mask_is_no_bias() -> None:
    """flax scales the query, so that the mask meets the bare product; -1e9 in float16 would be -inf, and a row NaN."""
    query = jnp.ones((1, 2, 3, 4))
    mask = jnp.full((1, 1, 3, 3), -1e9).at[0, 0, 1:].set(0.0)

    def attention(query: Any, mask: Any) -> Any:
        return jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", query * 0.5, query) + mask)

    np.testing.assert_allclose(HALF.autocast(attention)(query, mask)[0, 0, 0], np.full(3, 1 / 3), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_bias_is_a_bias_at_every_batch_size(rows: int) -> None:
    run = HALF.autocast(lambda w, b, x: jnp.maximum(x @ w + b, 0))
    assert dtypes(run, W, jnp.ones(8), X[:rows], name="add") == ["float16"]


def test_a_position_embedding_promotes_and_a_bias_of_the_layer_does_not() -> None:
    params = {"embed": {"table": jnp.ones((4, 8))}, "layer": {"kernel": W.reshape(8, 2, 4), "bias": jnp.ones((2, 4))}}

    def apply_fn(params: Any, x: Any) -> Any:
        y = jnp.einsum("td,dhk->thk", x, params["layer"]["kernel"]) + params["layer"]["bias"]
        return x @ W + params["embed"]["table"] + y.reshape(4, 8)

    run = HALF.autocast((apply_fn, params))
    assert dtypes(run, X, name="add") == ["float16", "float32", "float32"]


def test_no_tracer_is_kept() -> None:
    with jax.checking_leaks():
        gradient = jax.grad(BRAIN.autocast(lambda w, x: jax.nn.relu(x @ w).sum()))(W, X)
    assert gradient.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_an_eager_call_compiles_once(kind: str) -> None:
    def step(x: Any, _: Any = None) -> Any:  # one function: JAX itself compiles anew for a new one
        return jnp.tanh(x @ W)

    def pair(x: Any, _: Any) -> Any:
        return step(x), None

    def positive(x: Any) -> Any:
        return x.sum() > 9

    loops: dict[str, Callable[[Any], Any]] = {
        "scan": lambda x: lax.scan(pair, x, None, length=2)[0],
        "while": lambda x: lax.while_loop(positive, step, x),
        "cond": lambda x: lax.cond(positive(x), step, jnp.negative, x),
    }
    run = BRAIN.autocast(loops[kind])
    run(X)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    try:
        run(X)
    finally:
        jax.monitoring.clear_event_listeners()
    assert [event for event in compiled if "backend_compile" in event] == []


def test_the_innermost_policy_wins() -> None:
    off = polyamp.Policy(compute="float32").autocast(lambda w, x: x @ w)
    assert dtypes(BRAIN.autocast(lambda w, x: off(w, x)), W, X, name="dot_general") == ["float32"]
    narrow = HALF.autocast(lambda w, x: x @ w)
    assert dtypes(BRAIN.autocast(lambda w, x: narrow(w, x) @ w), W, X, name="dot_general") == ["float16", "bfloat16"]


def test_a_rule_registered_later_holds() -> None:
    primitive: Any = Primitive("late")
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, lambda _, x: [x])
    run = BRAIN.autocast(lambda w, x: primitive.bind(x @ w))
    assert dtypes(run, W, X, name="late") == ["float32"]
    polyamp_jax.register_rule("late", "follow")
    assert dtypes(run, W, X, name="late") == ["bfloat16"]


def test_python_numbers_do_not_promote_in_x64_mode() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        w, x = W.astype(jnp.float32), X.astype(jnp.float32)
        scaled = jax.jit(lambda x, s: x * s)
        assert dtypes(HALF.autocast(lambda w, x: scaled(x @ w, 2.0)), w, x, name="mul") == ["float16"]
        assert dtypes(HALF.autocast(lambda w, x: (x @ w) * jnp.sqrt(8)), w, x, name="mul") == ["float16"]
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_sum_that_the_program_uses_twice_is_cast_as_it_says() -> None:
    """Split arithmetic: the high part is rounded to 16 bits, the low part is what that lost."""

    def low_part(x: Any) -> Any:
        total = x.astype(jnp.float32).sum()
        return total - total.astype(jnp.float16).astype(jnp.float32)

    x = jnp.asarray(np.random.default_rng(0).normal(size=1000) * 3, jnp.float16)
    assert float(HALF.autocast(low_part)(x)) == float(low_part(x)) != 0.0


def test_strings_in_numpy_arrays_pass_untouched() -> None:
    batch = {"x": X, "names": np.array(["a"])}
    np.testing.assert_array_equal(BRAIN.autocast(lambda batch: batch["x"] * len(batch["names"]))(batch), X)


def test_what_is_neither_function_nor_model_is_refused() -> None:
    with pytest.raises(polyamp.ModelError, match=r"autocast takes a function of arrays, or a model: .*Received: int"):
        polyamp_jax.autocast(3, HALF)
