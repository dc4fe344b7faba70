"""`port` and `load`: whole or not at all, what is refused and how it is said, ties, flattens, differences, checks."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.matching.attribute_differences import Difference
from polyamp.porting.model_side import ModelSide
from polyamp.porting.port import transfer_model
from polyamp.porting.port_report import PortReport, warn_of_differences
from polyamp.porting.transfer_plan import PortOptions
from polyamp.reference import MLP
from tests.core.porting.sketch import sketch

Array = np.ndarray[Any, Any]


class Filler:
    """A converter that keeps what it was given."""

    def __init__(self) -> None:
        self.leaves: dict[str, Array] = {}

    def fill(self, model: Any, leaves: Mapping[str, Any]) -> Any:
        self.leaves = {name: np.array(array.read()) for name, array in leaves.items()}
        return model


def carried(source: Inventory, target: Inventory, **options: Any) -> tuple[dict[str, Array], porting.PortReport]:
    """What `port` would write, and its report."""
    filler = Filler()
    _, report = transfer_model(
        ModelSide(source, None, None),
        ModelSide(target, filler, "the target"),  # type: ignore[arg-type]  # fills, and does nothing else
        PortOptions(**options),
        None,
    )
    return filler.leaves, report


def values(inventory: Inventory) -> dict[str, Array]:
    return {leaf.name: leaf.array.read() for layer in inventory.layers for leaf in layer.leaves.values()}


def tied(inventory: Inventory, path: str, name: str, owner: str) -> Inventory:
    """The inventory with one leaf that is another one."""
    held = next(leaf for layer in inventory.layers for leaf in layer.leaves.values() if leaf.name == owner)
    layers = []
    for layer in inventory.layers:
        if layer.path == path:
            leaf = dataclasses.replace(layer.leaves[name], array=held.array, tied=owner)
            layer = dataclasses.replace(layer, leaves={**layer.leaves, name: leaf})  # one of them
        layers.append(layer)
    return Inventory(layers, inventory.framework, inventory.ordered)


def with_attributes(inventory: Inventory, path: str, **attributes: Any) -> Inventory:
    layers = [
        dataclasses.replace(
            layer,
            forms=tuple(
                dataclasses.replace(form, attributes={**form.attributes, **attributes}) for form in layer.forms
            ),
        )
        if layer.path == path
        else layer
        for layer in inventory.layers
    ]
    return Inventory(layers, inventory.framework, inventory.ordered)


def test_there_and_back_is_bit_identical() -> None:
    source, other = MLP.random([4, 3, 3, 1], seed=0), MLP.random([4, 3, 3, 1], seed=1)
    ported, report = polyamp.port(source, other)
    assert ported is other
    assert [(each.source, each.target, each.told) for each in report.moved] == [
        ("dense0", "dense0", "alone"),
        ("dense1", "dense1", "alone"),
        ("dense2", "dense2", "alone"),
    ]
    assert report.clean
    back, _ = polyamp.port(other, MLP.random([4, 3, 3, 1], seed=2))
    for name, array in source.parameters.items():
        np.testing.assert_array_equal(back.parameters[name], array)


def test_a_canonical_loads_into_a_model() -> None:
    source, target = MLP.random([4, 1], seed=0), MLP.random([4, 1], seed=1)
    loaded, report = porting.load(target, porting.export(source))
    assert loaded is target
    assert str(report) == "1 layer moved"
    with pytest.raises(PortError, match=r"load takes what porting.export\(model\) or .* returned. Received: a MLP"):
        porting.load(target, source)  # type: ignore[arg-type]


def test_a_layer_without_a_partner_is_shown_with_the_nearest() -> None:
    source, target = MLP.random([4, 3, 1], seed=0), MLP.random([4, 3, 2, 1], seed=1)
    before = {name: array.copy() for name, array in target.parameters.items()}
    with pytest.raises(PortError) as raised:
        polyamp.port(source, target)
    message = str(raised.value)
    assert message.startswith("1 of the source's layers and 2 of the target's have no partner.")
    assert "source (reference)" in message
    assert "dense1: dense, kernel (3, 1), bias (1,)" in message
    assert "dense1: dense, kernel (3, 2), bias (2,)" in message
    assert "nearest to dense1 is dense1, but its kernel is (3, 2) and not (3, 1)" in message
    assert "strict=False moves the rest" in message
    for name, array in target.parameters.items():
        np.testing.assert_array_equal(array, before[name])


def test_not_strict_moves_the_rest_and_says_so() -> None:
    source, target = MLP.random([4, 3, 1], seed=0), MLP.random([4, 3, 2, 1], seed=1)
    kept = target.parameters["dense2/kernel"].copy()
    ported, report = polyamp.port(source, target, strict=False)
    np.testing.assert_array_equal(ported.parameters["dense0/kernel"], source.parameters["dense0/kernel"])
    np.testing.assert_array_equal(ported.parameters["dense2/kernel"], kept)
    assert list(report.missing) == ["dense1", "dense2"]
    assert list(report.unused) == ["dense1"]
    assert not report.clean
    assert "left as they are in the target:\n  dense1\n  dense2" in str(report)


def test_a_missing_bias_is_named() -> None:
    with pytest.raises(PortError, match="nearest to a is a, but it has a bias, and a has none"):
        carried(sketch("a: layer_norm 4 -bias\nb: dense 3 2"), sketch("a: layer_norm 4\nb: dense 3 2"))


def test_what_nothing_tells_is_a_choice_and_no_line_to_copy() -> None:
    source = sketch("a: dense 4 4\nb: dense 4 4")
    target = sketch("x: dense 4 4\ny: dense 4 4", ordered=False)
    with pytest.raises(PortError) as raised:
        carried(source, target)
    said = str(raised.value)
    assert "nothing tells which of a, b is which of x, y" in said
    assert "polyamp.port shows it by runs of both models, with batch=inputs or check=inputs." in said
    assert "\n  r'^a$': 'x', 'y'\n  r'^b$': 'x', 'y'\n" in said
    assert "names={" not in said
    found, report = carried(source, target, names={"^a$": "y"})
    np.testing.assert_array_equal(found["y/kernel"], values(source)["a/kernel"])
    assert [each.told for each in report.moved] == ["alone", "names="]


@pytest.mark.parametrize(
    ("ours", "theirs", "offered"),
    [
        # words of both names say it
        (
            "time/linear: dense 4 4\nlabel/linear: dense 4 4\nage: dense 4 4",
            "label_embed: dense 4 4\ntime_embed: dense 4 4\nx: dense 4 4\ny: dense 4 4",
            {"^time/linear$": "time_embed", "^label/linear$": "label_embed"},
        ),
        # a query is no pooler, whatever fits
        ("attn/query: dense 4 4\nattn/key: dense 4 4", "attn_pooler: dense 4 4", None),
        # another number
        ("block/0/time: dense 4 4\nblock/1/time: dense 4 4", "block_7_time: dense 4 4", None),
        # the order of two lists alone
        ("a: dense 4 4\nb: dense 4 4\nc: dense 4 4", "x: dense 4 4\ny: dense 4 4", None),
    ],
)
def test_a_line_is_offered_only_where_words_say_it(ours: str, theirs: str, offered: dict[str, str] | None) -> None:
    with pytest.raises(PortError, match="have no partner") as raised:
        carried(sketch(ours), sketch(theirs, ordered=False))
    found = re.search(r"If this is what they are, write: names=(\{.*\})", str(raised.value))
    assert (ast.literal_eval(found[1]) if found else None) == offered


def test_a_square_kernel_is_refused() -> None:
    with pytest.raises(PortError, match=r"how 'w' goes into 'w' cannot be told: its kernel may be .* equally long"):
        carried(sketch("w: dense? 4 4"), sketch("w: dense 4 4"))
    _, report = carried(sketch("w: dense? 4 4\nb: dense 4 2"), sketch("w: dense 4 4\nb: dense 4 2"), strict=False)
    assert list(report.missing) == ["w"]


def test_other_dtypes_are_refused_or_cast() -> None:
    source, target = MLP.random([4, 1], seed=0), MLP.random([4, 1], seed=1)
    source.parameters = {name: array.astype(np.float16) for name, array in source.parameters.items()}
    with pytest.raises(
        PortError, match=r"dtypes differ.*dense0/kernel: float32 here, float16 in the source; dense0/bias"
    ):
        polyamp.port(source, target)
    ported, _ = polyamp.port(source, target, strict=False)
    assert ported.parameters["dense0/kernel"].dtype == np.float32
    np.testing.assert_array_equal(ported.parameters["dense0/kernel"], source.parameters["dense0/kernel"])


def test_a_head_tied_on_both_sides_is_moved_once() -> None:
    one = tied(sketch("emb: embedding 7 3\nbody: dense 3 3\nhead: embedding 7 3"), "head", "table", "emb/table")
    other = tied(sketch("emb: embedding 7 3\nbody: dense 3 3\nout: embedding 7 3"), "out", "table", "emb/table")
    found, report = carried(one, other)
    assert sorted(found) == ["body/bias", "body/kernel", "emb/table"]
    assert report.clean
    found, _ = carried(one, sketch("emb: embedding 7 3\nbody: dense 3 3"))  # the tie is in the target's code
    assert sorted(found) == ["body/bias", "body/kernel", "emb/table"]


def test_a_head_tied_in_the_source_alone_is_copied_and_said() -> None:
    one = tied(sketch("emb: embedding 7 3\nhead: embedding 7 3"), "head", "table", "emb/table")
    found, report = carried(one, sketch("emb: embedding 7 3\nhead: embedding 7 3"))
    np.testing.assert_array_equal(found["head/table"], values(one)["emb/table"])
    np.testing.assert_array_equal(found["emb/table"], values(one)["emb/table"])
    assert "they part as soon as they are trained" in report.notes[0]


def test_three_tied_embeddings_and_a_head_go_into_one_embedding_and_a_head() -> None:
    """As T5 has them: all of one array in the source, two in the target."""
    one = sketch(
        "shared: embedding 7 3\nencoder.embed: embedding 7 3\ndecoder.embed: embedding 7 3\nhead: dense 7 3 -bias"
    )
    for path, name in (("encoder/embed", "table"), ("decoder/embed", "table"), ("head", "kernel")):
        one = tied(one, path, name, "shared/table")
    found, report = carried(one, sketch("token_embedder: embedding 7 3\nlogits: dense 7 3 -bias"))
    np.testing.assert_array_equal(found["token_embedder/table"], values(one)["shared/table"])
    np.testing.assert_array_equal(found["logits/kernel"], values(one)["shared/table"])
    assert len(report.moved) == 2
    assert "logits has the values of shared/table in the source" in report.notes[0]


def test_a_head_tied_in_the_target_alone_must_have_the_values() -> None:
    other = tied(sketch("emb: embedding 7 3\nhead: embedding 7 3"), "head", "table", "emb/table")
    with pytest.raises(PortError, match="the target ties 'head/table' to 'emb/table', and the source has other values"):
        carried(sketch("emb: embedding 7 3\nhead: embedding 7 3"), other)


def as_inventory(inventory: Inventory, arrays: Mapping[str, Array]) -> Inventory:
    layers = [
        NativeLayer(
            layer.path,
            {
                name: InventoryLeaf(leaf.name, porting.Lazy.of(arrays[leaf.name]), leaf.trainable, leaf.tied)
                for name, leaf in layer.leaves.items()
            },
            layer.forms,
        )
        for layer in inventory.layers
    ]
    return Inventory(layers, inventory.framework, inventory.ordered)


def test_an_epsilon_is_compared_and_the_line_is_given() -> None:
    one, other = sketch("n: layer_norm 4 epsilon=1e-5"), sketch("n: layer_norm 4 epsilon=1e-3")
    lined = [dataclasses.replace(layer, lines={"epsilon": "model.n.eps = {}".format}) for layer in other.layers]
    _, report = carried(one, Inventory(lined, "torch"))
    (difference,) = report.differences
    assert str(difference) == ("n: epsilon is 0.001, in the source (n) 1e-05. Write: model.n.eps = 1e-05")
    assert not report.clean
    _, report = carried(one, sketch("n: layer_norm 4 epsilon=0.00001000000003"))
    assert report.clean
    _, report = carried(one, sketch("n: layer_norm 4"))
    assert report.unseen == {"epsilon": 1}
    assert "not compared, for only one side shows it: epsilon of 1" in str(report)
    assert not report.clean


def test_a_warning_names_what_differs_for_who_does_not_print_the_report() -> None:
    some = [Difference(f"n{n}", f"m{n}", name, 1e-5, 1e-3, "") for n, name in enumerate(["epsilon", "momentum"] * 2)]
    with pytest.warns(UserWarning, match="what the weights") as caught:
        warn_of_differences(PortReport([], some), 1)
    assert [str(each.message) for each in caught] == [
        "what the weights do not carry differs: m0: epsilon is 0.001, in the source (n0) 1e-05; m2: epsilon is 0.001, "
        "in the source (n2) 1e-05; m1: momentum is 0.001, in the source (n1) 1e-05; and 1 more, print(report) shows "
        "them"
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("same", [[1, 1], [1, 1]], True),  # stride 1, kernel 3
        ("valid", [[0, 0], [0, 0]], True),
        ("same", "valid", False),
        ("causal", [[2, 0], [2, 0]], True),
        ("same", [[0, 1], [0, 1]], False),
    ],
)
def test_paddings_are_compared_by_what_they_do(one: Any, other: Any, alike: bool) -> None:
    text = "c: conv 3 4"
    _, report = carried(
        with_attributes(sketch(text), "c", padding=one), with_attributes(sketch(text), "c", padding=other)
    )
    assert (not report.differences) == alike


def test_a_strided_same_is_no_explicit_padding() -> None:
    text = "c: conv 3 4"
    one = with_attributes(sketch(text), "c", padding="same", strides=[2, 2])
    other = with_attributes(sketch(text), "c", padding=[[1, 1], [1, 1]], strides=[2, 2])
    _, report = carried(one, other)
    assert [each.attribute for each in report.differences] == ["padding"]


def test_another_formula_is_refused() -> None:
    one = with_attributes(sketch("c: conv 3 4"), "c", dilation=[1, 1])
    other = with_attributes(sketch("c: conv 3 4"), "c", dilation=[2, 2])
    with pytest.raises(PortError, match=r"another function with these weights.* c: dilation is \[2, 2\]"):
        carried(one, other)
    found, report = carried(one, other, strict=False)
    assert not found
    assert list(report.missing) == ["c"]


def test_activations_are_compared() -> None:
    one = with_attributes(sketch("a: dense 4 3\nb: dense 3 2"), "a", activation="gelu")
    other = with_attributes(sketch("a: dense 4 3\nb: dense 3 2"), "a", activation="gelu_tanh")
    _, report = carried(one, other)
    assert [(each.target, each.ours, each.theirs) for each in report.differences] == [("a", "gelu", "gelu_tanh")]
    _, report = carried(one, sketch("a: dense 4 3\nb: dense 3 2"))
    assert not report.differences
    _, report = carried(with_attributes(one, "b", activation="tanh"), other)
    assert dict(report.unseen) == {"activation": 1}  # one of them may be the other's, or none
    assert dataclasses.replace(report, differences=[]).clean


def test_dropouts_are_compared_in_order_where_both_models_have_equally_many() -> None:
    text = "first: dropout rate=0.1\na: dense 4 3\nlast: dropout rate=0.2"
    _, report = carried(sketch(text), sketch(text.replace("0.2", "0.5")))
    assert [str(each) for each in report.differences] == ["last: rate is 0.5, in the source (last) 0.2"]
    _, report = carried(sketch(text), sketch("a: dense 4 3\nlast: dropout rate=0.5"))
    assert not report.differences


def test_the_check_passes_and_says_what_it_measured() -> None:
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    _, report = polyamp.port(MLP.random([4, 3, 1], seed=0), MLP.random([4, 3, 1], seed=1), check=x)
    assert report.checked is not None
    assert report.checked.outputs == 0.0
    assert sorted(report.checked.gradients) == ["dense0/bias", "dense0/kernel", "dense1/bias", "dense1/kernel"]
    assert "checked in float32: outputs within 0.0e+00, gradients of 4 parameters within 0.0e+00" in str(report)


class Doubled(MLP):
    """Computes something else with the same weights."""

    def last(self, x: Any, plan: Any) -> Any:
        return super().last(x, plan) * 2.0

    def with_arrays(self, parameters: Mapping[str, Any], running: Mapping[str, Any]) -> MLP:
        return Doubled(parameters, running, self.observe)


def test_a_check_that_fails_leaves_the_target_as_it_was() -> None:
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    target = Doubled(MLP.random([4, 3, 1], seed=1).parameters)
    before = {name: array.copy() for name, array in target.parameters.items()}
    with pytest.raises(PortError, match=r"check: the outputs differ by 5.0e-01 \(relative\), 1e-05 is allowed"):
        polyamp.port(MLP.random([4, 3, 1], seed=0), target, check=x)
    for name, array in target.parameters.items():
        np.testing.assert_array_equal(array, before[name])
    _, report = polyamp.port(MLP.random([4, 3, 1], seed=0), target, check=porting.Batch(x, outputs=1.0, gradients=1.0))
    assert report.checked is not None
    assert report.checked.outputs == 0.5


def test_a_check_of_a_file_is_refused() -> None:
    source = porting.export(MLP.random([4, 1], seed=0))
    with pytest.raises(PortError, match="the source is no model but its weights"):
        polyamp.port(source, MLP.random([4, 1], seed=1), check=np.ones((1, 4), np.float32))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(polyamp.BackendError, match="no backend recognises"):
        polyamp.port(3, MLP.random([4, 1], seed=1))
    with pytest.raises(PortError, match=r"port\(source, target\) takes a model here. Received: 'model.pt', a path"):
        polyamp.port(MLP.random([4, 1], seed=1), "model.pt")
