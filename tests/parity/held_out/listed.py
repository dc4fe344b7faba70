"""All faults and clean pairs, in one order, and in which part each is.

Half A is looked at while rules are mended, half B was drawn before anything was run and was kept for an end, and part C
was written later, in other sizes, and is kept for the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.parity.held_out import clean_pairs, in_language, in_pictures, in_training, in_vectors
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.part_c import listed as part_c
from tests.parity.held_out.planted import Plant

_HALVED: Final[tuple[Plant, ...]] = (
    *in_language.PLANTS,
    *in_pictures.PLANTS,
    *in_vectors.PLANTS,
    *in_training.PLANTS,
)
PLANTS: Final[tuple[Plant, ...]] = (*_HALVED, *part_c.PLANTS)
PAIRS: Final[tuple[Pair, ...]] = (*clean_pairs.PAIRS, *part_c.PAIRS)
SEED: Final = 3005


def plant_numbers(which: str) -> list[int]:
    """The numbers of one part's faults in `PLANTS`: "A", "B", "C", or "" for all."""
    return _numbers(len(_HALVED), len(PLANTS), which)


def pair_numbers(which: str) -> list[int]:
    """The numbers of one part's clean pairs in `PAIRS`: "A", "B", "C", or "" for all."""
    return _numbers(len(clean_pairs.PAIRS), len(PAIRS), which)


def _numbers(halved: int, count: int, which: str) -> list[int]:
    drawn = [int(each) for each in np.random.default_rng(SEED).permutation(halved)]
    middle = (halved + 1) // 2
    parts = {"A": drawn[:middle], "B": drawn[middle:], "C": list(range(halved, count)), "": list(range(count))}
    return sorted(parts[which])


__all__ = ["PAIRS", "PLANTS", "pair_numbers", "plant_numbers"]
