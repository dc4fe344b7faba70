"""`forms=`: layouts of arrays of no known layer, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import polyamp
from polyamp.errors import PortError
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
        ({"q": "turn"}, "forms: 'q' must have \"transpose\" or a layout such as .* Received: 'turn'"),
        ({"q": "ab -> a"}, "and each letter once on both sides. Received: 'ab -> a'"),
        ({"q": "aab -> ab"}, "each letter once"),
        ({"rel": "transpose"}, "forms: 'rel' matches no path of either model. Nearest: 'q'"),
        ({"q": "abc -> cba"}, r"forms: 'q' has 3 axes, 'abc', and 'q' has 2: \(6, 6\)"),
        ({"fc": "transpose"}, r"'fc' matches 'fc', a layer of 2 arrays \(kernel, bias\), and a layout is one array's"),
        ({"q": "transpose", "^q$": "ab -> ab"}, "forms: 'q' and '\\^q\\$' both match 'q'. Give one of them"),
    ],
)
def test_s30_layouts_that_say_nothing(forms: dict[str, str], message: str) -> None:
    model = sketch("q: parameter 6 6\nfc: dense 6 2")
    with pytest.raises(PortError, match=message):
        carried(model, model, forms=forms)


def test_s30_training_states_take_no_layouts() -> None:
    side = polyamp.porting.training(object(), object())
    with pytest.raises(PortError, match="forms= is for models"):
        polyamp.port(side, side, forms={"q": "transpose"})
