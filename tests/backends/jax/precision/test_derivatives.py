"""Autocast inside remat, custom_jvp and custom_vjp: the products of the rules too.

Each case runs in float16, some in bfloat16; `check` asserts the dtypes of the inner operations, values and gradients
against float32 and against casting by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

import polyamp
from tests.backends.jax.precision.cases import LOW, XS, Table, W, X, close, equations, floats, layer

case = Table()

# remat


@case((W, X), grad=(0, 1))
def remat(ops: Any) -> Any:
    return jax.checkpoint(layer(ops))


@case((W, X), LOW, grad=(0, 1))
def remat_that_saves_products(ops: Any) -> Any:
    return jax.checkpoint(
        lambda w, x: jnp.tanh(ops.dot(jnp.tanh(ops.dot(x, w)), w)), policy=jax.checkpoint_policies.dots_saveable
    )


@case((W, X), LOW, grad=(0, 1))
def remat_that_saves_names(ops: Any) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.checkpoint(
        lambda w, x: jnp.tanh(ops.dot(checkpoint_name(jnp.tanh(ops.dot(x, w)), "hidden"), w)), policy=policy
    )


@case((W, X), grad=(0, 1))
def remat_that_allows_cse(ops: Any) -> Any:
    return jax.checkpoint(layer(ops), prevent_cse=False)


@case((W, XS))
def remat_in_scan(ops: Any) -> Any:
    body = jax.checkpoint(lambda c, x: (ops.keep(jnp.tanh(ops.dot(c, x))), ops.exp(c)), prevent_cse=False)
    return lambda w, xs: lax.scan(body, w, xs)


@case((W, X), grad=(), hand=None)  # by hand the gradient would be cast elsewhere
def grad_of_remat(ops: Any) -> Any:
    return jax.grad(jax.checkpoint(lambda w, x: ops.sum(layer(ops)(w, x))), (0, 1))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_differentiated_remat_stays_differentiated(prevent_cse: bool) -> None:
    function = jax.grad(jax.checkpoint(lambda w, x: jnp.sum(jnp.exp(jnp.sin(x @ w))), prevent_cse=prevent_cse))
    run = polyamp.Policy("mixed_float16").autocast(function)

    def flags(function: Any) -> list[tuple[bool, bool]]:
        found = [e for e in equations(function, W, X) if e.primitive.name in ("checkpoint", "remat2", "remat")]
        return [(e.params["differentiated"], e.params["prevent_cse"]) for e in found]

    assert flags(run) == flags(function) == [(True, prevent_cse)]
    assert {tuple(floats(e.invars)) for e in equations(run, W, X) if e.primitive.name == "dot_general"} == {
        ("float16",)
    }


# custom derivatives


@case((W, X), grad=(0, 1))
def custom_jvp(ops: Any) -> Any:
    function = jax.custom_jvp(layer(ops))

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (w, x), (dw, dx) = primals, tangents
        out = function(w, x)
        return out, ops.keep(out * (ops.dot(dx, w) + ops.dot(x, dw)))

    return function


@case((W, X), grad=(0, 1))
def custom_jvp_with_symbolic_zeros(ops: Any) -> Any:
    function = jax.custom_jvp(layer(ops))

    def rule(primals: Any, tangents: Any) -> Any:
        (w, x), (dw, dx) = primals, tangents
        out, change = function(w, x), jnp.zeros((4, 4))
        for one, other in ((dx, w), (x, dw)):
            if not isinstance(one, SymbolicZero) and not isinstance(other, SymbolicZero):
                change = change + out * ops.dot(one, other)
        return out, change

    function.defjvp(rule, symbolic_zeros=True)
    return function


@case((W, X))
def custom_jvp_with_a_nondiff_argument(ops: Any) -> Any:
    function = jax.custom_jvp(lambda gain, w, x: layer(ops)(w, x) * gain, nondiff_argnums=(0,))

    @function.defjvp
    def rule(gain: float, primals: Any, tangents: Any) -> Any:
        out = function(gain, *primals)
        return out, ops.keep(out * ops.dot(primals[1], tangents[0]))

    return lambda w, x: function(2.0, w, x)


@case((W, X), {"custom_jvp_call": "compute", **LOW})
def custom_jvp_of_jax_itself(ops: Any) -> Any:
    return lambda w, x: ops.keep(jax.nn.relu(ops.dot(x, w)))


def product_rule(ops: Any, function: Any, **options: Any) -> Any:
    """Gives a custom_vjp of (w, x) the derivative of exp(x @ w), with products in both rules."""

    def forward(w: Any, x: Any) -> Any:
        out = ops.exp(ops.dot(x, w))
        return out, (w, x, out)

    def backward(kept: Any, change: Any) -> Any:
        w, x, out = kept
        return ops.keep(ops.dot(x.T, change * out)), ops.keep(ops.dot(change * out, w.T))

    function.defvjp(forward, backward, **options)
    return function


@case((W, X), grad=(0, 1))
def custom_vjp(ops: Any) -> Any:
    return product_rule(ops, jax.custom_vjp(layer(ops)))


@case((W, X))
def custom_vjp_with_a_nondiff_argument(ops: Any) -> Any:
    function = jax.custom_vjp(lambda gain, w, x: layer(ops)(w, x) * gain, nondiff_argnums=(0,))

    def backward(gain: float, kept: Any, change: Any) -> Any:
        return ops.keep(ops.dot(kept[1].T, change)), None

    function.defvjp(lambda gain, w, x: (layer(ops)(w, x) * gain, (w, x)), backward)
    return lambda w, x: function(2.0, w, x)


@case((W, X), grad=(0, 1))
def custom_vjp_of_pytrees(ops: Any) -> Any:
    function = jax.custom_vjp(lambda tree: {"out": layer(ops)(tree["w"], tree["x"]), "sum": ops.sum(tree["x"])})

    def backward(tree: Any, change: Any) -> Any:
        x = ops.keep(ops.dot(change["out"], tree["w"].T)) + change["sum"]
        return ({"w": ops.keep(ops.dot(tree["x"].T, change["out"])), "x": x},)

    function.defvjp(lambda tree: (function(tree), tree), backward)
    return lambda w, x: function({"w": w, "x": x})


@case((W, X), grad=(0,))
def custom_vjp_with_symbolic_zeros(ops: Any) -> Any:
    function = jax.custom_vjp(lambda w, x: (layer(ops)(w, x), x * 2))

    def forward(w: Any, x: Any) -> Any:
        assert w.perturbed
        assert not x.perturbed
        return function(w.value, x.value), x.value

    def backward(x: Any, change: Any) -> Any:
        return ops.keep(ops.dot(x.T, change[0])), None

    function.defvjp(forward, backward, symbolic_zeros=True)
    return lambda w, x: function(w, lax.stop_gradient(x))[0]


@case((W, X, jnp.arange(4)), grad=(0, 1))
def custom_vjp_with_integers(ops: Any) -> Any:
    function = jax.custom_vjp(lambda w, x, n: layer(ops)(w, x[n]))

    def backward(kept: Any, change: Any) -> Any:
        w, x, n = kept
        return ops.keep(ops.dot(x[n].T, change)), jnp.zeros_like(x).at[n].add(ops.keep(ops.dot(change, w.T))), None

    function.defvjp(lambda w, x, n: (function(w, x, n), (w, x, n)), backward)
    return function


@case((W, X), grad=(), hand=4e-3)  # the gradient is traced in float32 and rewritten: its casts stand elsewhere
def custom_vjp_over_a_tracer_of_the_closure(ops: Any) -> Any:
    def program(w: Any, x: Any) -> Any:
        mask = ops.exp(
            x
        )  # a tracer in both rules: JAX allows it where the differentiation is inside the trace, as here
        function = jax.custom_vjp(lambda w: ops.exp(ops.dot(mask, w)))
        function.defvjp(lambda w: (function(w), mask), lambda kept, change: (ops.keep(ops.dot(kept.T, mask * change)),))
        return jax.grad(lambda w: ops.sum(function(w)))(w)

    return program


@case((W, X))
def custom_vjp_of_a_function_with_a_closure(ops: Any) -> Any:
    def program(w: Any, x: Any) -> Any:
        function = jax.custom_vjp(lambda w, x: ops.exp(ops.dot(x + offset, w)))
        offset = np.arange(4, dtype=np.float32)
        function.defvjp(
            lambda w, x: (function(w, x), x + offset), lambda kept, change: (ops.keep(ops.dot(kept.T, change)), None)
        )
        return function(w, x)

    return program


def test_a_rule_over_a_tracer_is_refused_outside_the_trace_as_under_jit() -> None:
    def program(w: Any) -> Any:
        mask = jnp.exp(X * jnp.arange(4.0))
        function = jax.custom_vjp(lambda w: mask @ w)
        function.defvjp(lambda w: (mask @ w, None), lambda _, change: (mask.T @ change,))
        return jnp.sum(function(w))

    run = polyamp.Policy("mixed_float16").autocast
    for wrapped in (jax.checkpoint(program), run(program)):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.grad(wrapped)(W)
    close(run(jax.grad(program))(W), jax.grad(program)(W), 1e-2)


def test_custom_vjp_that_optimizes_remat() -> None:
    function = jax.custom_vjp(lambda w, x: jnp.exp(x @ w))
    function.defvjp(
        lambda w, x: (function(w, x), (w, x)), lambda kept, change: (kept[1].T @ change, None), optimize_remat=True
    )
    run = jax.grad(lambda w, x: jnp.sum(polyamp.Policy("mixed_float16").autocast(function)(w, x)))
    products = [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == "dot_general"]
    assert products == [{"float16"}] * 2


@pytest.mark.parametrize(("name", "dtype"), case.parameters())
def test_inner_operations_run_in_the_dtypes_of_the_lists(name: str, dtype: str) -> None:
    case.programs[name](dtype)


@jax.custom_jvp
def product_with_a_rule(w: Any, x: Any) -> Any:
    return x @ w


product_with_a_rule.defjvp(
    lambda primals, tangents: (
        product_with_a_rule(*primals) + jnp.exp(0 * primals[0].sum()) - 1,
        jnp.exp(0 * (primals[1] @ primals[0])) * tangents[0].sum(),
    )
)


def test_a_custom_jvp_rule_that_ends_in_float32_gives_tangents_in_the_output_dtype() -> None:
    """JAX requires it; the rule's exp runs in float32, and so its results are wider than the product."""
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    policy = polyamp.Policy(param="float32", compute="float16", output="float16")
    run = policy.autocast(lambda w: product_with_a_rule(w, x), backend="jax")
    primal, tangent = jax.jvp(run, (w,), (2 * w,))
    assert (primal.dtype, tangent.dtype) == ("float16", "float16")
    np.testing.assert_array_equal(primal, np.full((4, 2), 3.0))
    np.testing.assert_array_equal(tangent, np.full((4, 2), 12.0))
    found = equations(lambda w: jax.jvp(run, (w,), (2 * w,)), w)
    assert {e.primitive.name: floats(e.invars) for e in found if e.primitive.name in ("dot_general", "exp")} == {
        "dot_general": {"float16"},
        "exp": {"float32"},
    }


def multiplied(w: Any, x: Any) -> Any:
    return product_with_a_rule(w, x) * (x @ w)


def chosen(w: Any, x: Any) -> Any:
    return lax.select(x[:, :2] > 0, product_with_a_rule(w, x), x @ w)


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, product_with_a_rule, lambda w, x: x @ w, w, x)


def rematerialized(w: Any, x: Any) -> Any:
    return jax.checkpoint(multiplied)(w, x)


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda carry, row: (carry, multiplied(w, row[None])[0]), 0.0, x)[1]


def batched(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: multiplied(w, row[None])[0])(x)


@pytest.mark.parametrize(
    ("program", "value", "change"),
    [
        (multiplied, 9, 54),
        (chosen, 3, 12),
        (branched, 3, 12),
        (rematerialized, 9, 54),
        (scanned, 9, 54),
        (batched, 9, 54),
    ],
)
@pytest.mark.parametrize("transform", [lambda run: run, jax.jit], ids=["eager", "jit"])
def test_the_results_of_a_custom_jvp_rule_fit_what_is_computed_from_its_output(
    program: Any, value: float, change: float, transform: Any
) -> None:
    """JAX checks a rule as its author wrote it; of the rewritten rule it takes results of any dtype as they are."""
    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    policy = polyamp.Policy(param="float32", compute="float16", output="float16")
    run = policy.autocast(lambda w: program(w, x), backend="jax")
    primal, tangent = transform(lambda w: jax.jvp(run, (w,), (2 * w,)))(w)
    assert (primal.dtype, tangent.dtype) == ("float16", "float16")
    np.testing.assert_array_equal(primal, np.full((4, 2), value))
    np.testing.assert_array_equal(tangent, np.full((4, 2), change))
    linear = transform(lambda dw: jax.linearize(run, w)[1](dw))(2 * w)
    assert linear.dtype == "float16"
    np.testing.assert_array_equal(linear, tangent)
    gradient = transform(jax.grad(lambda w: jnp.sum(run(w).astype("float32"))))(w)
    assert gradient.dtype == "float32"
    np.testing.assert_array_equal(gradient, np.full((3, 2), 8 * change / 12))
