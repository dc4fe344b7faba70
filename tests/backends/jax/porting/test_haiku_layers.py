"""Every haiku layer in the canonical layout, with a batch that shows its class and by its names alone: what the
textbook formula gives of the canonical arrays is what haiku gives, and the way back is bit-identical."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.porting.converter import CONVERTER
from polyamp_jax.porting.libraries import haiku_layers
from tests.porting.layers import formulas
from tests.porting.layers.cases import CASES, inputs
from tests.porting.layers.haiku_layers import BUILD, MISSING, run


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
def test_the_textbook_formula_of_the_canonical_arrays_gives_what_haiku_gives_and_the_way_back_is_exact(
    name: str,
) -> None:
    model, x = BUILD[name](), inputs(name)
    inventory, by_names = CONVERTER.inventory(model, x), CONVERTER.inventory(model)
    expected, given = formulas.output(name, to_canonical(inventory)), run(model, x)
    assert given.shape == expected.shape
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=2e-5)
    kinds = {layer.path: [form.kind for form in layer.forms] for layer in by_names.layers}
    for layer in inventory.layers:
        if layer.leaves:
            assert layer.forms[0].kind in kinds[layer.path], layer.path
    zeros = jax.tree.map(lambda leaf: np.zeros_like(leaf) if isinstance(leaf, jax.Array) else leaf, model)
    for found in (inventory, by_names):
        for number in range(max(len(layer.forms) for layer in found.layers)):
            back = CONVERTER.fill(zeros, moved(found, number))
            for one, other in zip(_arrays(model), _arrays(back), strict=True):
                np.testing.assert_array_equal(one, other)


def _arrays(model: Any) -> list[Any]:
    """The arrays that are moved: all but those that only correct a moving average for its start."""
    named = jax.tree_util.tree_leaves_with_path(model[1])
    return [leaf for keys, leaf in named if not jax.tree_util.keystr(keys).endswith(("['hidden']", "['counter']"))]


def test_a_class_of_layers_is_named_in_the_file_of_its_row_alone() -> None:
    text = {file.name: file.read_text() for file in Path(haiku_layers.__file__).parent.glob("haiku*.py")}
    for kind in haiku_layers.LAYER_SPECS:
        name = re.compile(rf"\bhk\.{kind.__name__}\b(?!`)")
        assert [file for file, source in text.items() if name.search(source)] == ["haiku_layers.py"], kind
