"""Heads and layers that were given a dtype: a true loss under every policy, what is found, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
from polyamp import Policy
from polyamp.errors import PolicyError
from polyamp_tensorflow import apply_policy

layers = keras.layers
MIXED = ("mixed_float16", "mixed_bfloat16")
X, Y = np.ones((4, 1), np.float32), np.ones((4,), np.int32)  # logits 30 and 0, and the label is the second


class Softmaxed(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """A softmax that nothing but the model's own call shows to be the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(1, kernel_initializer="ones")
        self.inner = keras.Sequential([dense(None), layers.Softmax()])

    def call(self, x: Any) -> Any:
        return self.inner(self.hidden(x))


def dense(activation: str | None, units: int = 2, **settings: Any) -> Any:
    kernel = keras.initializers.Constant(np.array([[30.0, 0.0][:units]], np.float32))
    return layers.Dense(units, activation=activation, kernel_initializer=kernel, **settings)


def raw_softmax() -> Any:
    inputs = keras.Input((1,))
    return keras.Model(inputs, keras.ops.softmax(dense(None)(inputs)))


def subclassed() -> Any:
    model = Softmaxed()
    model(X)
    return model


SOFTMAX: dict[str, Callable[[], Any]] = {
    "Dense": lambda: keras.Sequential([keras.Input((1,)), dense("softmax")]),
    "Softmax": lambda: keras.Sequential([keras.Input((1,)), dense(None), layers.Softmax()]),
    "Activation": lambda: keras.Sequential([keras.Input((1,)), dense(None), layers.Activation("softmax")]),
    "operation": raw_softmax,
    "subclassed": subclassed,
    "given 16 bits": lambda: keras.Sequential(
        [keras.Input((1,)), dense(None), layers.Activation("softmax", dtype="mixed_float16")]
    ),
}


def evaluated(model: Any, loss: Any = "sparse_categorical_crossentropy") -> float:
    model.compile(loss=loss, jit_compile=False)
    return float(model.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("kind", SOFTMAX)
def test_a_loss_of_30_is_reported_as_30(kind: str, name: str) -> None:
    model = SOFTMAX[kind]()
    with apply_policy(model, Policy(name)) as applied:
        assert evaluated(model) == 30.0, applied.choices


@pytest.mark.parametrize("name", MIXED)
def test_a_plain_keras_mixed_policy_reports_16(name: str) -> None:
    keras.config.set_dtype_policy(name)
    try:
        assert 10.0 < evaluated(SOFTMAX["Dense"]()) < 17.0
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("settings", [{"mode": "cast"}, {"op_list": "native"}])
@pytest.mark.parametrize("kind", ["Dense", "Softmax", "operation"])
def test_so_it_is_in_cast_mode_and_with_the_native_list(kind: str, settings: Any) -> None:
    model = SOFTMAX[kind]()
    with apply_policy(model, Policy("mixed_bfloat16", **settings), heads=False):
        assert evaluated(model) == 30.0


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("kind", SOFTMAX)
def test_so_it_is_in_the_step(kind: str, name: str) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], model(batch["x"])))

    recipe = polyamp.Recipe(policy=name, optimizer=polyamp.sgd(0.0))
    state = polyamp.init(SOFTMAX[kind](), recipe)
    _, result = polyamp.train_step(loss_fn, recipe)(state, {"x": X, "y": Y})
    assert float(result.loss) == 30.0


@pytest.mark.parametrize("name", MIXED)
def test_a_sigmoid_head_reports_30_too(name: str) -> None:
    inputs = keras.Input((1,))
    model = keras.Model(inputs, layers.Reshape((1,))(dense("sigmoid", units=1)(inputs)))
    plain = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer=keras.initializers.Constant(30.0))])
    plain.add(layers.Activation("sigmoid"))
    for each in (model, plain):
        each.compile(loss="binary_crossentropy", jit_compile=False)
    with apply_policy(plain, Policy(name)):
        assert float(plain.evaluate(X, 0 * Y, verbose=0)) == 30.0
    with apply_policy(model, Policy(name)) as applied:
        assert {why for _, why in applied.choices.values()} == {"contains", "head"}


def test_a_sigmoid_is_a_head_only_where_it_can_be_one() -> None:
    """Hidden sigmoids compute in 16 bits; in a model with its own `call`, where the head is not known, none do."""
    hidden, last = layers.Dense(4, "sigmoid", name="hidden"), layers.Dense(1, "sigmoid", name="last")
    found = whys(stack(hidden, last))
    assert (found["hidden"], found["last"]) == (COMPUTE, HEAD)

    class Classifier(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.gate = layers.Dense(1, "sigmoid", name="gate")

        def call(self, x: Any) -> Any:
            return self.gate(x)

    model = Classifier()
    model(np.ones((1, 4), np.float32))
    assert whys(model)["gate"] == SENSITIVE


def test_an_override_that_would_falsify_the_loss_is_refused() -> None:
    model = keras.Sequential([keras.Input((1,)), dense(None), layers.Softmax(name="shares")])
    policy = Policy("mixed_bfloat16", overrides={"shares": "bfloat16"})
    with pytest.raises(PolicyError, match=r"'shares' gives probabilities.*Received: bfloat16. Leave it in float32, or"):
        apply_policy(model, policy)
    with pytest.raises(PolicyError, match="'shares' gives probabilities"):
        polyamp.init(model, polyamp.Recipe(policy=policy))
    operation = raw_softmax()
    with pytest.raises(PolicyError, match=r"'softmax\w*' gives probabilities"):
        apply_policy(operation, policy.replace(overrides={operation.operations[-1].name: "bfloat16"}))


def whys(model: Any, policy: Policy | str = "mixed_bfloat16", **settings: Any) -> dict[str, tuple[str | None, str]]:
    with apply_policy(model, policy if isinstance(policy, Policy) else Policy(policy), **settings) as applied:
        return dict(applied.choices)


HEAD, COMPUTE, SENSITIVE = ("float32", "head"), ("bfloat16", "compute"), ("float32", "sensitive")


def stack(*parts: Any, shape: tuple[int, ...] = (4,)) -> Any:
    return keras.Sequential([keras.Input(shape), *parts])


def test_logits_at_the_outputs_of_a_functional_model_are_heads() -> None:
    first, last, drop = layers.Dense(4, name="first"), layers.Dense(2, name="last"), layers.Dropout(0.1, name="drop")
    found = whys(stack(first, last, drop))
    assert (found["first"], found["last"], found["drop"]) == (COMPUTE, HEAD, HEAD)
    assert whys(stack(first, last, drop), heads=False)["last"] == COMPUTE
    narrow = Policy(compute="bfloat16", output="bfloat16")
    assert whys(stack(first, last, drop), narrow)["last"] == COMPUTE
    overridden = Policy("mixed_bfloat16", overrides={"last": "bfloat16"})
    assert whys(stack(first, last, drop), overridden)["last"] == ("bfloat16", "override")


def test_heads_of_several_outputs_and_of_nested_models() -> None:
    inputs = keras.Input((4,))
    body = stack(layers.Dense(4, name="body"))(inputs)
    inner = stack(layers.Dense(4, name="deep"), layers.Dense(2, name="top"))
    inner.name = "inner"
    model = keras.Model(inputs, {"a": inner(body), "b": layers.Activation("relu", name="act")(body)})
    found = whys(model)
    assert (found["inner/top"], found["inner/deep"], found["act"]) == (HEAD, COMPUTE, HEAD)
    assert found[f"{model.layers[1].name}/body"] == HEAD, "the relu is an output, and this is what it is taken of"


def test_a_recurrent_or_summed_output_is_no_head_but_arrives_in_the_output_dtype() -> None:
    recurrent = stack(layers.LSTM(3, name="lstm"), shape=(3, 4))
    inputs = keras.Input((4,))
    added = keras.Model(inputs, layers.Add(name="add")([inputs, layers.Dense(4, name="dense")(inputs)]))
    assert whys(recurrent)["lstm"] == COMPUTE
    found = whys(added)
    assert (found["dense"], found["add"]) == (COMPUTE, HEAD)
    for model, shape in ((recurrent, (2, 3, 4)), (added, (2, 4))):
        with apply_policy(model, Policy("mixed_bfloat16")):
            assert model.predict(np.ones(shape, np.float32), verbose=0).dtype == np.float32


def test_a_wrapper_takes_the_dtype_of_what_it_wraps() -> None:
    tagged = stack(
        layers.TimeDistributed(layers.LayerNormalization(), name="normed"),
        layers.TimeDistributed(layers.Dense(4, name="dense"), name="timed"),
        layers.TimeDistributed(layers.Dense(2, activation="softmax", name="tag"), name="tags"),
        shape=(3, 4),
    )
    found = whys(tagged)
    assert (found["normed"], found["timed"], found["timed/dense"]) == (("float32", "inner"), COMPUTE, COMPUTE)
    assert (found["tags"], found["tags/tag"]) == (HEAD, SENSITIVE)


class Named(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Layers whose names tell, and some that only seem to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(4, name=name) for name in ("dense", "lm_head", "class_logits_1", "headless")]
        self.heads = stack(layers.Dense(4, name="deep"), layers.Dense(4, name="top"))
        self.heads.name = "classifier"
        self.attend = layers.MultiHeadAttention(2, 2, name="attention_head")

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        x = self.attend(x[:, None], x[:, None])[:, 0]
        return self.heads(x)


def test_names_tell_the_heads_of_a_subclassed_model() -> None:
    model = Named()
    model(np.ones((1, 4), np.float32))
    found = whys(model)
    assert {path for path, choice in found.items() if choice == HEAD} == {"lm_head", "class_logits_1", "classifier/top"}
    assert found["headless"] == found["attention_head"] == found["attention_head/query"] == COMPUTE
    assert [path for path, choice in whys(model, heads=False).items() if choice == HEAD] == []


def test_a_dtype_given_to_a_constructor_is_left_alone() -> None:
    inputs = keras.Input((3, 4))
    hidden = layers.Dense(4, name="wide", dtype="float32")(inputs)
    hidden = layers.MultiHeadAttention(2, 2, name="attend", dtype="float32")(hidden, hidden)
    hidden = layers.Dense(4, name="same", dtype="mixed_bfloat16")(hidden)
    model = keras.Model(inputs, layers.Dense(4, name="last")(layers.Dense(4, name="plain", trainable=False)(hidden)))
    own = {name: model.get_layer(name).dtype_policy for name in ("wide", "attend", "same")}
    with apply_policy(model, Policy("mixed_float16")) as applied:
        found = applied.choices
        assert all(model.get_layer(name).dtype_policy is policy for name, policy in own.items())
        assert model.get_layer("attend").query_dense.compute_dtype == "float32", "what is inside goes with it"
    assert {path for path, choice in found.items() if choice == (None, "given")} >= {"wide", "attend", "attend/query"}
    assert found["same"] == (None, "given")
    assert found["plain"] == ("float16", "compute")
    forced = Policy("mixed_float16", overrides={"wide": "float16"})
    assert whys(model, forced)["wide"] == ("float16", "override")


@pytest.mark.parametrize(
    ("given", "policy", "kept"),
    [
        ("mixed_float16", "mixed_float16", True),
        ("mixed_float16", "mixed_bfloat16", False),
        ("mixed_float16", "float32", False),
        ("mixed_bfloat16", "mixed_float16", True),
        ("mixed_bfloat16", "float32", False),
        ("float64", "mixed_float16", True),
        ("float64", "float64", False),
    ],
)
def test_given_16_bits_yield_where_the_policy_cannot_carry_them(given: str, policy: str, kept: bool) -> None:
    model = stack(layers.Dense(4, name="dense", dtype=given), layers.Dense(2))
    assert (whys(model, policy)["dense"] == (None, "float64" if given == "float64" else "given")) is kept


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()
def test_what_was_given_by_loading_or_cloning_says_nothing(tmp_path: Path) -> None:
    model = stack(layers.Dense(4, name="dense"), layers.Dense(2, name="last"))
    model.save(tmp_path / "model.keras")
    for copy in (keras.models.clone_model(model), keras.saving.load_model(tmp_path / "model.keras")):
        assert whys(copy)["dense"] == COMPUTE


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in quantize()
def test_layers_that_are_quantized_or_compute_in_integers_keep_their_own() -> None:
    inputs = keras.Input((2,), dtype="int64")
    found = layers.IntegerLookup(vocabulary=[5, 7], name="lookup")(layers.Identity(dtype="int64", name="ids")(inputs))
    hidden = layers.Flatten()(layers.Embedding(3, 4, name="embedding")(found))
    quantized = layers.Dense(4, name="quantized")
    model = keras.Model(inputs, layers.Dense(2, name="last")(quantized(hidden)))
    x = np.array([[5, 7], [1, 5]])
    quantized.quantize("int8")
    own, reference = quantized.dtype_policy, model.predict(x, verbose=0)
    with apply_policy(model, Policy("mixed_bfloat16")) as applied:
        assert (applied.choices["ids"], applied.choices["lookup"]) == ((None, "not floating"), SENSITIVE)
        assert (applied.choices["quantized"], quantized.dtype_policy) == ((None, "quantized"), own)
        assert applied.choices["embedding"] == COMPUTE
        np.testing.assert_allclose(model.predict(x, verbose=0), reference, atol=0.03)
