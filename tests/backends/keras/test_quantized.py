"""`fit` and `train_step` after `model.quantize("int8")`: what Keras still trains is trained, and the codes stay.

Keras's own `fit` trains biases, norms and LoRA matrices then; a kernel of int8 codes is no trainable variable.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras

LEFT = {"hidden/bias", "norm/gamma", "norm/beta", "out/bias"}
TRAINED = LEFT | {f"{layer}/lora_kernel_{one}" for layer in ("hidden", "out") for one in "ab"}
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")  # of Keras
ROWS = np.random.default_rng(0).normal(size=(16, 4)).astype("float32"), np.ones((16, 3), "float32")


@pytest.fixture
def make_model() -> Any:
    """Makes a network of two dense layers with LoRA matrices, or none, with the same values at every call."""

    def make(*, lora: bool = True) -> Any:
        seeded = keras.initializers.GlorotUniform(seed=0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "gelu", kernel_initializer=seeded, name="hidden"),
                keras.layers.LayerNormalization(name="norm"),
                keras.layers.Dense(3, kernel_initializer=seeded, name="out"),
            ]
        )
        for layer in (model.layers[0], model.layers[2]) if lora else ():
            layer.enable_lora(2, a_initializer=seeded)
        return model

    return make


def fit(model: Any) -> list[float]:
    """The losses of two epochs of two batches."""
    return list(model.fit(*ROWS, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"])


def values(model: Any) -> dict[str, Any]:
    """Path below the model -> values, of its weights."""
    return {
        "/".join(each.path.split("/")[-2:]): np.array(keras.ops.convert_to_numpy(each.value)) for each in model.weights
    }


def changed(model: Any, before: dict[str, Any]) -> set[str]:
    """The weights that differ from those before."""
    return {path for path, value in values(model).items() if not np.array_equal(value, before[path])}


def test_fit_of_a_quantized_model_is_kerass_own(make_model: Any) -> None:
    own, model = make_model(), make_model()
    for each in (own, model):
        each.quantize("int8")
    before = values(model)
    assert before["hidden/kernel"].dtype == np.int8
    own.compile(keras.optimizers.Adam(1e-2), "mse")
    scaler = polyamp.LossScaler(init_scale=64.0)
    recipe = polyamp.Recipe(policy="float32", scaler=scaler, optimizer=keras.optimizers.Adam(1e-2))
    polyamp_keras.compile(model, recipe, loss="mse")
    assert fit(model) == pytest.approx(fit(own), rel=1e-5)
    assert changed(model, before) == TRAINED


def test_fit_goes_on_after_quantize(make_model: Any) -> None:
    """The layers keep polyamp's policy under Keras's int8, and the optimizer the state of what is still trained."""
    model = make_model()
    scaler = polyamp.LossScaler(init_scale=64.0)
    recipe = polyamp.Recipe(policy="mixed_bfloat16", scaler=scaler, optimizer=polyamp.adam(1e-2), clip_norm=1.0)
    polyamp_keras.compile(model, recipe, loss="mse")
    first = fit(model)
    model.quantize("int8")
    before = values(model)
    assert [layer.dtype_policy.name for layer in model.layers] == [
        "int8_from_mixed_bfloat16",
        "float32",
        "int8_from_float32",
    ]
    assert first[0] > first[1] > fit(model)[1]
    assert changed(model, before) == TRAINED
    assert (int(model.optimizer.iterations), model.optimizer.skipped_steps) == (8, 0)


def test_fit_after_quantize_took_variables_away(make_model: Any, backend: str) -> None:
    """Without LoRA a kernel of int8 codes is no trainable variable any more. On JAX an optimizer gets all of those
    that it was built for: `fit` is refused there, before Keras takes the model's values."""
    model = make_model(lora=False)
    polyamp_keras.compile(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(1e-2)), loss="mse")
    model.quantize("int8")
    before = values(model)
    if backend == "jax":
        message = "compiled with 6 trainable variables.*Received: 4 in fit.*polyamp_keras.compile"
        with pytest.raises(polyamp.errors.ModelError, match=message):
            fit(model)
        assert changed(model, before) == set()
        polyamp_keras.compile(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(1e-2)), loss="mse")
    losses = fit(model)
    assert losses[0] > losses[1]
    assert changed(model, before) == LEFT


def test_train_step_of_a_quantized_model(make_model: Any) -> None:
    model = make_model()
    model.quantize("int8")
    before = values(model)
    batch = tuple(keras.ops.convert_to_tensor(rows) for rows in ROWS)
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adam(1e-2))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda model, rows: polyamp.losses.mean_squared_error(model(rows[0]), rows[1]), recipe)
    losses = []
    for _ in range(3):
        state, result = step(state, batch)
        losses.append(float(result.loss))
    assert losses[0] > losses[1] > losses[2]
    assert changed(state.model, before) == TRAINED
