"""`forms=`: layouts of arrays of no known layer, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import PortError
from polyamp.porting import Form, Rule, operations, same
from tests.core.porting.sketch import sketch
from tests.core.porting.test_port import carried, values


def test_s30_a_table_is_transposed() -> None:
    source, target = sketch("bias: embedding 8 4\nfc: dense 4 2"), sketch("rel_embedding: parameter 4 8\nfc: dense 4 2")
    with pytest.raises(PortError, match="have no partner"):
        carried(source, target)
    found, report = carried(source, target, forms={"rel_embedding": "transpose"})
    np.testing.assert_array_equal(found["rel_embedding/value"], values(source)["bias/table"].T)
    assert report.clean
    back, _ = carried(target, source, forms={"rel_embedding": "transpose"})
    np.testing.assert_array_equal(back["bias/table"], values(target)["rel_embedding/value"].T)


@pytest.mark.parametrize(
    ("text", "shape"), [("ndh -> d(nh)", "2 6 3"), ("n d h->d ( n h )", "2 6 3"), ("nhd -> d(nh)", "2 3 6")]
)
def test_s30_axes_are_joined(text: str, shape: str) -> None:
    """A square kernel, too, is read as the layout says, and not as its transpose."""
    source, target = sketch("q: dense 6 6 -bias"), sketch(f"q_einsum: parameter {shape}")
    found, _ = carried(source, target, forms={"q_einsum": text})
    kernel = values(source)["q/kernel"].reshape(6, 2, 3)  # inputs, heads, size
    wanted = kernel.transpose(1, 0, 2) if text.replace(" ", "").startswith("ndh") else kernel.transpose(1, 2, 0)
    np.testing.assert_array_equal(found["q_einsum/value"], wanted)


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        ("transpose", "forms must map regular expressions over paths to layouts: .* Received: 'transpose'"),
        ({"[": "transpose"}, r"forms: '\[' is no regular expression"),
        ({"q": "turn"}, "forms: 'q' must have \"transpose\", a polyamp.porting.Form, or a layout .* Received: 'turn'"),
        ({"q": "abc -> a"}, "one may be missing on the right, of an axis that stacks .* Received: 'abc -> a'"),
        ({"q": "aab -> ab"}, "each letter once"),
        ({"rel": "transpose"}, "forms: 'rel' matches no path of either model. Nearest: 'q'"),
        ({"q": "abc -> cba"}, r"forms: 'q' has a layout of 3 axes, and 'q' has 2: \(6, 6\)"),
        ({"fc": "transpose"}, r"'fc' matches 'fc', a layer of 2 arrays \(kernel, bias\), and a layout is one array's"),
        ({"fc": Form("dense", same("kernel"))}, r"'fc' does not fit 'fc', which has kernel .*: its rules name kernel"),
        ({"q": "transpose", "^q$": "ab -> ab"}, "forms: 'q' and '\\^q\\$' both match 'q'. Give one of them"),
    ],
)
def test_s30_layouts_that_say_nothing(forms: dict[str, Any], message: str) -> None:
    model = sketch("q: parameter 6 6\nfc: dense 6 2")
    with pytest.raises(PortError, match=message):
        carried(model, model, forms=forms)


STACKED = "gating: parameter 2 6 4\nfc: dense 6 2"
APART = "gate: dense 6 4 -bias\nup: dense 6 4 -bias\nfc: dense 6 2"


@pytest.mark.parametrize("text", ["cdh -> dh", "dhc -> dh"])
def test_s30_an_axis_that_the_result_lacks_stacks_layers(text: str) -> None:
    apart = sketch(APART)
    stacked = sketch(STACKED if text.startswith("c") else STACKED.replace("2 6 4", "6 4 2"), ordered=False)
    names = {"^gate$": "gating/0", "^up$": "gating/1"}
    with pytest.raises(PortError, match="nothing tells which of gate, up is which of gating/0, gating/1"):
        carried(apart, stacked, forms={"gating": text})
    found, report = carried(apart, stacked, forms={"gating": text}, names=names)
    axis = 0 if text.startswith("c") else 2
    wanted = np.stack([values(apart)["gate/kernel"], values(apart)["up/kernel"]], axis)
    np.testing.assert_array_equal(found["gating/value"], wanted)
    assert [(each.source, each.target) for each in report.moved][-1] == ("gate + up", "gating")
    back, _ = carried(stacked, apart, forms={"gating": text}, names={"gating/0": "gate", "gating/1": "up"})
    np.testing.assert_array_equal(back["up/kernel"], np.take(values(stacked)["gating/value"], 1, axis))


def test_s30_a_stack_moves_whole_or_not_at_all() -> None:
    apart = sketch("gate: dense 6 4 -bias\nfc: dense 6 2")
    found, report = carried(
        apart, sketch(STACKED), forms={"gating": "cdh -> dh"}, names={"^gate$": "gating/1"}, strict=False
    )
    assert set(found) == {"fc/kernel", "fc/bias"}
    assert sorted(report.missing) == ["gating/0", "gating/1"]
    assert report.unused == ["gate"]


def test_s30_a_form_for_a_layer_of_no_known_class() -> None:
    """A norm that adds 1 to its scale."""
    source, target = sketch("norm: layer_norm 4"), sketch("gemma_norm: layer_norm 4", seed=1)
    shifted = Form("layer_norm", (Rule(("scale",), ("scale",), (operations.Shift(1.0),)), *same("bias")))
    found, _ = carried(source, target, forms={"^gemma_norm": shifted})
    np.testing.assert_array_equal(found["gemma_norm/scale"], values(source)["norm/scale"] - np.float32(1.0))


def test_s30_training_states_take_no_layouts() -> None:
    side = polyamp.porting.training(object(), object())
    with pytest.raises(PortError, match="forms= is for models"):
        polyamp.port(side, side, forms={"q": "transpose"})
