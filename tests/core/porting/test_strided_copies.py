"""`as_contiguous`: the same values as NumPy's own copy, of every order of axes; and only once it is needed."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyamp.porting.files.strided_copies import aligned_copy, as_contiguous, copy_into

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["uint8", "float16", ml_dtypes.bfloat16, "float32", "complex128"])
def test_every_order_of_axes_is_copied(dtype: Any) -> None:
    for shape in ((300, 257), (2, 130, 129), (130, 3, 131), (3, 3, 70, 150), (1, 70000), (40000, 1, 3)):
        values = RANDOM.integers(0, 100, shape).astype(dtype)
        for axes in itertools.permutations(range(len(shape))):
            array = values.transpose(axes)
            for given in (array, np.flip(array, 0), array[..., ::2]):
                found = as_contiguous(given)
                assert found.flags.c_contiguous
                assert found.dtype == given.dtype
                assert np.array_equal(found, given)


def test_what_is_contiguous_is_not_copied() -> None:
    array = np.zeros((300, 300))
    assert as_contiguous(array) is array
    assert np.shares_memory(as_contiguous(array[None]), array)


def test_arrays_without_axes_or_elements() -> None:
    for array in (np.zeros((0, 3)).T, np.array(3.0), np.broadcast_to(np.ones(3), (30000, 3)).T):
        assert np.array_equal(as_contiguous(array), array)


def test_a_copy_goes_into_an_array_of_any_order() -> None:
    values = RANDOM.standard_normal((300, 257)).astype(ml_dtypes.bfloat16)
    for out in (np.zeros_like(values, order="F"), np.zeros((257, 600), values.dtype)[:, ::2].T):
        copy_into(out, values)
        assert np.array_equal(out, values)
    with pytest.raises(ValueError, match=r"bfloat16\[300, 257\] does not go into float32\[300, 257\]"):
        copy_into(np.zeros((300, 257), np.float32), values)


def test_a_fresh_copy_shares_no_memory_and_is_aligned() -> None:
    for array in (np.arange(4.0), np.zeros((300, 257), ml_dtypes.bfloat16).T, np.array(3.0), np.zeros((0, 2))):
        copy = aligned_copy(array)
        assert not np.shares_memory(copy, array)
        assert (copy.flags.c_contiguous, copy.dtype) == (True, array.dtype)
        assert copy.size == 0 or copy.ctypes.data % 64 == 0
        assert np.array_equal(copy, array)
