"""Operations for formulas that add a constant of their own, or have the complement of a gate."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.layouts.negate import Negate
from polyamp.porting.layouts.operations import Merge

ADDED = Merge(blocks=4, added=(0, 1, 0, 0))


def test_what_a_formula_adds_is_the_second_bias_and_the_first_keeps_its_bits() -> None:
    bias = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    first, second = ADDED.forward([bias])
    np.testing.assert_array_equal(first, bias)
    np.testing.assert_array_equal(second, [0, 0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(ADDED.backward([first, second])[0], bias)
    assert ADDED.loses([first, second]) == ""


def test_another_second_bias_is_added_less_what_the_formula_adds() -> None:
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    np.testing.assert_array_equal(ADDED.backward([zeros, ones])[0], [1, 1, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(ADDED.backward([ones, zeros])[0], [1, 1, 0, 0, 1, 1, 1, 1])
    assert ADDED.loses([ones, zeros]) == "two biases are added into one"


def test_a_gate_of_the_other_sign_comes_back_and_its_moments_are_refused() -> None:
    turn = Negate((1,), 3)
    kernel = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    (turned,) = turn.forward([kernel])
    np.testing.assert_array_equal(turned, kernel * np.array([1, 1, -1, -1, 1, 1], np.float32))
    np.testing.assert_array_equal(turn.backward([turned])[0], kernel)
    np.testing.assert_array_equal(turn.gradients([kernel])[0], turned)
    assert turn.loses([kernel]) == ""
    with pytest.raises(PortError, match="start the optimizer anew"):
        turn.moments([kernel])
