"""`polyamp.explain` of Keras models on JAX: dtype and rule of each operation, by layer; casts; the backward pass."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import polyamp
from polyamp.errors import UnsupportedError
from tests.fixtures.explained_network import BATCH, loss_fn, model

POLICY = polyamp.Policy("mixed_bfloat16", overrides={"kept": "float32"})


def test_each_operation_has_its_layer_dtype_and_rule_in_both_directions() -> None:
    made = model()
    before = [np.array(value) for value in made.get_weights()]
    report = polyamp.explain(loss_fn, POLICY, made, BATCH)
    rows = {(row.module, row.name, row.direction): (row.dtype, row.rule, row.count) for row in report.operations}
    forward = {key[:2]: row[:2] for key, row in rows.items() if key[2] == "forward"}
    assert forward["first", "dot_general"] == ("bfloat16", "compute")
    assert forward["kept", "dot_general"] == ("float32", "override")
    assert forward["head", "dot_general"] == ("bfloat16", "compute")
    assert {dtype for (module, _), (dtype, _) in forward.items() if module == "norm"} == {"float32"}
    assert forward["hand", "exp"] == ("bfloat16", "float32 (uncast)"), "a softmax that the user wrote in 16 bits"
    assert forward["", "exp"] == ("float32", "off"), "the loss"
    assert rows["head", "dot_general", "backward"] == ("bfloat16", "follow", 2)
    assert rows["kept", "dot_general", "backward"] == ("float32", "override", 2)
    assert rows["first", "dot_general", "backward"] == ("bfloat16", "follow", 1), "the data have no gradient"
    assert ("float32", "bfloat16") in {(cast.source, cast.target) for cast in report.casts}
    assert {row.module for row in report.kept} >= {"norm", "kept"}
    assert all(np.array_equal(one, other) for one, other in zip(before, made.get_weights(), strict=True))
    assert {layer.dtype_policy.name for layer in made.layers} == {"float32"}


def test_a_model_alone_policies_compared_and_what_xla_makes_of_it() -> None:
    one, two = (polyamp.explain(model(), policy, BATCH["x"]) for policy in ("float32", "mixed_bfloat16"))
    assert {row.rule for row in one.operations} == {"off"}
    assert {row.direction for row in one.operations} == {"forward"}
    differs = {(row.module, row.name): (row.first, row.second) for row in one.diff(two)}
    assert differs["first", "dot_general"] == ("float32", "bfloat16")
    assert not any(module == "norm" for module, _ in differs)
    small = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(3, name="kept")]
    )
    compiled = polyamp.explain(loss_fn, POLICY, small, BATCH, compiled=True)
    rules = {(row.module, row.name): row.rule for row in compiled.operations if row.direction == "forward"}
    assert (rules["first", "dot_general"], rules["kept", "dot_general"]) == ("compute", "override")


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="explain of Keras models takes a loss function"):
        polyamp.explain(loss_fn, "mixed_bfloat16", model())
    with pytest.raises(UnsupportedError, match=r"Sequential with strict=True\. .*choices has the dtype"):
        polyamp.explain(loss_fn, "mixed_bfloat16", model(), BATCH, strict=True)
