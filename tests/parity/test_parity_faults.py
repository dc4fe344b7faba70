"""A few of the faults and clean comparisons of `tests.parity.faults`, in every run; the rest is run by hand."""

from __future__ import annotations

import re
import warnings

import pytest

from tests import xla
from tests.parity.faults import clean
from tests.parity.faults.clean import Clean
from tests.parity.faults.finding import verdict
from tests.parity.faults.listed import FAULTS
from tests.parity.faults.planted import Fault
from tests.porting.faults.planting import code

xla.quick()  # before the first program is compiled

_CHOSEN = {
    ("gpt", "torch", "nnx", "exact GELU for tanh"),
    ("gpt", "torch", "torch", "labels not shifted"),
    ("gpt", "torch", "torch", "mask without 1 / (1 - rate)"),
    ("resnet", "torch", "torch", "momentum of 0.8"),
    ("resnet", "torch", "torch", "a convolution in float32"),
    ("gpt", "torch", "nnx", "momentum of 0.8"),
    ("autoencoder", "torch", "nnx", "transposed kernel not turned round"),
    ("autoencoder", "haiku", "torch", "code rounded to float16"),
}
CHOSEN = [each for each in FAULTS if (each.model, each.first, each.second, each.what) in _CHOSEN]
CLEAN = [
    Clean("gpt", "torch", "nnx", "mixed_bfloat16", 301),
    Clean("resnet", "torch", "torch", "mixed_float16", 302),
    Clean("autoencoder", "linen", "torch", "float32", 303),
    Clean("autoencoder", "equinox", "torch", "mixed_float16", 304),
    Clean("tagger", "torch", "torch", "mixed_bfloat16", 305),
    Clean("autoencoder", "haiku", "torch", "float32", 306),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)


@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: f"{fault.model}: {fault.what}")
def test_fault_is_named_where_it_is(fault: Fault) -> None:
    found = verdict(fault)

    assert found.found, found.said
    assert found.right, f"named {found.named}, expected {fault.expected}: {found.said}"


@pytest.mark.parametrize("run", CLEAN, ids=lambda run: f"{run.model}: {run.first} {run.second} {run.policy}")
def test_clean_comparison_raises_no_alarm(run: Clean) -> None:
    assert clean.said(clean.report(run).comparisons[0]) == ""


def test_there_are_a_hundred_of_every_kind_and_each_still_fits_the_code() -> None:
    assert len(FAULTS) >= 100
    assert len(CHOSEN) == len(_CHOSEN)
    assert len(clean.runs()) == 200
    for each in FAULTS:
        both = each.both or {}
        code(each.second, (*both.get(each.second, ()), *each.edits))
        code(each.first, (*both.get(each.first, ()), *each.ours))
        re.compile(each.expected.at)
