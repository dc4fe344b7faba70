"""What functional and sequential Keras models prove about the order of what layers take, and what they do not."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

from polyamp.porting.layouts.input_order import InputOrder
from polyamp_keras.porting.converter import CONVERTER

LAST = {"dense": InputOrder("conv", "last")}


def conv(**settings: Any) -> Any:
    return layers.Conv2D(4, 3, name="conv", **settings)


def dense() -> Any:
    return layers.Dense(5, name="dense")


def orders(model: Any) -> dict[str, InputOrder]:
    found = CONVERTER.inventory(model).inputs
    return {path: order for path, order in found.items() if order.channels is not None}


def sequential(*stack: Any) -> Any:
    return keras.Sequential([keras.Input((6, 7, 3)), *stack])


def test_s30_a_flatten_of_a_functional_model_is_one_of_channels_last() -> None:
    assert orders(sequential(conv(), layers.ReLU(), layers.MaxPooling2D(2), layers.Flatten(), dense())) == LAST
    image = keras.Input((6, 7, 3))
    flat = layers.Reshape((-1,))(layers.BatchNormalization()(conv(activation="relu")(image)))
    model = keras.Model(image, [dense()(layers.Dropout(0.5)(flat)), layers.Dense(2, name="other")(flat)])
    assert orders(model) == {**LAST, "other": InputOrder("conv", "last")}
    inner = sequential(conv(), layers.Flatten())
    inner.name = "inner"
    assert orders(keras.Model(image, dense()(inner(image)))) == {"dense": InputOrder("inner/conv", "last")}


def test_s30_a_reshape_in_a_sequential_is_one_of_channels_last() -> None:
    stack = [layers.Dense(24, name="dense"), layers.ReLU(), layers.Reshape((2, 3, 4))]
    model = keras.Sequential([keras.Input((5,)), *stack, layers.Conv2D(2, 1, name="up")])
    assert orders(model) == {"up": InputOrder("dense", "last")}
    given = keras.Input((5,))
    hidden = stack[0](given)  # another layer may take it as it is
    assert orders(keras.Model(given, layers.Conv2D(2, 1)(layers.Reshape((2, 3, 4))(hidden)))) == {}


@pytest.mark.parametrize(
    "between",
    [
        lambda x: layers.Flatten()(layers.Permute((3, 1, 2))(x)),
        lambda x: layers.LayerNormalization()(layers.Flatten()(x)),  # arrays in the order of the flatten
        lambda x: layers.Concatenate()([layers.Flatten()(x), layers.Flatten()(x)]),
        lambda x: layers.Flatten(data_format="channels_first")(x),
        lambda x: layers.Lambda(lambda y: keras.ops.reshape(y, (-1, 80)), output_shape=(80,))(x),
    ],
)
def test_s30_other_graphs_prove_nothing(between: Any) -> None:
    image = keras.Input((6, 7, 3))
    assert orders(keras.Model(image, dense()(between(conv()(image))))) == {}


def test_s30_channels_first_other_activations_and_own_calls_prove_nothing() -> None:
    assert orders(keras.Sequential([keras.Input((3, 6, 7)), conv(data_format="channels_first"), dense()])) == {}
    assert orders(sequential(conv(activation="glu"), layers.Flatten(), dense())) == {}  # halves the channels

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.flat, self.dense = conv(), layers.Flatten(), dense()

        def call(self, x: Any) -> Any:
            return self.dense(self.flat(self.conv(x)))

    model = Net()
    model(keras.ops.ones((1, 6, 7, 3)))
    assert orders(model) == {}


def test_s30_a_layer_that_is_called_twice_with_other_values_proves_nothing() -> None:
    image, other = keras.Input((6, 7, 3)), keras.Input((80,))
    shared = dense()
    model = keras.Model([image, other], [shared(layers.Flatten()(conv()(image))), shared(other)])
    assert orders(model) == {}
