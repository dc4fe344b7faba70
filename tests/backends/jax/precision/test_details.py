"""What autocast must keep: traits across borders, parameters of operations, scopes, owners, and the report's rows."""

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
from tests.backends.jax.precision.cases import close, equations, floats
from tests.backends.jax.precision.test_structure import XS, W, X
from tests.backends.jax.precision.test_transforms import mesh

HALF = polyamp.Policy("mixed_float16")


ROWS = XS[:, 0]


@jax.custom_jvp
def linear(w: Any, b: Any, x: Any) -> Any:
    return x @ w + b


linear.defjvp(lambda primals, tangents: (linear(*primals), tangents[0]))

BIASES: dict[str, Callable[..., Any]] = {
    "scan over the biases": lambda w, b, x: lax.scan(lambda c, b: (jnp.tanh(c @ w + b), None), x, ROWS)[0],
    "scan, of the closure": lambda w, b, x: lax.scan(lambda c, _: (jnp.tanh(c @ w + b), None), x, length=2)[0],
    "while, of the closure": lambda w, b, x: lax.while_loop(lambda c: c[0, 0] > 9, lambda c: jnp.tanh(c @ w + b), x),
    "cond": lambda w, b, x: lax.cond(x[0, 0] > 0, lambda w, b, x: x @ w + b, lambda w, b, x: x @ w, w, b, x),
    "jit": jax.jit(lambda w, b, x: x @ w + b),
    "remat": jax.checkpoint(lambda w, b, x: x @ w + b),
    "custom_jvp": linear,
    "shard_map": lambda w, b, x: jax.shard_map(
        lambda w, b, x: x @ w + b, mesh=mesh(), in_specs=(P(), P(), P("d")), out_specs=P("d")
    )(w, b, x),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_inside_is_added_in_16_bits(name: str) -> None:
    """A parameter is known as one inside the operation too, and belongs to the product that it is added to."""
    found = equations(HALF.autocast(BIASES[name]), W, X[0], X)
    assert [floats(e.invars) for e in found if e.primitive.name == "add"] == [{"float16"}]


SHAPES: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda b: b.reshape(1, -1),
    "expand_dims": lambda b: b[None],
    "squeeze": lambda b: b.reshape(1, 1, -1)[0],
    "transpose": lambda b: b.reshape(-1, 1).T,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_parameter_in_another_shape_is_cast_before_it_takes_it(name: str) -> None:
    """Its gradient is widened last, next to the optimizer, where XLA fuses the cast. Two uses are summed in float32."""

    def run(b: Any, x: Any) -> Any:
        return HALF.autocast(lambda b, x: x @ W + SHAPES[name](b))(b, x).astype("float32")

    b, x = X[0], X[:1]
    casts = [e.invars[0].aval.shape for e in equations(run, b, x) if e.params.get("new_dtype") == np.float16]
    assert sorted(casts) == sorted([b.shape, x.shape, W.shape])
    program = jax.make_jaxpr(jax.grad(lambda b: run(b, x).sum()))(b).jaxpr
    (last,) = [eqn for eqn in program.eqns if program.outvars[0] in eqn.outvars]
    assert (last.primitive.name, last.invars[0].aval.dtype) == ("convert_element_type", np.float16)
    twice = jax.grad(lambda b: (2048 * run(b, x) + run(b, x)).sum())(b)
    np.testing.assert_array_equal(twice, np.full(b.shape, 2049.0, np.float32), "2048 in float16")


def test_a_jit_is_rewritten_for_every_number_it_is_called_with() -> None:
    inner = jax.jit(lambda x, n: jnp.tanh(x) * n)
    run = HALF.autocast(lambda w, x: (inner(x @ w, 2.0), inner(x @ w, 3.0), inner(x @ w, 2)))
    two, three, again = run(W, X)
    assert [floats(e.invars) for e in equations(run, W, X) if e.primitive.name == "mul"] == [{"float16"}] * 3
    close(three, two * 1.5, 2e-3)
    np.testing.assert_array_equal(two, again)


def test_a_jit_called_in_two_scopes_is_rewritten_for_each(products: Any) -> None:
    inner = jax.jit(lambda w, x: x @ w)

    def run(w: Any, x: Any) -> Any:
        return tuple(jax.named_scope(scope)(inner)(w, x) for scope in ("narrow", "wide", "narrow"))

    policy = polyamp.Policy("mixed_float16", overrides={"wide": "float32"})
    narrow = ("float16", "float16")
    assert products(policy.autocast(run), W, X) == [narrow, ("float32", "float32"), narrow]


@pytest.mark.parametrize("wide_first", [True, False])
@pytest.mark.parametrize("taken", [0, 1])
def test_branches_meet_in_the_widest_of_their_dtypes(taken: int, wide_first: bool) -> None:
    """Neither branch is rounded for the other's sake; where they agree on 16 bits the result has 16 bits."""
    wide, narrow = (lambda w, x: jnp.exp(x @ w)), (lambda w, x: jnp.tanh(x @ w))
    branches = [wide, narrow] if wide_first else [narrow, wide]
    run = HALF.autocast(lambda w, x, n: lax.switch(n, branches, w, x))
    alone = HALF.autocast(branches[taken])
    np.testing.assert_array_equal(run(W, X, jnp.asarray(taken)), alone(W, X))

    def results(branches: Any) -> list[set[str]]:
        found = equations(HALF.autocast(lambda w, x, n: lax.switch(n, branches, w, x)), W, X, taken)
        return [floats(e.outvars) for e in found if e.primitive.name == "cond"]

    assert results(branches) == [{"float32"}]
    assert results([narrow, lambda w, x: w @ x]) == [{"float16"}]


SAVED = jax.checkpoint_policies.dots_saveable
KEPT: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "scan": (
        "scan",
        lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=4, unroll=2, _split_transpose=True),
        ("length", "reverse", "unroll", "_split_transpose"),
    ),
    "scan in reverse": (
        "scan",
        lambda w, x: lax.scan(lambda c, y: (jnp.tanh(c @ w + y), None), x, XS, reverse=True),
        ("length", "reverse", "unroll", "_split_transpose"),
    ),
    "remat": (
        "remat2|checkpoint|remat",
        jax.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=SAVED),
        ("policy", "prevent_cse", "differentiated"),
    ),
    "jit": (
        "jit|pjit",
        jax.jit(
            lambda w, x: jnp.tanh(x @ w),
            in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            keep_unused=True,
            inline=False,
        ),
        ("in_shardings", "out_shardings", "keep_unused", "inline", "name"),
    ),
    "shard_map": (
        "shard_map",
        jax.shard_map(
            lambda w, x: jnp.tanh(x @ w), mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False
        ),
        ("mesh", "in_specs", "out_specs", "check_vma"),
    ),
    "shard_map over one axis": (
        "shard_map",
        jax.jit(
            jax.shard_map(
                lambda w, x: jnp.tanh(x @ w),
                mesh=mesh(("d", "m")),
                in_specs=(P(), P("d")),
                out_specs=P("d"),
                axis_names={"d"},
            )
        ),
        ("mesh", "in_specs", "out_specs", "check_vma", "manual_axes|newly_manual_axes"),
    ),
}
"""Name -> (primitive, program, parameters of the operation that autocast must not change)."""


@pytest.mark.parametrize("name", KEPT)
def test_operations_keep_their_parameters(name: str) -> None:
    primitives, program, names = KEPT[name]

    def found(function: Any) -> list[dict[str, Any]]:
        return [
            {key: e.params[key] for group in names for key in group.split("|") if key in e.params}
            for e in equations(function, W, X)
            if e.primitive.name in primitives.split("|")
        ]

    ours = found(HALF.autocast(program))
    assert ours == found(program)
    assert len(ours) == 1
    assert len(ours[0]) >= 3


# programs


@pytest.mark.parametrize("precision", [lax.DotAlgorithmPreset.F32_F32_F32, lax.DotAlgorithmPreset.TF32_TF32_F32])
def test_a_product_by_a_named_algorithm_runs_in_the_dtypes_that_it_names(precision: Any) -> None:
    run = HALF.autocast(lambda w, x: lax.dot(jnp.tanh(x @ w), w, precision=precision))
    found = [e for e in equations(run, W, X) if e.primitive.name == "dot_general"]
    assert [floats([*e.invars, *e.outvars]) for e in found] == [{"float16"}, {"float32"}]
    assert found[1].params["precision"] == precision


# structure


def test_the_report_is_whole_after_the_function_has_run() -> None:
    inner = jax.jit(lambda x, w: x @ w)

    def run(x: Any, w: Any) -> Any:
        return inner(x, w) + inner(x, w)

    before = polyamp.explain(run, HALF, X, W)
    HALF.autocast(run)(X, W)
    assert polyamp.explain(run, HALF, X, W) == before
    assert [row.count for row in before.operations if row.name == "dot_general"] == [2]


# overrides


def test_an_override_of_a_parameters_owner_holds_where_no_scope_has_one(products: Any) -> None:
    def apply_fn(params: Any, x: Any) -> Any:
        x = x @ params["first"]["w"]
        with jax.named_scope("second"):
            return x @ params["first"]["w"].T

    def found(**overrides: str) -> Any:
        model = (apply_fn, {"first": {"w": W}, "second": {"w": W}})
        return products(polyamp.Policy("mixed_float16", overrides=overrides).autocast(model), X)

    narrow, wide = ("float16", "float16"), ("float32", "float32")
    assert found() == [narrow, narrow]
    assert found(first="float32") == [wide, wide]
    assert found(second="float32") == [narrow, wide]
    assert found(first="float32", second="bfloat16") == [wide, ("bfloat16", "bfloat16")]


# more


def names(function: Any, *args: Any, name: str) -> list[set[str]]:
    return [floats(e.invars) for e in equations(function, *args) if e.primitive.name == name]


def test_rows_looked_up_in_a_table_are_no_bias_and_a_layers_row_is() -> None:
    run = HALF.autocast(lambda table, w, x, n: x @ w + table[n])
    assert names(run, W, W, X, jnp.asarray([2]), name="add")[-1] == {"float32"}
    assert names(HALF.autocast(lambda table, w, x: x @ w + table[2]), W, W, X, name="add") == [{"float16"}]


def test_a_weakly_typed_carry_takes_the_dtype_of_what_it_meets() -> None:
    run = HALF.autocast(lambda w, x: lax.scan(lambda c, _: (c * 0.5, jnp.tanh(x @ w) * c), 1.0, length=2)[1])
    assert names(run, W, X, name="mul") == [{"float32"}, {"float16"}]


def test_a_float32_override_raises_what_comes_in_and_moves_stay() -> None:
    def run(w: Any, x: Any) -> Any:
        y = x @ w
        with jax.named_scope("head"):
            return jnp.tanh(y), y.T

    policy = polyamp.Policy("mixed_float16", overrides={"head": "float32"})
    assert polyamp.explain(run, policy, W, X).operations[-1][:5] == ("head", "tanh", "float32", "override", 1)
    assert names(policy.autocast(run), W, X, name="transpose") == [{"float16"}]


def test_names_and_metadata_around_operations_are_kept() -> None:
    from jax.experimental.xla_metadata import set_xla_metadata

    def run(w: Any, x: Any) -> Any:
        with jax.named_scope("inner"), set_xla_metadata(mark="here"):
            return jnp.tanh(x @ w)

    found = equations(jax.named_scope("outer")(HALF.autocast(run)), W, X)
    (tanh,) = [e for e in found if e.primitive.name == "tanh"]
    assert str(tanh.source_info.name_stack) == "outer/inner"
    assert "here" in str(tanh.ctx.xla_metadata)


def test_a_cast_parameter_keeps_its_owner(products: Any) -> None:
    half = polyamp.Policy("mixed_float16", overrides={"first": "bfloat16"})
    model = (lambda p, x: jnp.tanh(x) @ p["first"]["w"].astype("float16").astype("float32"), {"first": {"w": W}})
    assert products(half.autocast(model), X) == [("bfloat16", "bfloat16")]


def test_the_report_gives_a_shared_module_its_own_path() -> None:
    from tests.backends.jax.precision.test_overrides import Shared

    rows = polyamp.explain(Shared(), HALF, X).operations
    assert [(r.module, r.count) for r in rows if r.name == "dot_general"] == [("first", 2), ("second/own", 1)]
