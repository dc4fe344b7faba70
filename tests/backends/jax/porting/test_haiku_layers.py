"""Every haiku layer in the canonical layout, with a batch that shows its class and by its names alone: what the
textbook formula gives of the canonical arrays is what haiku gives, and the way back is bit-identical."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from polyamp.porting.canonical import Layer
from polyamp.porting.inventory import Inventory
from polyamp_jax.porting.converter import CONVERTER
from tests.porting.layers import formulas
from tests.porting.layers.cases import CASES, inputs
from tests.porting.layers.haiku_layers import BUILD, MISSING, run


def canonical(inventory: Inventory) -> dict[str, Layer]:
    """The layers in the canonical layout, by path."""
    return {
        layer.path: Layer(layer.forms[0].kind, layer.forms[0].arrays(layer.arrays), layer.forms[0].attributes)
        for layer in inventory.layers
    }


def moved(inventory: Inventory, number: int) -> dict[str, Any]:
    """The leaves of a model by way of their canonical arrays, in a layer's form of this number or its last."""
    found = {}
    for layer in inventory.layers:
        form = layer.forms[min(number, len(layer.forms) - 1)]
        for name, array in form.leaves(form.arrays(layer.arrays), layer.arrays).items():
            found[layer.leaves[name].name] = array
    return found


def test_every_case_is_built() -> None:
    assert sorted([*BUILD, *MISSING]) == sorted(CASES)


@pytest.mark.parametrize("name", BUILD)
def test_the_textbook_formula_of_the_canonical_arrays_gives_what_haiku_gives(name: str) -> None:
    model, x = BUILD[name](), inputs(name)
    inventory = CONVERTER.inventory(model, x)
    expected, given = formulas.output(name, canonical(inventory)), run(model, x)
    assert given.shape == expected.shape
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=2e-5)
    by_names = {layer.path: layer for layer in CONVERTER.inventory(model).layers}
    for layer in inventory.layers:
        if layer.leaves:
            kinds = [form.kind for form in by_names[layer.path].forms]
            assert layer.forms[0].kind in kinds, f"{layer.path} is a {layer.forms[0].kind}, by its names {kinds}"


@pytest.mark.parametrize("name", BUILD)
def test_export_and_back_is_bit_identical_in_every_form(name: str) -> None:
    model = BUILD[name]()
    for batch in (inputs(name), None):
        inventory = CONVERTER.inventory(model, batch)
        for number in range(max(len(layer.forms) for layer in inventory.layers)):
            zeros = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, jax.Array) else leaf, model)
            back = CONVERTER.fill(zeros, moved(inventory, number))
            np.testing.assert_array_equal(run(back, inputs(name)), run(model, inputs(name)))
