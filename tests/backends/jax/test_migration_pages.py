"""The pages for those who come from jmp and from flax's DynamicScale: both sides of a diff train to the same weights.

jmp comes with haiku, which the tests need.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tests.page_diffs import run_side


def furthest(one: Any, other: Any) -> float:
    """The largest difference of two pytrees of arrays."""
    gaps = jax.tree.map(lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b)))), one, other)
    return max(jax.tree.leaves(gaps))


def test_from_jmp() -> None:
    """Eight steps, the first of which overflows and is skipped on both sides."""
    before, after = (run_side("from_jmp", sign) for sign in "-+")
    assert furthest(before["params"], after["params"]) < 1e-6
    assert float(before["loss_scale"].loss_scale) == float(after["result"].scale) == 2.0**14
    assert int(after["state"].step) == 7
    assert np.abs(np.asarray(after["params"]["b1"])).max() > 1e-2  # from 0


def test_from_flax_dynamic_scale() -> None:
    """Eight steps, the first two of which overflow and are skipped on both sides."""
    before, after = (run_side("from_flax_dynamic_scale", sign) for sign in "-+")
    assert furthest(before["params"], after["params"]) < 1e-6
    assert furthest(before["trained"], after["trained"]) < 1e-3
    assert before["scale"] == after["scale"] == float(after["result"].scale) == 2.0**14
    assert int(after["state"].step) == 6
