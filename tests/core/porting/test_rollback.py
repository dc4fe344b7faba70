"""Old values are kept in memory up to a limit, in a file beyond it, and come back as they were."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from polyamp.porting.rollback import Rollback


@pytest.mark.parametrize("limit", [0, 60, 10**6])
def test_values_come_back_bit_for_bit_the_last_first(limit: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 4)),
        "b": rng.standard_normal((5, 2)).astype(ml_dtypes.bfloat16).T,
        "c": np.array(7),
        "d": np.zeros((0, 3), np.float16),
    }
    with Rollback(limit) as undo:
        for name, array in arrays.items():
            undo.keep(name, array)
        kept = dict(undo)
    assert list(kept) == ["d", "c", "b", "a"]
    for name, array in arrays.items():
        assert kept[name].dtype == array.dtype
        np.testing.assert_array_equal(kept[name], array)


def test_what_is_kept_in_memory_is_a_copy() -> None:
    array = np.ones(3)
    with Rollback() as undo:
        undo.keep("a", array)
        array[:] = 5
        assert [values.tolist() for _, values in undo] == [[1.0, 1.0, 1.0]]
