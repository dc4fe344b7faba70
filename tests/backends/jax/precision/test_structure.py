"""Autocast inside nested jit, loops and branches.

Each case runs in float16, some in bfloat16; `check` asserts the dtypes of the inner operations, values and gradients
against float32 and against casting by hand.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import polyamp
from tests.backends.jax.precision.cases import LOW, XS, Table, W, X, close, equations, layer

case = Table()

# nested jit


@case((W, X), grad=(0, 1))
def jit(ops: Any) -> Any:
    return jax.jit(layer(ops))


@case((W, X), grad=(0, 1))
def jit_of_jit(ops: Any) -> Any:
    inner = jax.jit(lambda w, x: jnp.tanh(ops.dot(x, w)))
    return jax.jit(lambda w, x: ops.exp(inner(w, inner(w, x))))


@case((W, X), LOW)
def jit_with_donated_arguments(ops: Any) -> Any:
    inner = jax.jit(lambda w, x: jnp.tanh(ops.dot(x, w)), donate_argnums=1)
    return lambda w, x: inner(w, x + 1)


@case((W, X))
def jit_with_static_arguments(ops: Any) -> Any:
    inner = jax.jit(lambda w, x, power, *, gain: ops.exp(ops.dot(x, w) * gain) / power, static_argnums=2)
    return lambda w, x: inner(w, x, 3, gain=2.0)


@case((W, X))
def jit_with_shardings(ops: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(layer(ops), in_shardings=here, out_shardings=here)


@case((W, X))
def jit_that_keeps_unused(ops: Any) -> Any:
    inner = jax.jit(lambda w, x, unused: layer(ops)(w, x), keep_unused=True)
    return lambda w, x: inner(w, x, jnp.arange(3.0))


@case((W, X), LOW)
def jit_called_twice(ops: Any) -> Any:
    inner = jax.jit(lambda w, x: ops.dot(x, w))
    return lambda w, x: inner(w, inner(w, x))


@case((W, X))
def jit_called_with_other_dtypes(ops: Any) -> Any:
    inner = jax.jit(lambda x: ops.exp(x) * 2)
    return lambda w, x: inner(x) + inner(ops.dot(x, w)) + inner(x[0])


# loops


@case((W, X, XS), grad=(0, 1, 2), hand=2e-3)  # one cast of the carry for two products: cotangents meet in 16 bits
def scan(ops: Any) -> Any:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        return ops.keep(jnp.tanh(ops.dot(carry, x))), ops.exp(ops.dot(x, carry))

    return lambda w, x, xs: lax.scan(body, x * w, xs)


@case((W, X))
def scan_without_xs(ops: Any) -> Any:
    return lambda w, x: lax.scan(lambda c, _: (ops.keep(jnp.tanh(ops.dot(c, w))), ops.exp(c)), x, None, length=3)


@case((W, X, XS), LOW, grad=(0, 1, 2))
def scan_in_reverse(ops: Any) -> Any:
    return lambda w, x, xs: lax.scan(lambda c, y: (ops.keep(jnp.tanh(ops.dot(c, w) + y)), c), x, xs, reverse=True)


@case((W, X, XS), LOW, grad=(0, 1))
def scan_unrolled(ops: Any) -> Any:
    return lambda w, x, xs: lax.scan(
        lambda c, y: (ops.keep(jnp.tanh(ops.dot(ops.dot(c, y), w))), None), x, xs, unroll=2
    )


@case((X,))
def scan_over_weights_of_the_closure(ops: Any) -> Any:
    return lambda x: lax.scan(lambda c, y: (ops.keep(jnp.tanh(ops.dot(c, W) @ ops.cast(y))), ops.exp(c)), x, XS)


@case((W, X), LOW)
def scan_with_an_integer_carry(ops: Any) -> Any:
    def body(carry: Any, _: Any) -> tuple[Any, Any]:
        n, c = carry
        return (n + 1, ops.keep(ops.dot(c, W))), n

    return lambda w, x: lax.scan(body, (0, x * w), None, length=3)


@case((W, XS), LOW)
def scan_with_a_weakly_typed_carry(ops: Any) -> Any:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        return carry * 0.5, ops.dot(x, W) * ops.cast(carry)

    return lambda w, xs: lax.scan(body, 1.0, xs * w)


@case((W, X), grad=())
def while_loop(ops: Any) -> Any:
    def program(w: Any, x: Any) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < 3) & (ops.sum(ops.exp(s[1])) < 1e4),
            lambda s: (s[0] + 1, ops.keep(jnp.tanh(ops.dot(s[1], w)))),
            (0, x),
        )

    return program


@case((W, X), LOW, grad=())
def while_loop_with_a_product_in_its_test(ops: Any) -> Any:
    return lambda w, x: lax.while_loop(lambda s: ops.dot(s, s)[0, 0] < 50, lambda s: s + 1, x * w)


@case((W, X), LOW)
def fori_loop_of_static_length(ops: Any) -> Any:
    return lambda w, x: lax.fori_loop(0, 3, lambda i, c: ops.keep(jnp.tanh(ops.dot(c, w))) + i, x)


@case((W, X, jnp.asarray(3)), LOW, grad=())
def fori_loop_of_dynamic_length(ops: Any) -> Any:
    return lambda w, x, n: lax.fori_loop(0, n, lambda i, c: ops.keep(jnp.tanh(ops.dot(c, w))) + i, x)


@case((W, XS), grad=(0, 1))
def lax_map(ops: Any) -> Any:
    return lambda w, xs: lax.map(lambda x: layer(ops)(w, x), xs)


@case((W, XS), grad=(0, 1))
def lax_map_in_batches(ops: Any) -> Any:
    return lambda w, xs: lax.map(lambda x: layer(ops)(w, x), xs, batch_size=2)


@case((XS,), LOW, hand=4e-3)  # as in `scan`
def associative_scan(ops: Any) -> Any:
    return lambda xs: lax.associative_scan(lambda a, b: ops.keep(ops.dot(a, b)), xs)


# branches


@case((W, X), grad=(0, 1))
def cond(ops: Any) -> Any:
    return lambda w, x: lax.cond(x[0, 0] > 0, layer(ops), lambda w, x: ops.keep(jnp.tanh(ops.dot(x, w))), w, x)


@case((W, X), LOW)
def cond_whose_branches_agree(ops: Any) -> Any:
    return lambda w, x: lax.cond(x[0, 0] > 0, lambda: jnp.tanh(ops.dot(x, w)), lambda: ops.dot(w, x))


@case((W, X, jnp.asarray(1)))
def switch(ops: Any) -> Any:
    branches = [lambda w, x: x, lambda w, x: ops.keep(ops.dot(x, w)), layer(ops)]
    return lambda w, x, n: lax.switch(n, branches, w, x)


@case((W, X, jnp.asarray(7)))
def switch_out_of_range(ops: Any) -> Any:
    return lambda w, x, n: lax.switch(n, [lambda: x, lambda: layer(ops)(w, x)])


def test_a_donated_argument_is_donated_where_the_dtypes_allow_it() -> None:
    """And otherwise kept, without JAX's warning that it could not be used."""
    policy = polyamp.Policy("mixed_float16")
    for inner, donated in ((lambda w, x: jnp.exp(x @ w), True), (lambda w, x: jnp.tanh(x @ w), False)):
        run = policy.autocast(jax.jit(inner, donate_argnums=1))
        (call,) = [e for e in equations(run, W, X) if "donated_invars" in e.params]
        assert call.params["donated_invars"] == (False, donated)
        close(run(W, X + 0), inner(W, X), 4e-3)


@pytest.mark.parametrize(("name", "dtype"), case.parameters())
def test_inner_operations_run_in_the_dtypes_of_the_lists(name: str, dtype: str) -> None:
    case.programs[name](dtype)
