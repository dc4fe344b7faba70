"""Alike layers that runs of both models tell apart, and what stays an error."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.check import Batch
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.model_side import ModelSide
from polyamp.porting.port import transfer_model
from polyamp.porting.port_report import PortReport
from polyamp.porting.transfer_plan import PortOptions
from tests.core.porting.sketch import sketch

Array = np.ndarray[Any, Any]
BATCH = np.asarray([[1.0, -2.0, 0.5], [0.3, 0.7, -1.1]], np.float32)


class Chains:
    """A converter of models that are chains of dense layers without biases, called one chain after the other.

    Args:
        *chains: the paths of each chain's layers.
        factor: on every output.
    """

    in_place = True

    def __init__(self, *chains: Sequence[str], factor: float = 1.0) -> None:
        self.chains, self.factor, self.runs = chains, factor, 0

    def fill(self, model: dict[str, Array], leaves: Mapping[str, Any]) -> dict[str, Array]:
        model.update({name: np.array(array.read()) for name, array in leaves.items()})
        return model

    def evaluate(
        self,
        model: dict[str, Array],
        batch: Array,
        cotangents: Callable[[Sequence[Array]], Sequence[Array]],
        inputs: Container[str] = (),
    ) -> Evaluation:
        self.runs += 1
        taken, modules, outputs = {}, {}, {}
        for chain in self.chains:
            x = batch
            for path in chain:
                taken[path], x = x, x @ model[f"{path}/kernel"]
                modules[path] = x
            outputs[chain[-1]] = x * self.factor
        order = sorted(outputs, key=lambda path: outputs[path].shape)
        gradients = {}
        for path, given in zip(order, cotangents([outputs[path] for path in order]), strict=True):
            chain = next(each for each in self.chains if each[-1] == path)
            for each in reversed(chain):
                gradients[f"{each}/kernel"] = taken[each].T @ given * self.factor
                given = given @ model[f"{each}/kernel"].T
        shown = {path: array for path, array in taken.items() if path in inputs}
        return Evaluation([outputs[path] for path in order], gradients, modules, shown)


def side(text: str, converter: Chains, seed: int = 0) -> ModelSide:
    inventory = sketch(text, ordered=False, seed=seed)
    values = {leaf.name: leaf.array.read() for layer in inventory.layers for leaf in layer.leaves.values()}
    return ModelSide(inventory, converter, values)


ACTOR_FIRST = "actor.0: dense 3 4 -bias\nactor.1: dense 4 4 -bias\ncritic.0: dense 3 4 -bias\ncritic.1: dense 4 4 -bias"
HEADS = "\nmean: dense 4 3 -bias\nvalue: dense 4 1 -bias"
NUMBERS = "dense_0: dense 3 4 -bias\ndense_1: dense 4 4 -bias\ndense_3: dense 3 4 -bias\ndense_4: dense 4 4 -bias"


def source() -> ModelSide:
    return side(ACTOR_FIRST + HEADS, Chains(("actor/0", "actor/1", "mean"), ("critic/0", "critic/1", "value")))


def target(converter: Chains) -> ModelSide:
    return side(NUMBERS + "\ndense_2: dense 4 3 -bias\ndense_5: dense 4 1 -bias", converter, seed=1)


ACTOR = Chains(("dense_0", "dense_1", "dense_2"), ("dense_3", "dense_4", "dense_5"))
CRITIC = Chains(("dense_0", "dense_1", "dense_5"), ("dense_3", "dense_4", "dense_2"))


def moved(ours: ModelSide, theirs: ModelSide, batch: Array = BATCH, **options: Any) -> PortReport:
    report: PortReport = transfer_model(
        ours,
        theirs,
        PortOptions(options.get("names"), options.get("strict", True)),
        Batch(batch, batch),
        check=options.get("check", True),
    )[1]
    return report


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("converter", "pairs"),
    [
        (ACTOR, {"actor/0": "dense_0", "actor/1": "dense_1", "critic/0": "dense_3", "critic/1": "dense_4"}),
        (CRITIC, {"actor/0": "dense_3", "actor/1": "dense_4", "critic/0": "dense_0", "critic/1": "dense_1"}),
    ],
    ids=["actor first", "critic first"],
)
def test_s30_a_run_tells_the_actor_from_the_critic(converter: Chains, pairs: dict[str, str], check: bool) -> None:
    ours, theirs = source(), target(converter)
    report = moved(ours, theirs, check=check)
    found = {each.source: each.target for each in report.moved if each.told == "batch"}
    assert found == pairs
    assert report.clean
    for one, other in found.items():
        np.testing.assert_array_equal(theirs.model[f"{other}/kernel"], ours.model[f"{one}/kernel"])


def test_s30_a_batch_of_zeros_tells_nothing() -> None:
    theirs = target(CRITIC)
    before = {name: array.copy() for name, array in theirs.model.items()}
    message = "does not show it: '[a-z]+/[01]' and '[a-z]+/[01]' of the source have the same gradients on it"
    with pytest.raises(PortError, match=message) as raised:
        moved(source(), theirs, np.zeros_like(BATCH))
    assert "nothing tells which of actor/1, critic/1 is which of dense_1, dense_4" in str(raised.value)
    assert "r'^actor/1$': 'dense_1', 'dense_4'" in str(raised.value)
    assert "names={" not in str(raised.value)
    for name, array in before.items():
        np.testing.assert_array_equal(theirs.model[name], array)
    report = moved(source(), theirs, np.zeros_like(BATCH), strict=False)
    assert sorted(report.missing) == ["dense_0", "dense_1", "dense_3", "dense_4"]


def test_s30_models_that_agree_in_no_assignment_are_refused_with_the_first_error() -> None:
    theirs = target(Chains(*ACTOR.chains, factor=1.5))
    before = {name: array.copy() for name, array in theirs.model.items()}
    message = (
        "both models were run with [0-9]+ assignments of them, and in none do both models agree. In the first: check"
    )
    with pytest.raises(PortError, match=message):
        moved(source(), theirs)
    for name, array in before.items():
        np.testing.assert_array_equal(theirs.model[name], array)


def test_s30_the_number_of_runs_is_bounded() -> None:
    """Five alike layers next to each other have 120 assignments."""
    lines = [f"{letter}: dense 3 3 -bias" for letter in "pqrst"]
    ours = side("\n".join(lines), Chains(*([letter] for letter in "pqrst")))
    others = Chains(*([f"{letter}{letter}"] for letter in "vwxyz"), factor=2.0)
    theirs = side("\n".join(f"{letter}{letter}: dense 3 3 -bias" for letter in "vwxyz"), others, seed=1)
    with pytest.raises(PortError, match="run with 24 assignments"):
        moved(ours, theirs)
    assert others.runs < 60


def test_s30_names_and_a_run_together() -> None:
    """What `names=` says stays, and a run settles the rest."""
    theirs = target(CRITIC)
    report = moved(source(), theirs, names={"^actor/1$": "dense_4"})
    told = {each.source: (each.target, each.told) for each in report.moved}
    assert told["actor/1"] == ("dense_4", "names=")
    assert told["actor/0"] == ("dense_3", "batch")
