"""Autocast over code of others: kernels, callbacks, solvers, composites, and compiled and exported programs.

`check` asserts the dtypes of the inner operations, values and gradients against
float32 and against casting by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import polyamp
from tests.backends.jax.precision.cases import LOW, By, Plain, Table, W, X, close, equations, floats, layer

case = Table()

SPD = X @ X.T + 2 * jnp.eye(4)
HALF = polyamp.Policy("mixed_float16")


def opaque(ops: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in float32, of a product."""
    return lambda w, x: function(ops.keep(ops.dot(x, w)))


# code of others


def kernel(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.exp(x_ref[...] + w_ref[...])


@case((W, X), {**LOW, "pallas_call": "float32", "exp": "float32"}, grad=())
def pallas(ops: Any) -> Any:
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((4, 4), jnp.float32), interpret=True)
    return lambda w, x: call(ops.keep(ops.dot(x, w)), w)


@case((W, X), {**LOW, "pure_callback": "float32"}, grad=())
def pure_callback(ops: Any) -> Any:
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return opaque(ops, lambda y: jax.pure_callback(lambda y: np.asarray(y) * 2, shape, y))


def seen_by(call: Callable[..., Any]) -> tuple[list[Any], Callable[..., Any]]:
    seen: list[Any] = []

    def run(w: Any, x: Any) -> Any:
        y = x @ w
        call(lambda y: seen.append(np.asarray(y)), y)
        return y

    return seen, run


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("name", "call", "dtype"),
    [
        ("io_callback", lambda f, y: io_callback(f, None, y), "float32"),
        ("io_callback", lambda f, y: io_callback(f, None, y, ordered=True), "float32"),
        ("debug_callback", lambda f, y: jax.debug.callback(f, y), "float16"),
        ("debug_callback", lambda f, y: jax.debug.callback(f, y, ordered=True), "float16"),
    ],
)
def test_callbacks(name: str, call: Any, dtype: str, jit: bool) -> None:
    seen, program = seen_by(call)
    run = HALF.autocast(program)
    out = (jax.jit(run) if jit else run)(W, X)
    jax.effects_barrier()
    assert [y.dtype.name for y in seen] == [dtype]
    close(seen[0], out, 1e-7)
    assert [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == name] == [{dtype}]
    if name == "debug_callback":  # JAX does not differentiate the others
        close(jax.grad(lambda w: jnp.sum(run(w, X)))(W), jnp.sum(X, 0)[:, None] * jnp.ones((1, 4)), 4e-3)


def test_debug_print_shows_the_value_as_it_is(capfd: Any) -> None:
    def program(w: Any, x: Any) -> Any:
        y = x @ w
        jax.debug.print("product {}", y.sum())
        return y

    out = HALF.autocast(program)(W, X)
    jax.effects_barrier()
    printed = float(capfd.readouterr().out.split()[1])
    assert printed == pytest.approx(float(out.sum()), abs=1e-2)


def test_foreign_functions_get_what_they_were_written_for() -> None:
    target = "polyamp_test_no_such_target"
    out = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    run = HALF.autocast(lambda w, x: jax.ffi.ffi_call(target, out)(x @ w))
    found = equations(run, W, X)
    assert [floats(e.invars) for e in found if e.primitive.name == "ffi_call"] == [{"float32"}]
    assert [floats(e.invars) for e in found if e.primitive.name == "dot_general"] == [{"float16"}]


@case((W, X), {**LOW, "custom_linear_solve": "float32", "lu": "float32"}, wide=6)
def solve(ops: Any) -> Any:
    return lambda w, x: jnp.linalg.solve(SPD, ops.keep(ops.dot(x, w)))


@pytest.mark.parametrize("inside", ["around", "inside"])
def test_conjugate_gradients_stay_in_float32(inside: str) -> None:
    def program(w: Any, x: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda v: w @ v, x[0], maxiter=8)[0]

    function = program if inside == "around" else lambda w, x: jax.grad(lambda w: jnp.sum(program(w, x)))(w)
    run = HALF.autocast(function)
    solver = [e for e in equations(run, SPD, X) if e.primitive.name == "custom_linear_solve"]
    assert solver
    assert all(floats(e.invars) == {"float32"} for e in solver)
    close(run(SPD, X), function(SPD, X), 4e-3)


def test_custom_vmap_keeps_its_own_rule() -> None:
    rules = []

    @jax.custom_batching.custom_vmap
    def scaled(x: Any) -> Any:
        return jnp.exp(x)

    @scaled.def_vmap
    def rule(axis_size: int, in_batched: Any, x: Any) -> Any:
        rules.append(axis_size)
        return jnp.exp(x), True

    run = HALF.autocast(lambda w, x: scaled(x @ w))
    close(run(W, X), jnp.exp(X @ W), 4e-3)
    close(jax.vmap(run, (None, 0))(W, X[:, None]), jnp.exp(X @ W)[:, None], 4e-3)
    assert rules == [4]
    found = [e for e in equations(run, W, X) if e.primitive.name == "exp"]
    assert [floats(e.invars) for e in found] == [{"float32"}]


@case((W, X), {**LOW, "exp": "float32"}, grad=())
def composite(ops: Any) -> Any:
    double = lax.composite(lambda x: jnp.exp(x) * 2, name="my.double")
    return opaque(ops, double)


# compilation


def test_ahead_of_time_compilation_and_donation() -> None:
    run = HALF.autocast(layer(Plain()))
    compiled = jax.jit(run, donate_argnums=1).lower(W, X).compile()
    donated = X + 0
    close(compiled(W, donated), layer(By("float16"))(W, X), 1e-6)
    assert donated.is_deleted()
    assert "f16[4,4]" in jax.jit(run).lower(W, X).as_text("hlo")


def test_exported_programs_keep_the_dtypes() -> None:
    made = export.export(jax.jit(HALF.autocast(layer(Plain()))))(W, X)
    assert "xf16>" in made.mlir_module()
    again = export.deserialize(made.serialize(vjp_order=1))
    close(again.call(W, X), layer(By("float16"))(W, X), 1e-6)
    assert jax.grad(lambda w: jnp.sum(again.call(w, X)))(W).dtype == jnp.float32


def test_a_call_of_an_exported_program_is_left_alone() -> None:

    made = export.export(jax.jit(layer(Plain())))(W, X)
    run = HALF.autocast(lambda w, x: made.call(w, x @ w))
    found = equations(run, W, X)
    assert [floats(e.invars) for e in found if e.primitive.name == "call_exported"] == [{"float32"}]
    close(run(W, X), jnp.exp(X @ W @ W), 1e-2)


@pytest.mark.parametrize(("name", "dtype"), case.parameters())
def test_code_of_others_gets_float32(name: str, dtype: str) -> None:
    case.programs[name](dtype)
