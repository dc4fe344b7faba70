"""`polyamp.lint` for Keras: each planted fault is found, its clean counterpart is quiet, and nothing is touched."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import ArgumentError

X, Y = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8), np.arange(8) % 4
BATCH = (X, Y)


@keras.saving.register_keras_serializable()
class RMSNorm(keras.layers.Layer):
    """One that is written by hand and does not cast."""

    def call(self, x: Any) -> Any:
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + tf.cast(1e-4, x.dtype))


def net(policy: str = "float32", norm: Any = keras.layers.LayerNormalization, head: str | None = None) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu", dtype=policy, name="body"),
            norm(dtype=policy, name="norm"),
            keras.layers.Dropout(0.5, dtype=policy, name="drop"),
            keras.layers.Dense(4, dtype=head or policy, name="lm_head"),
        ]
    )


def loss_fn(model: Any, batch: Any) -> Any:
    logits = tf.cast(model(batch[0], training=True), tf.float32)
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True))


def rules(report: Any) -> list[str]:
    return [each.rule for each in report.findings]


def finding(report: Any, rule: str) -> Any:
    return next(each for each in report.findings if each.rule == rule)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_float32_and_mixed_bfloat16_are_clean(policy: str) -> None:
    report = polyamp.lint(net(policy), optimizer=keras.optimizers.AdamW(1e-3), loss_fn=loss_fn, batch=BATCH)
    assert rules(report) == []
    assert report.unchecked == {}


def test_parameters_in_16_bits_do_not_move() -> None:
    """`bfloat16` for `mixed_bfloat16`. 0.999 is 1 in bfloat16, so that Adam's bias correction makes every step zero."""
    model, optimizer = net("bfloat16"), keras.optimizers.Adam(1e-2)
    report = polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=BATCH)
    found = finding(report, "parameters_in_16_bits")
    names = ["body/kernel", "body/bias", "norm/gamma", "norm/beta", "lm_head/kernel", "lm_head/bias"]
    assert sorted(found.places) == sorted(names)
    assert found.share == 1.0
    assert finding(report, "moments_in_16_bits").places[:2] == [
        f"momentum of {found.places[0]}",
        f"velocity of {found.places[0]}",
    ]
    assert finding(report, "head_in_16_bits").places == ["lm_head/kernel"]
    assert not optimizer.built


def test_a_large_learning_rate_moves_them_and_a_warmup_is_no_measurement() -> None:
    for rate, share in ((1e3, 0.0), (0.0, None)):
        report = polyamp.lint(net("bfloat16"), optimizer=keras.optimizers.SGD(rate), loss_fn=loss_fn, batch=BATCH)
        assert finding(report, "parameters_in_16_bits").share == share


def test_the_share_is_that_of_a_step_by_hand() -> None:
    model = net("bfloat16")
    model.layers[2].rate = 0.0
    optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
    optimizer.build(model.trainable_variables)
    found = finding(polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=BATCH), "parameters_in_16_bits")
    before = [np.array(each.numpy()) for each in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = loss_fn(model, BATCH)
    gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    acts = [each.numpy() != 0 for each in gradients]
    triples = zip(acts, before, model.trainable_variables, strict=True)
    still = sum(int((act & (old == new.numpy())).sum()) for act, old, new in triples)
    assert found.share == still / sum(int(act.sum()) for act in acts)
    assert 0.01 < found.share < 0.99


def test_a_norm_in_16_bits() -> None:
    report = polyamp.lint(net("mixed_bfloat16", RMSNorm), loss_fn=loss_fn, batch=BATCH)
    assert rules(report) == ["norm_in_16_bits"]
    assert "norm: Rsqrt" in report.findings[0].places
    assert rules(polyamp.lint(net("float32", RMSNorm), loss_fn=loss_fn, batch=BATCH)) == []


def test_a_softmax_in_16_bits() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return -tf.reduce_mean(tf.math.log(tf.cast(tf.nn.softmax(model(batch[0]))[:, 0], tf.float32)))

    report = polyamp.lint(net("mixed_bfloat16"), loss_fn=loss, batch=BATCH)
    assert rules(report) == ["softmax_in_16_bits"]
    assert report.findings[0].places == [".: Softmax"]
    assert rules(polyamp.lint(net(), loss_fn=loss, batch=BATCH)) == []


def test_a_scaler_and_the_dtype_that_needs_one() -> None:
    plain, scaled = keras.optimizers.SGD(0.1), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for arguments in ({}, {"loss_fn": loss_fn, "batch": BATCH}):  # the layers' policies say it without a pass

        def found(policy: str, optimizer: Any, arguments: Any = arguments) -> list[str]:
            return rules(polyamp.lint(net(policy), optimizer=optimizer, **arguments))

        assert found("mixed_bfloat16", scaled) == ["scaler_without_float16"]
        assert found("mixed_bfloat16", plain) == []
        assert found("mixed_float16", plain) == ["float16_without_scaler"]
        assert found("mixed_float16", scaled) == []


def test_the_optimizer_of_compile_is_taken() -> None:
    model = net("mixed_float16")
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert rules(polyamp.lint(model)) == ["float16_without_scaler"]
    model.compile("sgd", "mse")  # Keras wraps the optimizer under a mixed_float16 policy of the model
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert rules(polyamp.lint(model)) == ([] if scaled else ["float16_without_scaler"])


def test_a_head_in_16_bits() -> None:
    assert finding(polyamp.lint(net(head="float16"), loss_fn=loss_fn, batch=BATCH), "head_in_16_bits").places == [
        "lm_head/kernel"
    ]
    report = polyamp.lint(net("bfloat16", head="float32"), loss_fn=loss_fn, batch=BATCH)
    assert "head_in_16_bits" not in rules(report)


@pytest.mark.parametrize("warm", [False, True])
def test_nothing_is_touched(*, warm: bool) -> None:
    model = net("float16", keras.layers.BatchNormalization)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(1e-3))
    if warm:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        model.fit(X, Y, verbose=0)
        optimizer = model.optimizer
    held = [*model.variables, *optimizer.variables, *optimizer.inner_optimizer.variables]
    before = [(each.path, each.numpy().tobytes()) for each in held]
    polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=BATCH)
    held = [*model.variables, *optimizer.variables, *optimizer.inner_optimizer.variables]
    assert [(each.path, each.numpy().tobytes()) for each in held] == before
    assert not tf.config.functions_run_eagerly()


def test_refused_arguments() -> None:
    model = net()
    for arguments, message in (
        ({"step": print}, "step is for torch"),
        ({"opt_state": {}}, "opt_state is for JAX"),
        ({"optimizer": "adam"}, "optimizer must be a Keras optimizer. Received: 'adam'"),
        ({"scaler": 2.0}, "scaler must be a keras.optimizers.LossScaleOptimizer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            polyamp.lint(model, **arguments)
    with pytest.raises(ArgumentError, match="model must be built"):
        polyamp.lint(keras.Sequential([keras.layers.Dense(2)]))
