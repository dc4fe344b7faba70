"""Every equinox layer in the canonical layout: what its textbook formula gives of the canonical arrays is what equinox
gives, and the way back is bit-identical."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp_jax.porting.converter import CONVERTER
from tests.porting.layers import formulas
from tests.porting.layers.cases import CASES, inputs
from tests.porting.layers.equinox_layers import BUILD, MISSING, run


def back_and_forth(model: Any) -> Any:
    """A model of zeros that is given the canonical arrays of this one."""
    zeros = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, jax.Array) else leaf, model)
    moved = {}
    for layer in CONVERTER.inventory(model).layers:
        arrays = layer.forms[0].arrays(layer.arrays)
        for name, array in layer.forms[0].leaves(arrays, layer.arrays).items():
            if layer.leaves[name].tied is None:
                moved[layer.leaves[name].name] = array
    return CONVERTER.fill(zeros, moved)


def test_every_case_is_built() -> None:
    assert sorted([*BUILD, *MISSING]) == sorted(CASES)


@pytest.mark.parametrize("name", BUILD)
def test_the_textbook_formula_of_the_canonical_arrays_gives_what_equinox_gives_and_the_way_back_is_exact(
    name: str,
) -> None:
    model = BUILD[name]()
    expected, given = formulas.output(name, to_canonical(CONVERTER.inventory(model))), run(model, inputs(name))
    assert given.shape == expected.shape
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=2e-5)
    back = back_and_forth(model)
    assert jax.tree.structure(model) == jax.tree.structure(back)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(back), strict=True):
        if isinstance(one, jax.Array) and one.dtype == np.float32:
            np.testing.assert_array_equal(one, other)
