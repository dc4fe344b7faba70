"""A few of half A of `tests.parity.held_out`, and that all plants still fit the code; the rest is run by hand."""

from __future__ import annotations

import re
import warnings

import pytest

from tests import xla
from tests.parity.held_out import judge, table
from tests.parity.held_out.harness import FAMILIES, text
from tests.parity.held_out.listed import PAIRS, PLANTS, pair_numbers, plant_numbers

xla.quick()  # before the first program is compiled

_CHOSEN = {
    "decoder: the mean is taken away too",
    "decoder: clip before unscaling",
    "encoder: tanh GELU for erf",
    "seq2seq: ReLU for GELU",
    "encoder: mask along the queries",
    "unet: torch's 1e-5 in the last norm",
    "convnet: momentum the other way round",
    "tagger: padding counted",
    "recommender: a factor that overflows",
    "convnet: cosine over steps - 1",
}
_CLEAN = {"torch's own attention", "head as a product", "products by einsum", "a loop: cosine"}
CHOSEN = [
    number
    for number in plant_numbers("A")
    if f"{PLANTS[number].family}: {PLANTS[number].what}" in _CHOSEN
    and PLANTS[number].first.framework == PLANTS[number].second.framework == "torch"
]
CLEAN = [
    number
    for number in pair_numbers("A")
    if PAIRS[number].words in _CLEAN and PAIRS[number].first.framework == PAIRS[number].second.framework == "torch"
]


@pytest.mark.parametrize("number", CHOSEN, ids=lambda number: PLANTS[number].what)
def test_fault_is_named_where_it_is_and_as_what(number: int) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    result = judge.of_plant(PLANTS[number], judge.planted(PLANTS[number]).comparisons[0])

    assert [result[key] for key in ("found", "place", "kind")] == [True, True, True], result


@pytest.mark.parametrize("number", CLEAN, ids=lambda number: PAIRS[number].words)
def test_clean_pair_raises_no_alarm(number: int) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)

    assert judge.of_pair(judge.clean(PAIRS[number]).comparisons[0])["alarm"] == ""


def test_the_lists_are_long_enough_and_each_still_fits_the_code() -> None:
    assert len(plant_numbers("A")) + len(plant_numbers("B")) >= 200
    assert len(pair_numbers("A")) + len(pair_numbers("B")) >= 200
    assert len({plant.family for plant in PLANTS}) == 8
    assert len(CHOSEN) == len(_CHOSEN)
    for each in (*PLANTS, *PAIRS):
        for side in (each.first, each.second):
            text(each.family, side.framework, side.edits)
            if side.loop is not None:
                text(side.loops, side.framework, side.loop)
    for plant in PLANTS:
        re.compile(plant.expected.at)


@pytest.mark.parametrize(("part", "loops"), [("C", 25), ("D", 14), ("E", 12)])
def test_later_parts_have_both_kinds_of_precision_loops_and_all_families(part: str, loops: int) -> None:
    plants = [PLANTS[number] for number in plant_numbers(part)]
    pairs = [PAIRS[number] for number in pair_numbers(part)]

    assert len(plants) >= 100
    assert len(pairs) >= 100
    assert {plant.family for plant in plants} == {pair.family for pair in pairs} == set(FAMILIES)
    for each, least in ((plants, 25), (pairs, loops)):
        assert sum(one.second.recipe.get("policy", "float32") != "float32" for one in each) >= 25
        assert sum(one.second.loop is not None for one in each) >= least


def test_parts_share_nothing_and_hold_all() -> None:
    for numbers, count in ((plant_numbers, len(PLANTS)), (pair_numbers, len(PAIRS))):
        assert sorted([each for part in "ABCDE" for each in numbers(part)]) == numbers("") == list(range(count))
    assert table.counts({}).startswith("found 0 of 0")
