"""What two sides agree on: activations that one side has inside of its layers, and that are not the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from polyamp.errors import LossError
from polyamp.parity.execution.default_loss import random_target_loss
from polyamp.parity.verdict.alignment import Alignment, align
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.transfer_plan import make_transfer_plan
from tests.core.porting.sketch import sketch


def with_activation(inventory: Inventory, activation: str) -> Inventory:
    """The first layer applies it itself."""
    first = inventory.layers[0]
    form = dataclasses.replace(first.forms[0], attributes={"activation": activation})
    return Inventory([dataclasses.replace(first, forms=(form,)), *inventory.layers[1:]], inventory.framework)


def beside(inventory: Inventory, activation: str) -> Inventory:
    """A layer of its own applies it."""
    act = NativeLayer("act", {}, (Form("activation", (), {"activation": activation}),))
    return Inventory([inventory.layers[0], act, *inventory.layers[1:]], inventory.framework)


MODEL = "fc: dense 4 8\nproj: dense 8 4"


def of(one: Inventory, other: Inventory) -> Alignment:
    return align(make_transfer_plan(one, other, None, strict=True))


def test_each_side_is_seen_behind_its_own_activation() -> None:
    found = of(beside(sketch(MODEL), "gelu_tanh"), with_activation(sketch(MODEL), "gelu"))
    assert found.activations_after_first == {"fc": "gelu_tanh"}
    assert found.activations_after_second == {}
    assert found.differences["fc"] == ["fc: activation is 'gelu', in the source (act) 'gelu_tanh'"]
    assert found.differing_attributes["fc"] == ["activation"]
    found = of(with_activation(sketch(MODEL), "gelu"), beside(sketch(MODEL), "gelu_tanh"))
    assert found.activations_after_first == {}
    assert found.activations_after_second == {"fc": "gelu_tanh"}
    assert found.differences["fc"] == ["act: activation is 'gelu_tanh', in the source (fc) 'gelu'"]


def test_one_activation_is_no_difference() -> None:
    found = of(beside(sketch(MODEL), "gelu"), with_activation(sketch(MODEL), "gelu"))
    assert found.activations_after_first == {"fc": "gelu"}
    assert found.differences == {}


def test_a_users_own_norm_is_matched_by_its_parameter() -> None:
    own = "fc: dense 4 8\nblock/norm/weight: parameter 8\nblock/fc: dense 8 8\nscale: parameter 8"

    found = of(sketch(own), sketch(own))

    assert found.parameter_owners == ["block/norm"]  # and not the model, which owns `scale` beside its layers
    assert found.containers == ["block", "block/norm"]
    assert found.modules["block/norm"] == "block/norm"


def test_module_with_a_layer_beside_its_parameter_is_no_owner_of_it() -> None:
    one = "block/norm/weight: parameter 8\nblock/fc: dense 8 8"
    other = "block/weight: parameter 8\nblock/fc: dense 8 8"

    assert of(sketch(one), sketch(other)).parameter_owners == []


def test_a_model_that_does_not_take_the_batch() -> None:
    def model(inputs: object) -> object:
        return inputs

    with pytest.raises(LossError, match=r"does not take it: .*'x'.*mapping is given as keywords.*\(mapping,\)"):
        random_target_loss(sketch(MODEL))(model, {"x": np.ones(3)})
