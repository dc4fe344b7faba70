"""All faults and clean pairs, in one order, and in which half each is: half A is looked at while rules are mended, half
B was drawn before anything was run and is kept for the end."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.parity.held_out import in_language, in_pictures, in_training, in_vectors
from tests.parity.held_out.clean_pairs import PAIRS
from tests.parity.held_out.planted import Plant

PLANTS: Final[tuple[Plant, ...]] = (
    *in_language.PLANTS,
    *in_pictures.PLANTS,
    *in_vectors.PLANTS,
    *in_training.PLANTS,
)
SEED: Final = 3005


def half(count: int, which: str) -> list[int]:
    """The numbers of one half of `count` things, in their order.

    Args:
        count: of how many.
        which: "A", "B", or "" for both.
    """
    drawn = np.random.default_rng(SEED).permutation(count)
    parts = {"A": drawn[: (count + 1) // 2], "B": drawn[(count + 1) // 2 :], "": drawn}
    return sorted(int(each) for each in parts[which])


__all__ = ["PAIRS", "PLANTS", "half"]
