"""Architectures that nobody here wrote: every variable in one layer or left, and the export fills the model again."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest

from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.converter import CONVERTER

EXPECTED = {
    "ResNet50": {"conv": 53, "batch_norm": 53, "activation": 49, "pooling": 2, "dense": 1},
    "MobileNetV3Small": {
        "conv": 54,
        "batch_norm": 34,
        "activation": 43,
        "pooling": 10,
        "dropout": 1,
        "flatten": 1,
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_public_model_is_exported_and_filled_bit_for_bit(name: str) -> None:
    model = getattr(keras.applications, name)(weights=None, classes=10)
    inventory = CONVERTER.inventory(model)
    assert Counter(layer.forms[0].kind for layer in inventory.layers) == EXPECTED[name]
    assert (inventory.channels, inventory.spatial) == ("last", 2)
    leaves = [leaf.name for layer in inventory.layers for leaf in layer.leaves.values()]
    assert sorted([*leaves, *inventory.left]) == sorted(name for role in model_variables(model) for name in role)
    before = [np.array(weight.value.numpy()) for weight in model.weights]
    moved: dict[str, Lazy] = {}
    for layer in inventory.layers:
        form = layer.forms[0]
        arrays = {array: Lazy.of(np.array(lazy)) for array, lazy in form.arrays(layer.arrays).items()}
        back = form.leaves(arrays, layer.arrays)
        moved.update({layer.leaves[array].name: Lazy.of(np.array(lazy)) for array, lazy in back.items()})
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape))
    CONVERTER.fill(model, moved)
    for weight, values in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.value.numpy(), values)
