"""Every layer in the canonical layout: what its textbook formula gives of the canonical arrays is what Keras gives."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.converter import CONVERTER
from tests.porting.layers import formulas
from tests.porting.layers.cases import CASES, inputs
from tests.porting.layers.keras_layers import BUILD, MISSING, run


def test_every_case_is_built() -> None:
    assert set(BUILD) | set(MISSING) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_textbook_formula_of_the_canonical_arrays_gives_what_keras_gives(name: str) -> None:
    model = BUILD[name]()
    found = to_canonical(CONVERTER.inventory(model))
    expected, given = formulas.output(name, found), run(model, inputs(name))
    assert np.shape(given) == np.shape(expected)
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_export_and_back_is_bit_identical_and_names_every_variable_once(name: str) -> None:
    model = BUILD[name]()
    inventory = CONVERTER.inventory(model)
    names = model_variables(model)
    leaves = {leaf.name: leaf for layer in inventory.layers for leaf in layer.leaves.values() if leaf.tied is None}
    assert sorted([*leaves, *inventory.left]) == sorted(name for role in names for name in role)
    assert [leaf for leaf, of in leaves.items() if of.trainable] == [*names.parameters]
    before = [np.array(weight.numpy()) for weight in model.weights]
    moved: dict[str, Lazy] = {}
    for layer in inventory.layers:
        form = layer.forms[0]
        arrays = {array: Lazy.of(np.array(lazy)) for array, lazy in form.arrays(layer.arrays).items()}
        back = form.leaves(arrays, layer.arrays)
        moved.update({layer.leaves[array].name: Lazy.of(np.array(lazy)) for array, lazy in back.items()})
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape))
    assert CONVERTER.fill(model, moved) is model
    for weight, values in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), values, weight.path)
