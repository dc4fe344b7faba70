"""Where both sides have the same operations, arrays pass as they are: no copy, and no rounding."""

from __future__ import annotations

import numpy as np

from polyamp.porting import Form, Lazy, Rule, same
from polyamp.porting.layouts.operations import Blocks, Merge, Operation, Shift

NATIVE = {"w": Lazy.of(np.array([1e-8, 2.0, 3.0, 4.0], "float32"))}


def form(operation: Operation, *canonical: str) -> Form:
    return Form("norm", (Rule(("w",), canonical or ("scale",), (operation,)),))


def test_the_same_operations_give_the_native_array_itself() -> None:
    for operation, names in ((Shift(1.0), ("scale",)), (Blocks((1, 0)), ("scale",)), (Merge(), ("a", "b"))):
        arrays = form(operation, *names).arrays(NATIVE)
        held = Form("norm", same(*names)).arrays(arrays)  # what `export` keeps
        back = form(operation, *names).leaves(held, NATIVE)
        assert back["w"] is NATIVE["w"]
        assert form(operation, *names).losses(held) == []


def test_others_run() -> None:
    arrays = form(Shift(1.0)).arrays(NATIVE)
    assert form(Shift(1.0)).losses({"scale": Lazy.of(np.array([1e-8], "float32"))}) != []
    assert form(Shift(2.0)).leaves(arrays, NATIVE)["w"].read().tolist() == [-1.0, 1.0, 2.0, 3.0]
    gradients = form(Shift(1.0)).arrays(NATIVE, gradients=True)
    assert form(Shift(1.0)).leaves(gradients, NATIVE)["w"].read()[1] == 1.0  # values, which nothing is known of
    halves = form(Merge(), "a", "b").arrays(NATIVE)
    swapped = {"a": halves["b"], "b": halves["a"]}
    assert form(Merge(), "a", "b").leaves(swapped, NATIVE)["w"].read().tolist() == NATIVE["w"].read().tolist()
