"""A few of the faults and clean pairs of `tests.porting.faults`, in every run; the rest is run by hand."""

from __future__ import annotations

import warnings

import pytest

from tests import xla
from tests.porting.faults.clean import Clean, alarm
from tests.porting.faults.finding import verdict
from tests.porting.faults.listed import FAULTS
from tests.porting.faults.planting import Fault, code

xla.quick()  # before the first program is compiled

_CHOSEN = {
    ("gpt", "nnx", "residual of the MLP missing"),
    ("gpt", "nnx", "query kernel transposed"),
    ("vit", "nnx", "class token left out of the positions"),
    ("resnet", "nnx", "norm without scale and bias"),
    ("tagger", "linen", "recurrent kernel transposed gate by gate"),
    ("tagger", "nnx", "one direction"),
    ("autoencoder", "torch", "transposed kernel not turned round"),
    ("autoencoder", "torch", "transposed kernel read as flax's"),
    ("autoencoder", "torch", "valid for same padding"),
    ("autoencoder", "torch", "one ReLU forgotten"),
    ("autoencoder", "torch", "ReLU behind the pooling's mean"),
    ("autoencoder", "nnx", "leaky ReLU for ReLU"),
}
CHOSEN = [
    each for each in FAULTS if (each.model, each.source, each.what) in _CHOSEN and each.target in ("torch", "nnx")
]
CLEAN = [
    Clean("gpt", "torch", "nnx", 101),
    Clean("vit", "nnx", "torch", 102),
    Clean("tagger", "nnx", "torch", 103),
    Clean("autoencoder", "torch", "equinox", 104),
    Clean("autoencoder", "haiku", "torch", 105),
    Clean("autoencoder", "linen", "torch", 106),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)


@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: f"{fault.model}: {fault.what}")
def test_fault_is_found_and_named(fault: Fault) -> None:
    found = verdict(fault)

    assert found.by, "nothing saw it"
    assert found.right, f"named {found.named}, expected {fault.at}: {found.said}"


@pytest.mark.parametrize("pair", CLEAN, ids=str)
def test_clean_pair_raises_no_alarm(pair: Clean) -> None:
    assert alarm(pair) == ""


def test_there_are_a_hundred_and_each_still_fits_the_code() -> None:
    assert len(FAULTS) >= 100
    assert len(CHOSEN) == 12
    for each in FAULTS:
        both = each.both or {}
        code(each.target, (*both.get(each.target, ()), *each.edits))
        code(each.source, (*both.get(each.source, ()), *each.ours))
