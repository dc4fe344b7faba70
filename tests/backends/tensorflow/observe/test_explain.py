"""`polyamp.explain` of Keras models: dtype and rule of each operation, by layer; casts; the model stays as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.contract.casting_comparison import compare_families
from polyamp.errors import UnsupportedError
from tests.fixtures.explained_network import BATCH, loss_fn, model

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")


def test_each_operation_has_its_layer_dtype_and_rule() -> None:
    made = model()
    before = [np.array(value) for value in made.get_weights()]
    policy = polyamp.Policy("mixed_bfloat16", overrides={"kept": "float32"})
    report = polyamp.explain(loss_fn, policy, made, BATCH)
    rows = {(row.module, row.name): (row.dtype, row.rule) for row in report.operations if row.direction == "forward"}
    assert rows["first", "MatMul"] == ("bfloat16", "compute")
    assert rows["kept", "MatMul"] == ("float32", "override")
    assert rows["head", "MatMul"] == ("bfloat16", "compute")
    assert {dtype for (module, _), (dtype, _) in rows.items() if module == "norm"} == {"float32"}
    assert rows["hand", "Exp"][0] == "bfloat16", "a softmax that the user wrote in 16 bits is seen"
    assert ("float32", "bfloat16") in {(cast.source, cast.target) for cast in report.casts}
    assert {row.module for row in report.kept} >= {"norm", "kept"}
    assert all(np.array_equal(one, other) for one, other in zip(before, made.get_weights(), strict=True))


def test_under_float32_nothing_is_cast_and_policies_are_compared() -> None:
    one = polyamp.explain(loss_fn, "float32", model(), BATCH)
    assert {row.dtype for row in one.operations} == {"float32"}
    assert {row.rule for row in one.operations} == {"off"}
    two = polyamp.explain(loss_fn, "mixed_bfloat16", model(), BATCH)
    differs = {(row.module, row.name): (row.first, row.second) for row in one.diff(two)}
    assert differs["first", "MatMul"] == ("float32", "bfloat16")
    assert not any(module == "norm" for module, _ in differs)


def test_the_backward_pass_by_layer() -> None:
    policy = polyamp.Policy("mixed_bfloat16", overrides={"kept": "float32"})
    report = polyamp.explain(loss_fn, policy, model(), BATCH)
    rows = {
        (row.module, row.name): (row.dtype, row.rule, row.count)
        for row in report.operations
        if row.direction == "backward"
    }
    assert rows["head", "MatMul"] == ("bfloat16", "follow", 2)
    assert rows["head", "BiasAddGrad"] == ("bfloat16", "follow", 1)
    assert rows["kept", "MatMul"] == ("float32", "override", 2)
    assert rows["first", "MatMul"] == ("bfloat16", "follow", 1), "of the weights alone: the data have no gradient"
    assert rows["norm", "RsqrtGrad"] == ("float32", "follow", 1)
    assert rows["hand", "Sum"][0] == "bfloat16"
    assert rows["", "RealDiv"][:2] == ("float32", "follow")
    assert not any(name.startswith(("Placeholder", "TensorList")) for _, name in rows)
    families = {name: report.families[name] for _, name in rows}
    assert (families["MatMul"], families["RsqrtGrad"]) == ("matrix products", "powers")
    assert report.notes == ()


def test_cells_of_a_recurrent_layer_belong_to_it_and_a_loops_body_counts_once() -> None:
    layers = [keras.layers.LSTM(3, name="rnn"), keras.layers.Dense(3, name="head")]
    recurrent = keras.Sequential([keras.Input((6, 4)), *layers])
    batch = {"x": np.ones((5, 6, 4), np.float32), "y": BATCH["y"]}
    report = polyamp.explain(loss_fn, "mixed_bfloat16", recurrent, batch)
    backward = [row for row in report.operations if row.direction == "backward"]
    assert {row.module for row in backward} == {"rnn", "head", ""}
    assert [row.count for row in backward if (row.module, row.name) == ("rnn", "SigmoidGrad")] == [3]


def test_a_loss_without_a_graph_has_a_note() -> None:
    def reads(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        assert float(loss) > 0.0
        return loss

    report = polyamp.explain(reads, "mixed_bfloat16", model(), BATCH)
    assert {row.direction for row in report.operations} == {"forward"}
    assert report.notes[0].startswith("The backward pass is not listed: the step has no graph (TypeError: ")


def test_a_model_or_a_layer_alone_has_the_rows_of_its_forward_pass() -> None:
    made, policy = model(), "mixed_bfloat16"
    whole = polyamp.explain(loss_fn, policy, made, BATCH)
    alone = polyamp.explain(made, policy, BATCH["x"])
    layers = {"first", "norm", "hand", "kept", "head"}
    assert {row.direction for row in alone.operations} == {"forward"}
    assert [row for row in alone.operations if row.module in layers] == [
        row for row in whole.operations if row.direction == "forward" and row.module in layers
    ]
    assert not [row for row in alone.operations if row.name == "Sum" and row.module not in layers]
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    one = polyamp.explain(layer, policy, BATCH["x"]).operations[0]
    assert (one.name, one.dtype, one.count) == ("MatMul", "bfloat16", 1)


def test_a_function_without_a_model_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"\(loss_fn, policy, model, batch\), or a model or layer and its inputs"
    ):
        polyamp.explain(lambda x: tf.exp(x), "mixed_bfloat16", tf.ones((2, 2)))


def test_what_xla_makes_of_a_pass_by_layer_and_family() -> None:
    made = model()
    before = [np.array(value) for value in made.get_weights()]
    policy = polyamp.Policy("mixed_bfloat16", overrides={"kept": "float32"})
    eager, compiled = (polyamp.explain(loss_fn, policy, made, BATCH, compiled=on) for on in (False, True))
    rows = {(row.module, row.name, row.direction): (row.dtype, row.rule, row.count) for row in compiled.operations}
    # XLA's CPU code computes 16-bit products in float32, behind operands that were rounded.
    assert rows["first", "MatMul", "forward"] == ("float32", "compute", 1)
    assert rows["kept", "MatMul", "backward"] == ("float32", "override", 2)
    assert rows["head", "BiasAddGrad", "backward"] == ("float32", "follow", 1)
    assert rows["norm", "Rsqrt", "forward"][:2] == ("float32", "float32")
    assert not [key for key in rows if key[:2] == ("", "AddN")], "a sum of gradients has no layer"
    assert (compiled.casts, len(compiled.notes)) == ((), 1)
    assert compiled.notes[0].startswith("Read from the program that XLA optimized for CPU. ")
    differences = {(row.module, row.family, row.direction): row for row in compare_families(eager, compiled)[0]}
    assert differences["first", "matrix products", "forward"][3:5] == ("bfloat16", "float32")
    assert not [key for key in differences if key[0] in ("kept", "norm")]
    assert all(np.array_equal(one, other) for one, other in zip(before, made.get_weights(), strict=True))


def test_a_loops_body_counts_once_in_a_compiled_program() -> None:
    layers = [keras.layers.LSTM(3, name="rnn"), keras.layers.Dense(3, name="head")]
    recurrent = keras.Sequential([keras.Input((6, 4)), *layers])
    batch = {"x": np.ones((5, 6, 4), np.float32), "y": BATCH["y"]}
    report = polyamp.explain(loss_fn, "mixed_bfloat16", recurrent, batch, compiled=True)
    rows = {(row.module, row.name, row.direction): row.count for row in report.operations}
    assert (rows["rnn", "SigmoidGrad", "backward"], rows["rnn", "MatMul", "forward"]) == (3, 2)
    assert {module for module, _, _ in rows} == {"rnn", "head", ""}


def test_a_pass_that_xla_cannot_compile_is_refused_by_name() -> None:
    def writes_text(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) + tf.strings.to_number(tf.strings.as_string(tf.reduce_sum(batch["x"])))

    with pytest.raises(UnsupportedError, match=r"cannot compile a pass of this model with XLA for CPU \(\w+Error: "):
        polyamp.explain(writes_text, "mixed_bfloat16", model(), BATCH, compiled=True)
    with pytest.raises(UnsupportedError, match=r"takes a loss function and its model: .*Received: .* and 1 inputs"):
        polyamp.explain(model(), "mixed_bfloat16", BATCH["x"], compiled=True)


def test_the_block_of_the_guide_runs() -> None:
    keras.backend.clear_session()  # the names of its layers
    (code,) = re.findall(r"```python tensorflow\n(.*?)```", GUIDE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/guides/explain.md", "exec"), scope)
    found = [(row.module, row.name, row.dtype) for row in scope["report"].operations if row.direction == "forward"]
    assert [row for row in found if row[1] == "MatMul"] == [
        ("dense", "MatMul", "float16"),
        ("dense_1", "MatMul", "float16"),
    ]
