"""A few pairs of the zoo, and the judge that measures them. `make zoo` moves all of them."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import pytest

from tests.porting.public.zoo.__main__ import measured
from tests.porting.public.zoo.judge import alike, relative
from tests.porting.public.zoo.run import Outcome, Row, offered
from tests.porting.public.zoo.table import good_enough, line, page

PAIRS: Final = [
    pytest.param("BERT, transformers → transformers' flax", 0),
    pytest.param("GoogLeNet", 0),
    pytest.param("two heads behind a flatten", 0),
    pytest.param("FiLM, image and state", 0),
    pytest.param("actor-critic, critic first", 0),
    pytest.param("VAE, flax's example", 0),
    pytest.param("BERT, attention layers", 0),
    pytest.param("T5 1.1", 1),
]
"""A pair, and the lines of `names=` that it may need."""


@functools.cache
def rows() -> dict[str, Row]:
    """All of them, from one process."""
    only = [str(pair.values[0]) for pair in PAIRS]
    return {f"{row.name}, {row.pair}": row for row in measured(only, ("jax",))}


@pytest.mark.parametrize(("title", "lines"), PAIRS)
def test_a_pair_is_moved_and_never_wrongly(title: str, lines: int) -> None:
    (row,) = [row for name, row in rows().items() if title in name]
    assert not row.wrong, line(row)
    assert row.best.right, row.best.error
    assert row.best.lines <= lines
    assert 0 < row.best.outputs < 1e-5
    assert 0 < row.best.gradients < 1e-4


def test_the_judge_sees_a_reordered_gradient_only_by_its_values() -> None:
    values = np.array([3.0, -1.0, 2.0])
    assert relative(*alike(values, values[::-1])) == 0
    assert relative(*alike(values, np.array([3.0, -1.0, 2.5]))) == pytest.approx(0.5 / 3)
    assert relative(*alike(values, np.array([3.0, -1.0]))) == pytest.approx(2 / 3)
    assert relative(values, np.array([np.nan, 0.0, 0.0])) == np.inf


def test_the_lines_that_an_error_offers() -> None:
    said = "nothing tells.\nSay which is which, write: names={r'^a/0$': 'Dense_0', '^b$': 'c'}\nstrict=False moves"
    assert offered(said) == {"^a/0$": "Dense_0", "^b$": "c"}
    assert offered("nothing tells.") == {}


def test_the_table_says_what_is_wrong_and_what_is_refused() -> None:
    right = Outcome(outputs=1e-7, gradients=2e-7)
    wrong = Outcome(outputs=0.5, gradients=1.0)
    refused = Outcome(error="2 layers have no partner.\nMore.", tries=2)
    moved = Row("A", "x → y", right, right, None, "")
    assert line(moved) == "| A | x → y | right | right | 0 | 1 | 1.0e-07 | 2.0e-07 |"
    assert good_enough([moved] * 30)
    silent = Row("B", "x → y", wrong, refused, None, "")
    assert line(silent) == "| B | x → y | WRONG (1) | refused | - | - | - | - |"
    assert not good_enough([moved] * 30 + [silent])
    lined = Row("C", "x → y", refused, refused, Outcome(outputs=1e-7, gradients=1e-7, lines=3), "")
    assert not good_enough([moved] * 25 + [lined] * 5)
    text = page([moved, silent, lined])
    assert "1 of 3 are ported with at most 2 lines, 2 at all; 1 came out wrong" in text
    assert "- B, x → y: 2 layers have no partner.\n" in text
