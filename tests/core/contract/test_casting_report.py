"""`CastingReport`, and what `polyamp.explain` and `op_rules` do where a backend has no rules per operation."""

from __future__ import annotations

import json

import numpy as np
import pytest

import polyamp
from polyamp.contract.casting_report import CastCount, CastingReport, OperationCount
from polyamp.errors import PolicyError, UnsupportedError
from polyamp.reference import MLP
from polyamp.reference.tensor import Tensor

POLICY = polyamp.Policy("mixed_float16")
ROWS = (
    OperationCount("block/dense", "dot_general", "float16", "compute", 2),
    OperationCount("", "exp", "float32", "float32", 1),
    OperationCount("", "my_kernel", "float32", "unknown", 1),
    OperationCount("", "fft", "float32", "opaque", 1),
)
CASTS = (CastCount("float32", "float16", 3),)


def report() -> CastingReport:
    return CastingReport(POLICY, ROWS, CASTS)


def test_the_table() -> None:
    assert str(report()) == (
        "Policy(param='float32', compute='float16', output='float32') [mixed: float32 master weights]\n"
        "\n"
        "module       operation    dtype    rule     count\n"
        "-----------  -----------  -------  -------  -----\n"
        "block/dense  dot_general  float16  compute      2\n"
        ".            exp          float32  float32      1\n"
        ".            my_kernel    float32  unknown      1\n"
        ".            fft          float32  opaque       1\n"
        "\n"
        "casts: 3 float32 -> float16\n"
        "opaque: fft, my_kernel\n"
        "no op list names: my_kernel"
    )
    assert repr(report()).splitlines() == [*str(report()).splitlines()[:9], "... (3 more lines: print it)"]


def test_an_empty_report_says_so() -> None:
    assert str(CastingReport(POLICY, (), ())).endswith("casts: none\nopaque: none")


def test_plain_data_goes_through_json() -> None:
    data = json.loads(json.dumps(report().to_dict()))
    assert data["operations"][0] == {
        "module": "block/dense",
        "name": "dot_general",
        "dtype": "float16",
        "rule": "compute",
        "count": 2,
        "direction": "forward",
    }
    assert data["casts"] == [{"source": "float32", "target": "float16", "count": 3}]
    assert (data["opaque"], data["unknown"]) == (["fft", "my_kernel"], ["my_kernel"])
    assert polyamp.Policy(**data["policy"]) == POLICY


def test_reports_are_equal_by_value_whatever_the_order() -> None:
    assert report() == CastingReport(POLICY, ROWS[::-1], CASTS)
    assert report() != CastingReport(POLICY, ROWS[:3], CASTS)
    assert report() != CastingReport(POLICY, ROWS, ())
    assert report() != CastingReport(polyamp.Policy("mixed_bfloat16"), ROWS, CASTS)


def test_renamed_changes_the_modules_it_names() -> None:
    modules = [row.module for row in report().renamed({"block/dense": "layers/0"}).operations]
    assert modules == ["layers/0", "", "", ""]


def test_a_backend_without_rules_per_operation_says_so() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(UnsupportedError, match=r"explain: the reference backend of this version cannot say"):
        polyamp.explain(lambda x: x, POLICY, x, backend="reference")
    changed = POLICY.replace(op_rules={"exp": "compute"})
    with pytest.raises(UnsupportedError, match=r"reference backend .* op_rules=\{'exp': 'compute'\}\. Use policy\.re"):
        changed.autocast(lambda x: x)(Tensor(x))
    with pytest.raises(UnsupportedError, match="cannot change the rule of one operation"):
        changed.autocast(lambda x: x, backend="reference")
    with pytest.raises(UnsupportedError, match="cannot change the rule of one operation"):
        changed.native("reference")
    model = polyamp.contract.registry.get("reference").testing().mlp([])
    with pytest.raises(UnsupportedError, match="cannot change the rule of one operation"):
        polyamp.init(model, polyamp.Recipe(policy=changed, optimizer=polyamp.sgd(0.1)))


def test_op_rules_belong_to_the_policy() -> None:
    changed = POLICY.replace(op_rules={"exp": "compute"})
    assert changed != POLICY
    assert hash(changed) == hash(polyamp.Policy("mixed_float16", op_rules={"exp": "compute"}))
    assert polyamp.Policy(**changed.to_dict()) == changed
    assert repr(changed).endswith("op_rules={'exp': 'compute'})")
    with pytest.raises(
        PolicyError, match=r"op_rules\['exp'\] must be one of .*Received: 'flot32'\. Did you mean 'float32'"
    ):
        polyamp.Policy("mixed_float16", op_rules={"exp": "flot32"})
    with pytest.raises(PolicyError, match="op_rules must map names of operations to rules"):
        polyamp.Policy("mixed_float16", op_rules=["exp"])  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="op_rules"):
        changed.spelled("keras")


def test_op_rules_go_through_a_recipe_file() -> None:
    recipe = polyamp.Recipe(policy=POLICY.replace(op_rules={"exp": "compute"}), optimizer=polyamp.sgd(0.1))
    assert polyamp.Recipe.from_toml(recipe.to_toml()) == recipe
    assert polyamp.Recipe.from_json(recipe.to_json()) == recipe


def test_a_state_in_place_of_its_model_is_refused() -> None:
    state = polyamp.init(MLP.random([2, 1], seed=0), polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
    with pytest.raises(polyamp.ModelError, match=r"Received: a ReferenceState\. Pass its model: state\.model"):
        polyamp.explain(lambda model, x: model(x), POLICY, state, np.ones((1, 2), np.float32))
