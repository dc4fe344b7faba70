"""Every layer of flax in the canonical layout: what its textbook formula gives of the canonical arrays is what flax
gives, and the way back is bit-identical."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_layout import Form, same
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.libraries import adapt
from polyamp_jax.porting.converter import CONVERTER
from polyamp_jax.porting.libraries import flax_layer_table, linen_layer_inference
from polyamp_jax.porting.libraries.flax_layer_spec import FlaxLayerSpec, LayerSettings, Shapes, makers_by_array
from polyamp_jax.porting.libraries.porting_library import find_library
from tests.porting.layers import formulas, linen_layers, nnx_layers
from tests.porting.layers.cases import inputs

ROWS = [(flax, name) for flax in (linen_layers, nnx_layers) for name in flax.BUILD]
IDS = [f"{flax.__name__.rpartition('.')[2]}-{name}" for flax, name in ROWS]


def back(inventory: Inventory) -> dict[str, Lazy]:
    """The native arrays by name, made of the canonical ones."""
    moved = {}
    for layer in inventory.layers:
        form = layer.forms[0]
        arrays = {array: Lazy.of(np.array(lazy)) for array, lazy in form.arrays(layer.arrays).items()}
        made = form.leaves(arrays, layer.arrays)
        moved.update({layer.leaves[array].name: Lazy.of(np.array(lazy)) for array, lazy in made.items()})
    return moved


@pytest.mark.parametrize(("flax", "name"), ROWS, ids=IDS)
def test_the_textbook_formula_gives_what_flax_gives_and_the_way_back_is_bit_identical(
    flax: ModuleType, name: str
) -> None:
    model = flax.BUILD[name]()
    given = inputs(name)
    inventory = CONVERTER.inventory(model, given)
    expected = formulas.output(name, to_canonical(inventory))
    got = flax.run(model, given)
    assert np.shape(got) == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)

    by_name = {layer.path: layer.forms for layer in CONVERTER.inventory(model).layers}
    for layer in inventory.layers:  # without a batch, linen's classes are not known: one of the forms is the right one
        same = [form for form in by_name.get(layer.path, ()) if form.kind == layer.forms[0].kind]
        assert not layer.leaves or layer.forms[0].shapes(layer.arrays) in [form.shapes(layer.arrays) for form in same]

    leaves = {leaf.name: leaf for layer in inventory.layers for leaf in layer.leaves.values()}
    held = find_library(model).arrays(model)
    assert set(leaves) == set(held)
    assert {leaf for leaf, of in leaves.items() if of.trainable} == set(named_leaves(adapt(model).params))
    blank = CONVERTER.fill(model, {leaf: Lazy.of(np.zeros(of.array.shape, "float32")) for leaf, of in leaves.items()})
    for array in find_library(blank).arrays(blank).values():
        np.testing.assert_array_equal(array, np.zeros(array.shape))
    filled = CONVERTER.fill(blank, back(inventory))
    for leaf, array in find_library(filled).arrays(filled).items():
        np.testing.assert_array_equal(array, held[leaf])
    assert structure(filled) == structure(model)


def structure(model: Any) -> Any:
    """What a model is made of beside its arrays."""
    return jax.tree.structure(model[1] if isinstance(model, tuple) else adapt(model).params)


def test_a_row_is_all_that_a_class_of_layers_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(shapes: Shapes, settings: LayerSettings) -> Form:
        return Form("scale norm", same("scale"), {"epsilon": settings["epsilon"]} if settings else {})

    row = FlaxLayerSpec(form, ("scale",), None, makers_by_array(form, "scale"), ("zero",), role="norm")
    monkeypatch.setitem(flax_layer_table.LAYER_SPECS, "ScaleNorm", row)  # type: ignore[index]  # a dict
    nnx_norm = type("ScaleNorm", (nnx.Module,), {"__module__": "flax.nnx.nn.normalization"})()
    nnx_norm.scale, nnx_norm.epsilon = nnx.Param(np.float32(2)), 0.5
    (layer,) = CONVERTER.inventory(nnx_norm).layers
    assert (layer.forms, list(layer.leaves)) == ((Form("scale norm", same("scale"), {"epsilon": 0.5}),), ["scale"])
    assert flax_layer_table.flax_chain_item(nnx_norm, "norm").role == "norm"
    likeliest = {name: linen_layer_inference.forms_by_name(name, {"scale": (4,)})[0].kind for name in ("zero", "norm")}
    assert likeliest == {"zero": "scale norm", "norm": "rms_norm"}


def test_a_class_of_layers_is_named_in_the_file_of_its_row_alone() -> None:
    folder = Path(flax_layer_table.__file__).parent
    text = {file.name: file.read_text() for file in folder.glob("*.py")}
    for name in flax_layer_table.LAYER_SPECS:
        assert len([file for file, source in text.items() if f'"{name}"' in source]) == 1, name
