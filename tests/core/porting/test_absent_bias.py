"""Biases that one side lacks: zeros where the target has them, dropped where they are zero, else an error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.matching import match_layers
from polyamp.porting.transfer_plan import make_transfer_plan
from tests.core.porting.sketch import sketch
from tests.core.porting.test_port import carried, values

BARE = "conv: conv 3 4 -bias\nnorm: batch_norm 4\nup: conv_transpose 4 2 -bias\nfc: dense 8 5 -bias"
BIASED = "first_conv: conv 3 4\nnorm: batch_norm 4\nup: conv_transpose 4 2\nfc: dense 8 5"


def with_zero_biases(inventory: Inventory, *, but: str = "") -> Inventory:
    """The inventory with kernels' biases of zeros."""

    def zeroed(layer: NativeLayer) -> NativeLayer:
        leaves = dict(layer.leaves)
        if "kernel" in leaves and "bias" in leaves and layer.path != but:
            zeros = np.zeros(leaves["bias"].array.shape, np.float32)
            leaves["bias"] = dataclasses.replace(leaves["bias"], array=Lazy.of(zeros))
        return dataclasses.replace(layer, leaves=leaves)

    return dataclasses.replace(inventory, layers=[zeroed(layer) for layer in inventory.layers])


def test_s30_biases_that_the_source_lacks_are_exact_zeros() -> None:
    source = sketch(BARE)
    found, report = carried(source, sketch(BIASED, seed=1))
    for path in ("first_conv", "up", "fc"):
        assert found[f"{path}/bias"].dtype == np.float32
        assert not found[f"{path}/bias"].any()
    np.testing.assert_array_equal(found["first_conv/kernel"], values(source)["conv/kernel"])
    np.testing.assert_array_equal(found["norm/bias"], values(source)["norm/bias"])
    assert "biases that the source lacks are zeros, which train from now on: first_conv, up, fc" in report.notes
    assert report.clean


def test_s30_zero_biases_that_the_target_lacks_are_dropped() -> None:
    source = with_zero_biases(sketch(BIASED))
    found, report = carried(source, sketch(BARE, seed=1))
    np.testing.assert_array_equal(found["fc/kernel"], values(source)["fc/kernel"])
    assert "biases that the target lacks were zeros, and are dropped: first_conv, up, fc" in report.notes
    assert report.clean


def test_s30_another_bias_that_the_target_lacks_is_an_error() -> None:
    source = with_zero_biases(sketch(BIASED), but="up")
    message = "'up' of the target has no bias, and its counterpart in the source has one that is not zero"
    for strict in (True, False):
        with pytest.raises(PortError, match=message):
            carried(source, sketch(BARE, seed=1), strict=strict)


def test_s30_a_layer_with_the_same_arrays_is_preferred() -> None:
    """Two layers of one kernel, one with a bias: they go where they fit whole, though another layer lacks its bias."""
    one = sketch("a: dense 4 4\nb: dense 4 4 -bias\nlast: dense 4 3 -bias")
    other = sketch("x: dense 4 4 -bias\ny: dense 4 4\nlast: dense 4 3")
    pairs = {each.source.path: each.target.path for each in match_layers(one, other, {}, absent_bias=True).pairs}
    assert pairs == {"a": "y", "b": "x", "last": "last"}


def test_s30_states_and_comparisons_take_no_new_biases() -> None:
    with pytest.raises(PortError, match="have no partner"):
        make_transfer_plan(sketch(BARE), sketch(BIASED), None, strict=True)


def test_s30_a_norm_without_a_bias_is_another_norm() -> None:
    with pytest.raises(PortError, match="have no partner"):
        carried(sketch("norm: layer_norm 4 -bias"), sketch("norm: layer_norm 4"))
