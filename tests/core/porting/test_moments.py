"""An optimizer's moments move as gradients do: `moments` is the inverse of `gradients`, operation by operation."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.layouts.operations import Blocks, Flip, Join, Merge, Operation, Reshape, Shift, Split, Transpose

RNG = np.random.default_rng(0)
CASES: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "transpose": (Transpose((1, 0)), [(2, 3)]),
    "reshape": (Reshape((6,), (2, 3)), [(6,)]),
    "flip": (Flip((0,)), [(3, 2)]),
    "blocks": (Blocks((2, 0, 1)), [(2, 6)]),
    "split": (Split((1, 3)), [(2, 4)]),
    "join": (Join((1, 3)), [(2, 1), (2, 3)]),
    "merge": (Merge(), [(6,)]),
    "merge, a gate apart": (Merge(kept=(2,), blocks=3), [(6,), (2,)]),
    "shift": (Shift(1.0, (1,), 2), [(4,)]),
}


@pytest.mark.parametrize("name", CASES)
def test_moments_come_back(name: str) -> None:
    operation, shapes = CASES[name]
    native = [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]
    back = operation.moments(operation.gradients(native))
    assert [array.dtype for array in back] == [np.float32] * len(native)
    assert all(np.array_equal(one, other) for one, other in zip(native, back, strict=True))


def test_moments_of_two_biases_become_their_mean_and_not_their_sum() -> None:
    form = Form("lstm", (Rule(("bias",), ("bias", "recurrent_bias"), (Merge(),)),))
    like = {"bias": Lazy.of(np.zeros(2, np.float32))}
    given = {name: Lazy.of(np.array(values, np.float32)) for name, values in PAIR.items()}
    assert form.leaves(given, like, moments=True)["bias"].read().tolist() == [2.0, 3.0]
    assert form.leaves(given, like)["bias"].read().tolist() == [4.0, 6.0]


PAIR = {"bias": [1.0, 3.0], "recurrent_bias": [3.0, 3.0]}
