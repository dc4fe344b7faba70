"""What a user sees and sets of autocast: the casting report, `strict`, `op_rules`, scopes, `keep_precision`."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import polyamp
import polyamp_jax
from polyamp.contract.casting_report import CastCount, OperationCount
from polyamp.errors import PolicyError, UnsupportedError
from polyamp.rules.operation_names import OPERATION_NAMES
from polyamp_jax.precision import op_list

MIXED = polyamp.Policy("mixed_float16")
X, W = jnp.ones((2, 4)), jnp.ones((4, 3))
NARROW, WIDE = ("float16", "float16"), ("float32", "float32")


def primitive(name: str) -> Any:
    """A primitive of one's own: doubles its operand; JAX can differentiate, batch and compile it."""
    made = Primitive(name)
    made.def_impl(lambda x: x * 2)
    made.def_abstract_eval(lambda x: x)
    ad.deflinear2(made, lambda ct, x: [ct * 2])
    batching.primitive_batchers[made] = lambda args, dims: (made.bind(*args), dims[0])
    mlir.register_lowering(made, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    return made


DOUBLE = primitive("test_report_double")


def head(x: Any, w: Any, b: Any) -> Any:
    with jax.named_scope("head"):
        return jax.nn.softmax(x @ w + b)


def policy(**overrides: str) -> polyamp.Policy:
    return polyamp.Policy("mixed_float16", overrides={k.replace("__", "/"): v for k, v in overrides.items()})


def test_the_report_of_a_function() -> None:
    report = polyamp.explain(head, MIXED, X, W, jnp.zeros(3))
    assert report.policy == MIXED
    assert report.operations == (
        OperationCount("head", "dot_general", "float16", "compute", 1),
        OperationCount("head", "add", "float16", "compute (bias)", 1),
        OperationCount("head", "reduce_max", "float16", "follow", 1),
        OperationCount("head", "max", "float16", "promote", 1),
        OperationCount("head", "sub", "float32", "float32 (shift)", 1),
        OperationCount("head", "exp", "float32", "float32", 1),
        OperationCount("head", "reduce_sum", "float32", "float32", 1),
        OperationCount("head", "div", "float32", "promote", 1),
    )
    assert report.casts == (CastCount("float16", "float32", 2), CastCount("float32", "float16", 3))
    assert report.opaque == report.unknown == ()


def test_the_report_prints_as_a_table() -> None:
    def run(x: Any, w: Any) -> Any:
        with jax.named_scope("inner"):
            y = jnp.exp(x @ w)
        return DOUBLE.bind(y + jax.lax.reduce_precision(y, 5, 10))

    assert str(polyamp.explain(run, MIXED, X, W)) == (
        "Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]\n"
        "\n"
        "module  operation           dtype    rule     count\n"
        "------  ------------------  -------  -------  -----\n"
        "inner   dot_general         float16  compute      1\n"
        "inner   exp                 float32  float32      1\n"
        ".       reduce_precision    float32  opaque       1\n"
        ".       add                 float32  promote      1\n"
        ".       test_report_double  float32  unknown      1\n"
        "\n"
        "casts: 1 float16 -> float32, 2 float32 -> float16\n"
        "opaque: reduce_precision, test_report_double\n"
        "no op list names: test_report_double"
    )


def test_the_report_is_plain_data_and_compares_by_value() -> None:
    report = polyamp.explain(head, MIXED, X, W, jnp.zeros(3))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["operations"][0] == {
        "module": "head",
        "name": "dot_general",
        "dtype": "float16",
        "rule": "compute",
        "count": 1,
        "direction": "forward",
    }
    assert data["casts"][0] == {"source": "float16", "target": "float32", "count": 2}
    assert polyamp.Policy(**data["policy"]) == MIXED
    assert data["opaque"] == data["unknown"] == []
    assert repr(report).splitlines()[:9] == str(report).splitlines()[:9]
    assert len(repr(report).splitlines()) == 10
    other = report.renamed({"head": "tail"})
    assert {row.module for row in other.operations} == {"tail"}
    assert other != report
    assert other.renamed({"tail": "head", "none": "nothing"}) == report


def test_inputs_may_be_shapes_and_nothing_is_computed() -> None:
    seen = []

    def run(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(v), x)
        return x @ w

    shapes = jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype)
    rows = {row.name: row for row in polyamp.explain(run, MIXED, *shapes).operations}
    assert rows["dot_general"].dtype == "float16"
    assert seen == []


def test_the_body_of_a_loop_and_every_call_of_a_nested_jit_count() -> None:
    inner = jax.jit(lambda x, w: x @ w)

    def run(x: Any, w: Any) -> Any:
        x = inner(inner(x, w), w)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=5)[0]

    found = polyamp.explain(run, MIXED, jnp.ones((3, 3)), jnp.ones((3, 3))).operations
    assert [(r.name, r.dtype, r.count) for r in found if r.name == "dot_general"] == [("dot_general", "float16", 3)]


def test_an_operation_without_a_rule_is_unknown_and_an_error_if_strict() -> None:
    def run(x: Any, w: Any) -> Any:
        with jax.named_scope("here"):
            return DOUBLE.bind(x @ w)

    report = polyamp.explain(run, MIXED, X, W)
    assert report.operations[-1] == OperationCount("here", "test_report_double", "float32", "unknown", 1)
    assert report.unknown == report.opaque == ("test_report_double",)
    message = (
        r"strict=True: the operation 'test_report_double' \(at 'here'\) has no rule\. Give it one with "
        r"Policy\(op_rules=\{'test_report_double': 'follow'\}\), or 'compute', 'float32', 'promote', or 'opaque'"
    )
    with pytest.raises(UnsupportedError, match=message):
        polyamp.explain(run, MIXED, X, W, strict=True)
    with pytest.raises(UnsupportedError, match=message):
        polyamp_jax.autocast(run, MIXED, strict=True)(X, W)
    with pytest.raises(UnsupportedError, match=r"\(at 'the top level'\) has no rule"):
        polyamp_jax.autocast(DOUBLE.bind, MIXED, strict=True)(X)


def test_op_rules_give_a_primitive_of_ones_own_a_rule() -> None:
    def run(x: Any, w: Any) -> Any:
        return DOUBLE.bind(x @ w)

    ruled = polyamp.Policy("mixed_float16", op_rules={"test_report_double": "follow"})
    assert polyamp.explain(run, ruled, X, W, strict=True).operations[-1][2:4] == ("float16", "follow")


def test_a_rule_may_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_list, "RULES", dict(op_list.RULES))
    mine = primitive("test_report_registered")
    polyamp_jax.register_rule("test_report_registered", "follow")
    polyamp_jax.register_rule("test_report_registered", "follow")
    fresh = polyamp.Policy("mixed_float16", op_rules={"exp": "float32"})  # settings are kept per policy
    report = polyamp.explain(lambda x, w: mine.bind(x @ w), fresh, X, W, strict=True)
    assert report.operations[-1] == OperationCount("", "test_report_registered", "float16", "follow", 1)
    with pytest.raises(PolicyError, match=r"'exp' has the rule 'float32' already. Rename yours, or change the entry"):
        polyamp_jax.register_rule("exp", "compute")
    with pytest.raises(PolicyError, match="'scan' has the rule 'structure' already"):
        polyamp_jax.register_rule("scan", "opaque")
    with pytest.raises(PolicyError, match=r"must be one of \('compute', 'float32', .*Received: 'fast'"):
        polyamp_jax.register_rule("mine", "fast")  # type: ignore[arg-type]


def test_op_rules_put_an_operation_with_one_operand_into_the_compute_list(equations: Any) -> None:
    changed = polyamp.Policy("mixed_float16", op_rules={"exp": "compute"}).autocast(lambda x, w: jnp.exp(x @ w))
    assert exponents(equations, changed) == ["float16"]


def exponents(equations: Any, function: Any) -> list[str]:
    return [str(e.invars[0].aval.dtype) for e in equations(function, X, W) if e.primitive.name == "exp"]


def test_op_rules_change_an_entry(products: Any, equations: Any) -> None:
    def run(x: Any, w: Any) -> Any:
        return jnp.exp(x @ w)

    def changed(**rules: str) -> Any:
        return polyamp.Policy("mixed_float16", op_rules=rules).autocast(run)

    assert exponents(equations, MIXED.autocast(run)) == ["float32"]
    assert exponents(equations, changed(exp="follow")) == ["float16"]
    assert exponents(equations, changed(exp="promote")) == ["float16"]
    assert products(changed(dot_general="float32"), X, W) == [WIDE]
    np.testing.assert_array_equal(changed(dot_general="float32")(X * 0.1, W), run(X * 0.1, W))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"expp": "compute"}, r"op_rules: JAX has no operation 'expp'\..*'exp'.*as jax\.make_jaxpr\(fn\)"),
        (
            {"softmax": "compute"},
            r"'softmax'\. 'softmax' of torch is 'exp' and 'reduce_sum' and 'div' here",
        ),
        ({"scn": "opaque"}, r"op_rules: JAX has no operation 'scn'\..*'scan'"),
    ],
)
def test_op_rules_for_an_operation_that_does_not_exist_are_refused(rules: dict[str, str], message: str) -> None:
    wrong = polyamp.Policy("mixed_float16", op_rules=rules)
    for use in (lambda: wrong.autocast(head)(X, W, jnp.zeros(3)), lambda: polyamp.explain(head, wrong, X, W, X)):
        with pytest.raises(PolicyError, match=message):
            use()


def test_names_of_other_frameworks_are_translated_to_primitives() -> None:
    assert {word for row in OPERATION_NAMES for word in row.jax.split()} <= set(op_list.RULES)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (polyamp.Policy("mixed_bfloat16", mode="cast"), r"mode='cast'"),
        (polyamp.Policy(param="bfloat16", compute="bfloat16", output="float32", mode="cast"), r"mode='cast'"),
    ],
)
def test_op_rules_without_an_op_list_are_refused(policy: polyamp.Policy, why: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"does not act with {why}\. .*policy\.replace\(op_rules=\{{\}}\)"):
        policy.replace(op_rules={"exp": "compute"}).autocast(head)(X, W, jnp.zeros(3))


def test_op_rules_with_a_rule_that_does_not_fit_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"op_rules\['exp'\] must be one of .*Received: 'flaot32'\..*'float32'"):
        polyamp.Policy("mixed_float16", op_rules={"exp": "flaot32"})
    message = r"'scan' holds other operations, which have rules of their own; the only rule for it is 'opaque'"
    with pytest.raises(PolicyError, match=message):
        polyamp.Policy("mixed_float16", op_rules={"scan": "float32"}).autocast(head)(X, W, jnp.zeros(3))


def test_op_rules_make_a_structure_opaque(products: Any) -> None:
    def run(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ w, None), x @ w, length=2)[0]

    w = jnp.eye(4)
    opaque = polyamp.Policy("mixed_float16", op_rules={"scan": "opaque"})
    assert products(MIXED.autocast(run), X, w) == [NARROW, NARROW]
    assert products(opaque.autocast(run), X, w) == [NARROW, WIDE]
    report = polyamp.explain(run, opaque, X, w)
    assert [(r.name, r.rule) for r in report.operations] == [("dot_general", "compute"), ("scan", "opaque")]
    assert report.opaque == ("scan",)


def scoped(x: Any, w: Any) -> Any:
    with jax.named_scope("encoder"):
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("second"):
            x = x @ w
    with jax.named_scope("head"):
        return x @ w


def test_overrides_name_scopes_in_a_plain_function_and_the_longest_wins(products: Any) -> None:
    w = jnp.eye(4)

    def found(**overrides: str) -> list[tuple[str, ...]]:
        return products(policy(**overrides).autocast(scoped), X, w)

    assert found(encoder="float32") == [WIDE, WIDE, NARROW]
    assert found(encoder="float32", encoder__second="bfloat16") == [WIDE, ("bfloat16", "bfloat16"), NARROW]
    assert products(polyamp.Policy("mixed_float16", overrides={"*/second": "float32"}).autocast(scoped), X, w) == [
        NARROW,
        WIDE,
        NARROW,
    ]
    rules = [row.rule for row in polyamp.explain(scoped, policy(head="float32"), X, w).operations]
    assert rules == ["compute", "compute", "override"]
    float32 = polyamp.Policy(compute="float32", overrides={"head": "bfloat16"})
    assert products(float32.autocast(scoped), X, w) == [WIDE, WIDE, ("bfloat16", "bfloat16")]


def test_an_override_that_matches_no_scope_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"'encoder/secnd' matches no module path. Nearest: 'encoder/second'.*scope"):
        policy(encoder__secnd="float32").autocast(scoped)(X, jnp.eye(4))
    with pytest.raises(PolicyError, match="the function has no scope at all"):
        policy(head="float32").autocast(lambda x: x * 2)(X)


@pytest.mark.parametrize("how", ["decorator", "jit inside", "jit outside", "scan", "keep in jit"])
def test_keep_precision_keeps_the_declared_dtypes(how: str, products: Any) -> None:
    @polyamp_jax.keep_precision
    def kept(x: Any, w: Any) -> Any:
        return x @ w

    calls = {
        "decorator": kept,
        "jit inside": polyamp_jax.keep_precision(jax.jit(lambda x, w: x @ w)),
        "jit outside": jax.jit(kept),
        "scan": lambda x, w: jax.lax.scan(lambda c, _: (kept(c, w), None), x, length=1)[0],
        "keep in jit": jax.jit(lambda x, w: jax.jit(kept)(x, w)),
    }
    w = jnp.eye(4) / 3
    run = MIXED.autocast(lambda x, w: calls[how](x @ w, w) @ w)
    assert products(run, X, w) == [NARROW, WIDE, NARROW]
    assert kept.__name__ == "kept"
    first = jnp.matmul(X.astype("float16"), w.astype("float16")).astype("float32") @ w
    wanted = jnp.matmul(first.astype("float16"), w.astype("float16")).astype("float32")
    np.testing.assert_array_equal(run(X, w), wanted)


def test_derivatives_of_what_keeps_its_precision_keep_it_too(products: Any) -> None:
    def run(x: Any, w: Any) -> Any:
        return polyamp_jax.keep_precision(lambda x: jnp.sum((x @ w) ** 2))(x @ w)

    w = jnp.eye(4)
    outside = products(jax.grad(MIXED.autocast(run)), X, w)
    assert outside == [NARROW, WIDE, WIDE, NARROW]
    inside = products(MIXED.autocast(lambda x, w: jax.grad(lambda x: run(x, w))(x)), X, w)
    assert sorted(inside) == sorted(outside)
    assert jax.grad(MIXED.autocast(run))(X, w).dtype == jnp.float32


@pytest.mark.parametrize("overrides", [{}, {"head": "float32"}])
def test_a_region_inside_of_the_function_shows_the_functions_own_scopes(overrides: dict[str, str]) -> None:
    """Its operations keep the dtypes of the inner region; polyamp's own scope around it is no module."""
    policy = polyamp.Policy("mixed_float16", overrides=overrides)

    def net(w: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            hidden = x @ w
        with jax.named_scope("head"):
            return hidden @ w.T

    report = polyamp.explain(lambda w, x: policy.autocast(net)(w, x).sum(), policy, jnp.ones((4, 2)), jnp.ones((3, 4)))
    products = {row.module: (row.dtype, row.rule) for row in report.operations if row.name == "dot_general"}
    head = "float32" if overrides else "float16"
    assert products == {"body": ("float16", "keep_precision"), "head": (head, "keep_precision")}
