"""A model that was lent is bit for bit as before; dropout is off, or takes the numbers that it is given."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from polyamp_keras.models.variables import model_variables
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.observe.observer import OBSERVER

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((4, 3, 6)).astype("f4")


def network() -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((3, 6), batch_size=4)
    hidden = layers.LSTM(5, stateful=True, return_sequences=True, name="memory")(given)
    hidden = layers.Dropout(0.5, name="drop")(layers.BatchNormalization(name="norm")(hidden))
    return keras.Model(given, layers.Dense(2, name="head")(hidden))


def loss_of(model: Any, batch: Any) -> Any:
    return keras.ops.mean(model(batch) ** 2)


def everything(model: Any) -> dict[str, Array]:
    return {name: to_numpy(variable) for role in model_variables(model) for name, variable in role.items()}


def train(model: Any) -> float:
    state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.adam(0.1)))
    _, result = polyamp.train_step(loss_of, state.recipe, compile=False)(state, X)
    return float(result.loss)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_lent_model_is_as_before(error: type[BaseException] | None) -> None:
    model = network()
    train(model)
    before, attributes = everything(model), {layer.name: dict(vars(layer)) for layer in model.layers}
    with pytest.raises(error) if error else OBSERVER.disable_dropout(model, None), OBSERVER.model_copy(model) as lent:
        assert lent is model
        train(lent)
        lent.get_layer("head").trainable = False
        lent.get_layer("memory").note = "left"
        now = everything(model)
        assert [name for name, array in before.items() if (now[name] == array).all()] == ["memory/lstm_cell/seed_0"]
        if error:
            raise error
    after = everything(model)
    assert list(after) == list(before)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert attributes == {layer.name: dict(vars(layer)) for layer in model.layers}
    assert model.get_layer("head").trainable
    assert len(model.trainable_variables) == 7


def test_a_model_without_variables_is_not_lent() -> None:
    with (
        pytest.raises(polyamp.ModelError, match="must be built"),
        OBSERVER.model_copy(keras.Sequential([layers.Dense(2)])),
    ):
        pass


def test_the_device_is_the_models_own() -> None:
    assert OBSERVER.device(network()) == "CPU:0"
    assert OBSERVER.device(layers.Activation("relu")) == ""
