"""Order of rows behind a flatten and of columns before a reshape: what is asked, what `rows=` and a run answer."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.flatten_trace import find_segments
from polyamp.porting.layouts.input_order import InputOrder, InputOrderRecorder
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.flatten_order import ChannelOrder
from polyamp.porting.matching.flatten_proof import Segment
from polyamp.porting.transfer_plan import TransferPlan, make_transfer_plan
from tests.core.porting.sketch import sketch
from tests.core.porting.test_port import as_inventory, carried, values, with_attributes

HEADS = "conv: conv 3 4\nmu: dense 24 5\nlogvar: dense 24 2"
_ACTOR = ["actor rows", "actor_out rows", "critic rows"]
CONV_TRANSPOSE = "project: dense 5 24\nup: conv_transpose 4 3"


def first_and_last(text: str) -> tuple[Inventory, Inventory]:
    """A model with the channels first, and one with the channels last."""
    convolutions = [line.partition(":")[0].strip() for line in text.splitlines() if ": conv" in line]
    first = sketch(text)
    for path in convolutions:
        first = with_attributes(first, path.replace(".", "/"), channels="first")
    return first, sketch(text)


def asked(text: str, rows: Any = None) -> list[str]:
    """The layers whose rows or columns are a question."""
    plan = make_transfer_plan(*first_and_last(text), None, strict=True, rows=rows)
    return [f"{each.path} {'rows' if each.rows else 'columns'}" for each in plan.questions]


@pytest.mark.parametrize(
    ("text", "questions"),
    [
        ("conv: conv 3 4\nfc: dense 24 5", ["fc rows"]),
        (HEADS, ["mu rows", "logvar rows"]),
        ("conv: conv 3 4\nactor: dense 24 24\nactor_out: dense 24 2\ncritic: dense 24 1", _ACTOR),
        ("conv: conv 3 4\nconv2: conv 3 4\nfc: dense 8 5", ["fc rows"]),  # concatenated and pooled
        ("conv: conv 3 4\nfc: dense 29 5", ["fc rows"]),  # flattened, with five other values
        ("conv: conv 3 4\nstate: dense 7 24\nhead: dense 24 2", ["head rows"]),  # the state alone, or both
        ("head: dense 24 2\nconv: conv 3 4", ["head rows"]),  # defined before what it follows
        ("conv: conv 3 4\nnorm: batch_norm 24\nfc: dense 24 5", ["fc rows"]),
        ("conv: conv 3 4\ntime: dense 12 4\nout: conv 4 4", ["time rows"]),
        (CONV_TRANSPOSE, ["project columns"]),
        ("conv: conv 3 4\nfc: dense 24 8\nproject: dense 8 24\nup: conv 4 3", ["fc rows", "project columns"]),
        ("conv: conv 3 4\nnorm: batch_norm 4\nfc: dense 4 5", []),  # pooled
        ("conv: conv 3 4\nfc: dense 4 16\nout: dense 16 3", []),
        ("patch: conv 3 8\nln: layer_norm 8\nup: dense 8 32\ndown: dense 32 8\nhead: dense 8 5", []),  # a transformer
        ("patch: conv 3 8\nattention: attention 8 2\nup: dense 8 32\ndown: dense 32 8", []),
        ("conv: conv 3 4\nfc: dense 4 6\na: dense 6 2\nb: dense 6 3", []),  # two heads of one vector
        ("a: dense 24 24\nb: dense 24 5", []),  # no channels
    ],
)  # fmt: skip
def test_s30_what_only_a_run_can_tell_is_a_question(text: str, questions: list[str]) -> None:
    assert asked(text) == questions
    if questions:
        with pytest.raises(PortError, match="nothing proves whether these layers stand next"):
            carried(*first_and_last(text))
    one = sketch(text)
    assert make_transfer_plan(one, one, None, strict=True).questions == []  # one layout, one order


def test_s30_the_error_names_the_layers_and_the_ways_out() -> None:
    with pytest.raises(PortError) as raised:
        carried(*first_and_last(HEADS))
    assert str(raised.value) == (
        "the channels are first on one side and last on the other, and nothing proves whether these layers stand next "
        "to a flatten, and of which layout:\n"
        "  mu: rows, perhaps in the order of conv's 4 channels\n"
        "  logvar: rows, perhaps in the order of conv's 4 channels\n"
        'A run of both models shows it: batch=inputs, or check=inputs. Or say it: rows={"mu": None, "logvar": None} '
        'for layers that take no flattened channels, "channels" instead of None for those that do.'
    )


def test_s30_without_strict_such_layers_stay_as_they_are() -> None:
    found, report = carried(*first_and_last(HEADS), strict=False)
    assert sorted(found) == ["conv/bias", "conv/kernel"]
    assert list(report.missing) == ["mu", "logvar"]
    assert not report.clean


def test_s30_rows_says_which_layers_take_flattened_channels() -> None:
    first, last = first_and_last(HEADS)
    image = np.random.default_rng(0).standard_normal((2, 4, 2, 3))  # batch, channels, height, width
    found, report = carried(first, last, rows={"mu": "channels", "logvar": None})
    there = image.transpose(0, 2, 3, 1).reshape(2, -1) @ found["mu/kernel"]
    np.testing.assert_allclose(there, image.reshape(2, -1) @ values(first)["mu/kernel"], rtol=1e-6)
    np.testing.assert_array_equal(found["logvar/kernel"], values(first)["logvar/kernel"])
    assert list(report.notes) == ['mu: rows 0:24 put from (4, 6) to (6, 4) (rows="channels")']
    assert report.clean
    again, _ = carried(as_inventory(last, found), first, rows={"mu": "channels", "logvar": None})
    np.testing.assert_array_equal(again["mu/kernel"], values(first)["mu/kernel"])
    found, report = carried(first, last, rows={"**": None})
    np.testing.assert_array_equal(found["mu/kernel"], values(first)["mu/kernel"])
    assert report.notes == []


def test_s30_rows_of_a_layer_before_a_reshape_are_its_columns() -> None:
    first, last = first_and_last(CONV_TRANSPOSE)
    x = np.random.default_rng(0).standard_normal((2, 5))
    found, report = carried(first, last, rows={"project": "channels"})
    ours = values(first)
    here = (x @ ours["project/kernel"] + ours["project/bias"]).reshape(2, 4, 6)
    there = (x @ found["project/kernel"] + found["project/bias"]).reshape(2, 6, 4)
    np.testing.assert_allclose(there, here.transpose(0, 2, 1), rtol=1e-6)
    assert list(report.notes) == ['project: columns 0:24 put from (4, 6) to (6, 4) (rows="channels")']


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ("mu", "rows must map paths of the target's dense layers to \"channels\" or None.*Received: 'mu'"),
        ({"mu": "first"}, "rows must map paths"),
        ({"mi": None}, "rows: 'mi' is no dense layer of the target. Did you mean 'mu'?"),
        ({"conv": None}, "rows: 'conv' is no dense layer"),
        ({"mu": None}, r"logvar: rows, perhaps"),
    ],
)
def test_s30_wrong_rows_are_refused(rows: Any, error: str) -> None:
    with pytest.raises(PortError, match=error.replace("?", r"\?")):
        carried(*first_and_last(HEADS), rows=rows)


def test_s30_channels_need_a_layer_whose_channels_divide_the_length() -> None:
    first, last = first_and_last("conv: conv 3 4\nfc: dense 29 5")
    with pytest.raises(PortError, match=r'rows={"fc": "channels"}: no channels next to the layer divide its length'):
        carried(first, last, rows={"fc": "channels"})
    with pytest.raises(PortError, match="needs the channels first on one side and last on the other"):
        carried(last, last, rows={"fc": "channels"})


def test_s30_a_side_that_does_not_say_where_its_channels_are_is_asked_too() -> None:
    """Haiku's arrays do not say it."""
    last, silent = sketch(HEADS), sketch(HEADS, framework="haiku")
    bare = [
        dataclasses.replace(layer, forms=(dataclasses.replace(layer.forms[0], attributes={}),))
        for layer in silent.layers
    ]
    with pytest.raises(PortError, match="mu: rows, perhaps in the order of conv's 4 channels"):
        carried(last, Inventory(bare, "haiku"))
    found, _ = carried(last, Inventory(bare, "haiku"), rows={"**": None})
    assert len(found) == 6
    found, _ = carried(Inventory(bare, "haiku"), Inventory(bare, "haiku"))  # one framework, one order
    assert len(found) == 6


def test_s30_an_order_moves_rows_and_columns_of_every_array_and_back() -> None:
    """Moments are arrays of the same shapes; numbers stand for arrays in some optimizers."""
    order = ChannelOrder((Segment(1, 2, 3),), (Segment(0, 2, 2),))
    kernel, bias = np.arange(32.0).reshape(8, 4), np.arange(4.0)
    arrays = {"kernel": Lazy.of(kernel), "bias": Lazy.of(bias), "scale": Lazy.of(bias)}
    made = order.apply(arrays)
    rows, columns = [0, 1, 4, 2, 5, 3, 6, 7], [0, 2, 1, 3]
    np.testing.assert_array_equal(made["kernel"].read(), kernel[rows][:, columns])
    np.testing.assert_array_equal(made["bias"].read(), bias[columns])
    np.testing.assert_array_equal(made["scale"].read(), bias)
    back = order.apply(made, back=True)
    assert all(np.array_equal(back[name].read(), arrays[name].read()) for name in arrays)
    number = order.apply({"kernel": Lazy.of(np.float32(3.0))})
    assert number["kernel"].read() == 3.0


@pytest.mark.parametrize("dead", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_s30_the_order_of_values_is_found(dead: float, noise: float) -> None:
    """Behind a ReLU that many units do not pass, and behind a norm with another epsilon."""
    rng = np.random.default_rng(0)
    for channels, height, width in itertools.product((2, 4, 6), (1, 3, 4), (4, 5)):
        image = rng.standard_normal((8, channels, height, width)) * (rng.random((channels, height, width)) >= dead)
        ours = image.reshape(8, -1)
        theirs = np.moveaxis(image, 1, -1).reshape(8, -1) + noise * rng.standard_normal(ours.shape)
        found = find_segments(ours, theirs, [channels])
        if dead < 0.9:
            assert found == (Segment(0, channels, height * width),)
        assert found is None or np.allclose(ours[:, permutation(found, ours.shape[1])], theirs, atol=0.05)
        assert find_segments(theirs, theirs, [channels]) == () or dead == 0.9
        more = rng.standard_normal((8, 5))
        for order in ((0, 1), (1, 0)):
            pair = [np.concatenate([(part, more)[number] for number in order], 1) for part in (ours, theirs)]
            found = find_segments(*pair, [channels])
            if dead == 0.0:
                assert found == (Segment(5 * order[0], channels, height * width),)
            assert found is None or np.allclose(pair[0][:, permutation(found, pair[0].shape[1])], pair[1], atol=0.05)


def permutation(segments: tuple[Segment, ...], length: int) -> Any:
    index: Any = np.arange(length)
    for segment in segments:
        index = segment.permute(index)
    return index


def test_s30_values_that_fit_several_orders_show_none() -> None:
    rng = np.random.default_rng(0)
    assert find_segments(np.zeros((4, 24)), np.zeros((4, 24))) is None
    assert find_segments(np.ones((4, 24)), np.ones((4, 24))) is None
    assert find_segments(rng.standard_normal((4, 24)), rng.standard_normal((4, 24))) is None
    assert find_segments(np.full((4, 24), np.nan), np.full((4, 24), np.nan)) is None
    assert find_segments(np.ones((4, 24)), np.ones((4, 12))) is None
    assert find_segments(np.ones((0, 24)), np.ones((0, 24))) is None


def proven(ours: dict[str, InputOrder], theirs: dict[str, InputOrder], text: str) -> TransferPlan:
    first, last = first_and_last(text)
    sides = dataclasses.replace(first, inputs=ours), dataclasses.replace(last, inputs=theirs)
    return make_transfer_plan(*sides, None, strict=True)


SEGMENT = Segment(0, 4, 6)
FLAT = "conv: conv 3 4\nfc: dense 24 5"


@pytest.mark.parametrize(
    ("text", "layer", "ours", "theirs", "order"),
    [
        (FLAT, "fc", InputOrder("conv", "first"), InputOrder("conv", "last"), ((SEGMENT,), ())),
        (FLAT, "fc", InputOrder("conv", "last"), InputOrder("conv", "last"), ((), ())),  # moved before the flatten
        (CONV_TRANSPOSE, "up", InputOrder("project", "first"), InputOrder("project", "last"), ((), (SEGMENT,))),
        ("a: dense 3 25\nconv: conv 3 4\nb: dense 25 2", "b", InputOrder("a"), InputOrder("a"), ((), ())),
    ],
)  # fmt: skip
def test_s30_orders_that_both_graphs_prove_are_no_questions(
    text: str, layer: str, ours: InputOrder, theirs: InputOrder, order: Any
) -> None:
    plan = proven({layer: ours}, {layer: theirs}, text)
    assert plan.questions == []
    assert [(each.rows, each.columns) for each in plan.channel_orders.values()] == ([order] if any(order) else [])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"fc": InputOrder("conv", "first")}, {}),  # the other side may do anything
        ({"fc": InputOrder("conv", "first")}, {"fc": InputOrder("conv")}),  # flattened on one side alone
        ({"fc": InputOrder("conv", "first")}, {"fc": InputOrder("fc", "last")}),  # of another layer
    ],
)
def test_s30_what_one_graph_proves_is_no_proof(ours: dict[str, InputOrder], theirs: dict[str, InputOrder]) -> None:
    assert [each.path for each in proven(ours, theirs, FLAT).questions] == ["fc"]


def test_s30_the_error_says_which_side_shows_its_order() -> None:
    first, last = first_and_last(FLAT)
    shown = dataclasses.replace(first, inputs={"fc": InputOrder("conv", "first")})
    for sides, side in (((shown, last), "source"), ((last, shown), "target")):
        with pytest.raises(PortError, match=f"the modules of the {side} show it, those of the other side do not"):
            carried(*sides)


def test_s30_rows_goes_before_a_proof() -> None:
    first, last = first_and_last(FLAT)
    sides = [
        dataclasses.replace(side, inputs={"fc": InputOrder("conv", place)})
        for side, place in ((first, "first"), (last, "last"))
    ]
    assert make_transfer_plan(*sides, None, strict=True, rows={"fc": None}).channel_orders == {}


def test_s30_a_recorder_knows_values_between_modules_alone() -> None:
    recorder = InputOrderRecorder()
    image = recorder.convolution(None, "conv")
    flat = recorder.flatten(recorder.norm(image, "bn"), "first")
    hidden = recorder.dense(flat, "fc")
    recorder.dense(recorder.norm(hidden, "ln"), "out")  # the norm's arrays have an order of their own
    recorder.dense(recorder.global_pooling(image), "pooled")
    recorder.dense(image, "on_width")  # torch's takes the last axis
    recorder.dense(image, "on_channels", takes_channels=True)
    up = recorder.reshape(hidden, "last")
    recorder.convolution(up, "up")
    recorder.convolution(None, "conv")
    assert recorder.flatten(up, "last") is None  # in an order of two steps
    assert recorder.inputs == {
        "bn": InputOrder("conv"),
        "fc": InputOrder("conv", "first"),
        "pooled": InputOrder("conv"),
        "on_channels": InputOrder("conv"),
        "up": InputOrder("fc", "last"),
    }
    recorder.dense(hidden, "fc")  # called twice, with other values
    recorder.dense(flat, "fc")
    assert "fc" not in recorder.inputs
