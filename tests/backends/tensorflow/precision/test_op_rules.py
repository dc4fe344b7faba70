"""`Policy(op_rules=...)` on Keras models: the dtypes in which layers compute, and what cannot be reached."""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
import polyamp_tensorflow
from polyamp import Policy, PolicyError, UnsupportedError
from polyamp.rules.operation_names import OPERATION_NAMES
from polyamp_keras.precision.op_rules import known_operations, operation_key
from polyamp_tensorflow import apply_policy

RULES: Final = {"softmax": "compute", "layer_norm": "compute", "linear": "float32"}
POLICY: Final = Policy("mixed_bfloat16", op_rules=RULES)
X: Final = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def model() -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, name="dense"),
            layers.EinsumDense("ab,bc->ac", 4, name="einsum"),
            layers.LayerNormalization(name="norm"),
            layers.Softmax(name="shares"),
            layers.Activation("softmax", name="again"),
            layers.Activation("gelu", name="gelu"),
            layers.EinsumDense("ab,bc->ac", 2, name="out"),
        ],
        name="net",
    )


def test_layers_compute_as_the_rules_say() -> None:
    net = model()
    with apply_policy(net, POLICY, heads=False) as applied:
        choices = dict(applied.choices)
        seen = {layer.name: layer.call(tf.cast(X, layer.compute_dtype)).dtype.name for layer in net.layers}
        policies = {layer.name: layer.dtype_policy.name for layer in net.layers}
    expected = dict.fromkeys(("norm", "shares", "again"), ("bfloat16", "op_rules"))
    assert {name: choices[name] for name in expected} == expected
    assert choices["dense"] == ("float32", "op_rules")
    assert choices["einsum"] == choices["gelu"] == ("bfloat16", "compute")
    assert {name: seen[name] for name in expected} == dict.fromkeys(expected, "bfloat16")
    assert seen["dense"] == "float32"
    assert (policies["dense"], policies["shares"]) == ("float32", "mixed_bfloat16")
    assert {layer.compute_dtype for layer in net.layers} == {"float32"}  # and all is as before
    with apply_policy(net, POLICY.replace(op_rules={}), heads=False) as plain:  # the trap
        assert plain.choices["shares"] == plain.choices["norm"] == ("float32", "sensitive")
        assert net.get_layer("shares")(X).dtype == "float32"


def test_the_step_trains_under_the_rules() -> None:
    losses = []
    for policy in (POLICY.replace(op_rules={}), POLICY):
        keras.utils.set_random_seed(0)
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
        state = polyamp.init(model(), recipe)
        step = polyamp.train_step(lambda net, x: tf.reduce_sum(net(x) ** 2), recipe)
        _, result = step(state, X)
        assert not result.skipped
        losses.append(float(result.loss))
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]


def test_operations_of_a_functional_model() -> None:
    inputs = keras.Input((4, 4))
    scores = keras.ops.matmul(inputs, inputs)
    out = layers.Dense(2)(keras.ops.softmax(scores) + scores)
    net = keras.Model(inputs, out)
    with apply_policy(net, Policy("mixed_bfloat16", op_rules={"softmax": "compute", "matmul": "float32"})) as applied:
        kinds = {path.rstrip("_0123456789"): choice for path, choice in applied.choices.items()}
        assert kinds["matmul"] == ("float32", "op_rules")
        assert kinds["softmax"] == ("bfloat16", "op_rules")
        assert kinds["dense"] == ("float32", "head")


def test_overrides_and_constructors_come_before_rules() -> None:
    net = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4, name="b", dtype="float32")])
    policy = Policy("mixed_bfloat16", op_rules={"dense": "compute"}, overrides={"a": "float32"})
    with apply_policy(net, policy) as applied:
        assert (applied.choices["a"], applied.choices["b"][1]) == (("float32", "override"), "given")


def test_a_rule_for_a_layer_with_layers_inside_covers_them() -> None:
    net = keras.Sequential([keras.Input((4, 4)), layers.LSTM(4, name="lstm"), layers.EinsumDense("ab,bc->ac", 2)])
    with apply_policy(net, Policy("mixed_bfloat16", op_rules={"lstm": "float32"})) as applied:
        inside = {path: choice for path, choice in applied.choices.items() if path.startswith("lstm")}
    assert len(inside) == 2
    assert set(inside.values()) == {("float32", "op_rules")}


def test_explain_names_the_rule() -> None:
    net = model()
    report = polyamp.explain(lambda m, x: keras.ops.sum(m(x)), POLICY, net, X)
    rows = {(row.module, row.name): (row.dtype, row.rule) for row in report.operations if row.direction == "forward"}
    assert rows["dense", "MatMul"] == ("float32", "float32 (op_rules)")
    assert rows["shares", "Softmax"] == ("bfloat16", "compute (op_rules)")
    assert rows["einsum", "MatMul"] == ("bfloat16", "compute")


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ({"softmx": "compute"}, PolicyError, r"Keras has no layer or operation 'softmx'\. Did you mean 'softmax'"),
        ({"softmax": "follow"}, UnsupportedError, r"op_rules\['softmax'\] must be one of \('compute', 'float32'\)"),
        ({"linear": "float32", "dense": "compute"}, PolicyError, r"'linear' and 'dense' are one operation in Keras"),
        ({"conv2d": "float32"}, PolicyError, r"'conv2d' is no layer of the model.*use overrides="),
    ],
)
def test_what_is_refused(rules: dict[str, str], kind: type[Exception], message: str) -> None:
    policy = Policy("mixed_bfloat16", op_rules=rules)
    with pytest.raises(kind, match=message):
        apply_policy(model(), policy)
    with pytest.raises(kind, match=message):
        polyamp.init(model(), polyamp.Recipe(policy=policy))


def test_names_of_other_frameworks_are_translated() -> None:
    assert [row.tensorflow for row in OPERATION_NAMES if operation_key(row.tensorflow) not in known_operations()] == []
    assert [row.torch for row in OPERATION_NAMES if operation_key(row.torch) not in known_operations()] == []
    with pytest.raises(PolicyError, match=r"no layer or operation 'logistic'\. 'logistic' of JAX is 'sigmoid' here\."):
        apply_policy(model(), Policy("mixed_bfloat16", op_rules={"logistic": "compute"}))


def test_what_a_layer_computes_inside_is_refused_by_name() -> None:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="softmax", name="gate"), layers.Dense(2)])
    with pytest.raises(
        UnsupportedError, match=r"layer 'gate' \(Dense\) computes 'softmax' inside.*overrides=\{'gate': 'bfloat16'\}"
    ):
        apply_policy(inner, Policy("mixed_bfloat16", op_rules={"softmax": "compute"}))
    named = Policy("mixed_bfloat16", op_rules={"dense": "float32"}, overrides={"gate": "bfloat16"})
    with apply_policy(inner, named, heads=False) as applied:
        assert applied.choices["gate"] == ("bfloat16", "override")
    query, value = keras.Input((4, 4)), keras.Input((4, 4))
    attends = keras.Model([query, value], layers.Attention(name="attention")([query, value]))
    with pytest.raises(UnsupportedError, match=r"layer 'attention' \(Attention\) computes 'softmax' inside"):
        apply_policy(attends, Policy("mixed_bfloat16", op_rules={"softmax": "compute"}))


def test_probabilities_of_the_model_stay_in_float32() -> None:
    net = keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Softmax(name="head")])
    with pytest.raises(PolicyError, match=r"op_rules: 'head' gives probabilities"):
        apply_policy(net, Policy("mixed_bfloat16", op_rules={"softmax": "compute"}))


def test_where_no_layer_is() -> None:
    with pytest.raises(UnsupportedError, match=r"op_rules need a keras\.Model or layer.*<lambda>"):
        POLICY.autocast(lambda x: x, backend="tensorflow")
    with pytest.raises(UnsupportedError, match=r"op_rules need.*keras\.DTypePolicy; use apply_policy"):
        polyamp_tensorflow.dtype_policy(POLICY)
    with pytest.raises(UnsupportedError, match=r"does not act with mode='cast'"):
        apply_policy(model(), Policy("O2", op_rules=RULES))
    with pytest.raises(UnsupportedError, match=r"does not act with param='bfloat16'"):
        apply_policy(model(), Policy("bfloat16", op_rules=RULES))
    with apply_policy(model(), Policy("float32", op_rules=RULES)) as applied:  # nothing is in 16 bits
        assert applied.choices["shares"] == ("float32", "compute")
