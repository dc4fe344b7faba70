"""`polyamp_tensorflow.compile`, then plain `fit`, `evaluate` and `predict`: Keras's numbers, polyamp's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import (
    LossError,
    LossScaleError,
    LossScaleStuckError,
    ModelError,
    PolyampError,
    RecipeError,
    UnsupportedError,
)
from polyamp_tensorflow import LossScaleOptimizer, SpecOptimizer, guard
from polyamp_tensorflow import compile as compile_model
from polyamp_tensorflow.step.tensorflow_only import graph_function

pytestmark = pytest.mark.filterwarnings("ignore:use_ema with accumulate_steps")  # said by test_own_clip


def make_model(*, norm: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    middle = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=3)] if norm else []
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), *middle, keras.layers.Dense(3)])


def sequence_model() -> Any:
    """Its mask reaches the loss: padding counts for nothing."""
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(7, 4, mask_zero=True)
    recurrent = keras.layers.LSTM(4, return_sequences=True)
    return keras.Sequential([keras.Input((5,), dtype="int32"), embedding, recurrent, keras.layers.Dense(3)])


def rows(count: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)).astype(np.float32), rng.integers(0, 3, size=count)


def sequences(count: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, size=(count, 5)), rng.integers(0, 3, size=(count, 5))


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),  # Keras then compiles with XLA
    "no jit": ({"jit_compile": False}, {}),
    "eager": ({"run_eagerly": True}, {}),
    "several steps per execution": ({"steps_per_execution": 3}, {}),
    "class weights and validation": (
        {"metrics": ["accuracy"]},
        {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}, "validation_split": 0.25},
    ),
    "weighted metrics": ({"weighted_metrics": ["accuracy"]}, {"sample_weight": np.linspace(0.0, 2.0, 24)}),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_fit_gives_the_numbers_of_plain_keras(way: str) -> None:
    compiling, fitting = WAYS[way]
    plain, ours = make_model(), make_model()
    plain.compile(keras.optimizers.Adam(1e-2), loss=cross_entropy(), **compiling)
    recipe = polyamp.Recipe(optimizer=keras.optimizers.Adam(1e-2), scaler=polyamp.LossScaler(init_scale=1024.0))
    compile_model(ours, recipe, loss=cross_entropy(), **compiling)
    histories = [
        model.fit(*rows(), batch_size=4, epochs=2, shuffle=False, verbose=0, **fitting).history
        for model in (plain, ours)
    ]
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    for a, b in zip(plain.weights, ours.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        ours.evaluate(*rows(), verbose=0, return_dict=True)["loss"],
        plain.evaluate(*rows(), verbose=0, return_dict=True)["loss"],
        rtol=1e-5,
    )
    np.testing.assert_allclose(ours.predict(rows()[0], verbose=0), plain.predict(rows()[0], verbose=0), rtol=1e-4)


def test_masks_and_sparse_gradients() -> None:
    plain, ours = sequence_model(), sequence_model()
    plain.compile(keras.optimizers.SGD(0.5), loss=cross_entropy())
    recipe = polyamp.Recipe(optimizer=keras.optimizers.SGD(0.5), scaler=polyamp.LossScaler(init_scale=1024.0))
    compile_model(ours, recipe, loss=cross_entropy())
    for model in (plain, ours):
        model.fit(*sequences(), batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(plain.weights, ours.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.1, "clip_eps": 0.05}, {"clip_value": 0.01}], ids=["norm", "value"])
def test_a_spec_in_fit_is_the_spec_in_the_step(clip: dict[str, float]) -> None:
    """S21: the same formula, clip and schedule, whoever keeps the loop."""
    recipe = polyamp.Recipe(
        optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, warmup_steps=2, total_steps=8), eps=1e-3),
        scaler=polyamp.LossScaler(init_scale=64.0),
        **clip,
    )
    x, y = rows()
    fitted, stepped = make_model(norm=False), make_model(norm=False)
    compile_model(fitted, recipe, loss=cross_entropy(), jit_compile=False)
    fitted.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    state = polyamp.init(stepped, recipe)
    step = polyamp.train_step(
        lambda model, batch: polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"]), recipe
    )
    for start in range(0, 24, 4):
        step(state, {"x": x[start : start + 4], "y": y[start : start + 4]})
    for a, b in zip(fitted.weights, stepped.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)
    assert int(fitted.optimizer.iterations) == int(state.step) == 6


def test_s34_averages_in_fit_are_kerass() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Give it ema=None and an optimizer of Keras's with use_ema=True, ema_m"
    ):
        compile_model(make_model(), polyamp.Recipe(ema=polyamp.Ema(0.9)), loss=cross_entropy())


@pytest.mark.parametrize(("accumulate", "jit_compile"), [(1, True), (2, False)])
def test_a_skipped_step_moves_nothing_but_scale_and_seeds(accumulate: int, jit_compile: bool) -> None:
    recipe = polyamp.Recipe(
        optimizer=keras.optimizers.AdamW(1e-2, use_ema=True),
        scaler=polyamp.LossScaler(init_scale=16.0),
        accumulate_steps=accumulate,
    )
    model = make_model()
    compile_model(model, recipe, loss=cross_entropy(), jit_compile=jit_compile)
    x, y = rows(4 * accumulate)
    inputs = x.copy()
    inputs[-1] = np.inf  # in the last micro-batch: the first one's statistics are taken back as well
    model.train_on_batch(x[:4], y[:4])
    if accumulate == 2:
        model.train_on_batch(x[4:], y[4:])
    kept = [*model.weights, *model.optimizer.inner_optimizer.variables]
    before = [np.array(variable.numpy()) for variable in kept]
    for start in range(0, 4 * accumulate, 4):
        model.train_on_batch(inputs[start : start + 4], y[start : start + 4])
    for variable, value in zip(kept, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    assert (float(model.optimizer.dynamic_scale), model.optimizer.skipped_steps) == (8.0, 1)


@pytest.mark.parametrize("scaler", [polyamp.LossScaler(init_scale=64.0), polyamp.LossScaler.off()], ids=["on", "off"])
def test_s08_the_smaller_last_batch_of_an_epoch_counts_by_its_rows(scaler: Any) -> None:
    """Ten rows in batches of four: windows of 4 + 4, and of 2 + 4 over the end of the first epoch."""
    models = []
    for accumulate, sizes in ((2, [4, 4, 2, 4, 4, 2]), (1, [8, 6, 6])):
        recipe = polyamp.Recipe(
            optimizer=polyamp.sgd(0.1, momentum=0.9), scaler=scaler, clip_norm=0.5, accumulate_steps=accumulate
        )
        model = make_model(norm=False)
        compile_model(model, recipe, loss=cross_entropy(), jit_compile=False)
        x, y = rows(10)
        if accumulate == 2:
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        else:
            x, y = np.concatenate([x, x]), np.concatenate([y, y])
            for end, size in zip(np.cumsum(sizes), sizes, strict=True):
                model.train_on_batch(x[end - size : end], y[end - size : end])
        assert int(model.optimizer.iterations) == 3
        models.append(model)
    for one, other in zip(*(model.weights for model in models), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


def test_keras_own_scaler_moves_statistics_on_a_skipped_step() -> None:
    model = make_model()
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss=cross_entropy(), jit_compile=False
    )
    x, y = rows(4)
    x[0] = np.inf
    model.train_on_batch(x, y)
    assert not np.isfinite(model.layers[1].moving_mean.numpy()).all()


def test_the_model_is_not_wrapped_twice() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.dtype_policy = "mixed_float16"
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    assert model.optimizer is optimizer
    compile_model(model, polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1)), loss="mse")
    assert type(model.optimizer) is LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is SpecOptimizer


def test_bfloat16_layers_and_a_float32_loss() -> None:
    seen = []

    def loss(y: Any, predictions: Any) -> Any:
        seen.append(predictions.dtype)
        return keras.ops.square(predictions - y)

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(6), keras.layers.Dense(1)])
    compile_model(
        model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1)), loss=loss, jit_compile=False
    )
    x = rows()[0]
    model.fit(x, x[:, :1], verbose=0)
    assert set(seen) == {"float32"} or set(seen) == {tf.float32}
    assert model.layers[0].compute_dtype == "bfloat16"
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert model.predict(x, verbose=0).dtype == np.float32


def test_compiling_again_takes_the_former_policy_off() -> None:
    model = make_model(norm=False)
    compile_model(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1)), loss=cross_entropy())
    assert model.layers[0].compute_dtype == "bfloat16"
    compile_model(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)), loss=cross_entropy(), jit_compile=False)
    assert model.layers[0].compute_dtype == "float32"
    model.fit(*rows(), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_float16_on_the_cpu_goes_through_xla_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_function, "_float16_warned", [])
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    model = make_model(norm=False)
    with pytest.warns(UserWarning, match="float16 on TensorFlow's CPU is slow outside XLA") as caught:
        compile_model(model, recipe, loss=cross_entropy())
    assert [warning.filename for warning in caught] == [__file__]
    assert model.jit_compile is True
    model.fit(*rows(), verbose=0)
    assert int(model.optimizer.iterations) + model.optimizer.skipped_steps == 1
    for asked, jit in ((False, False), ("auto", False), (True, True)):
        compile_model(model, recipe, loss=cross_entropy(), jit_compile=asked)
        assert model.jit_compile is jit


def sigmoid_model() -> Any:
    """15 layers that each shrink gradients to 0.55 of them; biases center the layers' inputs."""
    keras.utils.set_random_seed(0)
    orthogonal = keras.initializers.Orthogonal
    layers = [keras.layers.Dense(8, "sigmoid", kernel_initializer=orthogonal(2.2, seed=i)) for i in range(15)]
    head = keras.layers.Dense(8, kernel_initializer=orthogonal(0.01, seed=99))
    model = keras.Sequential([keras.Input((8,)), *layers, head])
    for layer in model.layers[1:]:
        layer.bias.assign(-0.5 * layer.kernel.numpy().sum(0))
    return model


def test_15_sigmoid_layers_train_with_scaling_and_not_without() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 8)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(8, 8)) * 0.5).astype(np.float32)
    whole = tf.data.Dataset.from_tensors((x, y))  # repeated in one epoch: Keras's work between epochs takes longer
    policy = "mixed_float16"
    losses, moved = {}, {}
    for name, chosen, scaler in (("float32", "float32", "off"), ("scaled", policy, None), ("unscaled", policy, "off")):
        model = sigmoid_model()
        before = model.layers[0].kernel.numpy()
        recipe = polyamp.Recipe(policy=chosen, scaler=scaler, optimizer=polyamp.adam(1e-2))
        compile_model(model, recipe, loss="mse", jit_compile=False)
        assert model.layers[7].compute_dtype == ("float32" if name == "float32" else "float16")
        model.fit(whole.repeat(119), shuffle=False, verbose=0)
        losses[name] = model.fit(whole, shuffle=False, verbose=0).history["loss"][-1]
        moved[name] = float(np.abs(model.layers[0].kernel.numpy() - before).max())
    plateau = float(np.mean((y - y.mean(0)) ** 2))
    assert losses["float32"] < 0.8 * plateau
    assert losses["scaled"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["unscaled"] > 0.99 * plateau
    assert moved["unscaled"] == 0.0
    assert moved["scaled"] > 0.1


def test_a_stuck_scale_ends_fit_and_names_the_parameters() -> None:
    model = make_model(norm=False)
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=2.0**-13, patience=4))
    compile_model(model, recipe, loss=cross_entropy(), steps_per_execution=2, jit_compile=False)
    x, y = rows(64)
    with pytest.raises(LossScaleStuckError, match=rf"4 steps in a row .*: {model.weights[0].path}, "):
        model.fit(np.full_like(x, np.nan), y, batch_size=4, verbose=0)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # Keras's files
def test_callbacks_see_an_ordinary_optimizer(tmp_path: Any) -> None:
    model = make_model(norm=False)
    compile_model(model, polyamp.Recipe(optimizer=polyamp.sgd(0.5)), loss=cross_entropy(), jit_compile=False)
    rates = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(float(logs["learning_rate"]))),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.weights.h5"), save_weights_only=True, monitor="loss"),
        keras.callbacks.EarlyStopping(monitor="loss", patience=2, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    model.fit(*rows(), epochs=3, callbacks=callbacks, verbose=0)
    assert rates == [0.25, 0.125, 0.0625]
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.0625


def test_a_model_with_its_own_train_step_keeps_it() -> None:
    calls = []

    class Own(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            calls.append("own")
            return super().train_step(data)

    model = Own()
    model(np.ones((1, 4), np.float32))
    compile_model(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)), loss=cross_entropy(), jit_compile=False)
    model.fit(*rows(), verbose=0)
    assert calls == ["own"]
    assert int(model.optimizer.iterations) == 1


def test_float32_matmul_holds_while_a_function_runs() -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    before, seen = enabled(), []
    model = make_model(norm=False)
    policy = polyamp.Policy("float32", float32_matmul="highest")
    compile_model(
        model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)), loss=cross_entropy(), jit_compile=False
    )
    model.make_train_function()
    inner = model.train_function

    def train_step(data: Any) -> Any:
        seen.append(enabled())
        return type(model).train_step(model, data)

    model.train_step = train_step
    model.make_train_function(force=True)
    assert model.train_function is not inner
    model.fit(*rows(), verbose=0)
    assert seen == [False]
    assert enabled() == before


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: compile_model(keras.layers.Dense(1), polyamp.Recipe(), loss="mse"),
            ModelError,
            r"takes a keras\.Model. Received: .*Dense",
        ),
        (
            lambda: compile_model(keras.Sequential([keras.layers.Dense(1)]), polyamp.Recipe(), loss="mse"),
            ModelError,
            "needs a built model",
        ),
        (
            lambda: compile_model(make_model(), polyamp.Recipe(), loss=keras.losses.MeanSquaredError(dtype="float16")),
            LossError,
            r"MeanSquaredError\(dtype='float16'\)",
        ),
        (
            lambda: compile_model(
                make_model(), polyamp.Recipe(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=2.0)), loss="mse"
            ),
            RecipeError,
            r"SGD\(loss_scale_factor=2.0\)",
        ),
        (lambda: guard(make_model()), LossScaleError, "must be compiled with polyamp's LossScaleOptimizer"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], kind: type[PolyampError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_refused_compile_leaves_the_policy_that_was_there() -> None:
    model = make_model(norm=False)
    compile_model(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1)), loss=cross_entropy())
    before = [layer.compute_dtype for layer in model.layers]
    refused = polyamp.Policy("mixed_float16", op_rules={"add": "float32"})
    with pytest.raises(PolyampError):
        compile_model(model, polyamp.Recipe(policy=refused, optimizer=polyamp.sgd(0.1)), loss=cross_entropy())
    assert [layer.compute_dtype for layer in model.layers] == before


def test_a_model_that_keras_compiles_anew_trains_as_keras_has_it() -> None:
    model = make_model(norm=False)
    compile_model(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)), loss=cross_entropy(), jit_compile=False)
    model.compile("sgd", loss=cross_entropy(), jit_compile=False)
    assert np.isfinite(model.fit(*rows(), verbose=0).history["loss"][0])
