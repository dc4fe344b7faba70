"""All faults and clean pairs, in one order, and in which part each is.

Half A is looked at while rules are mended, half B was drawn before anything was run and was kept for an end. Parts C
and D were written later and apart, in other sizes, each for the end after the one before.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.parity.held_out import clean_pairs, in_language, in_pictures, in_training, in_vectors
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.part_c import listed as part_c
from tests.parity.held_out.part_d import listed as part_d
from tests.parity.held_out.planted import Plant

_HALVED: Final[tuple[Plant, ...]] = (
    *in_language.PLANTS,
    *in_pictures.PLANTS,
    *in_vectors.PLANTS,
    *in_training.PLANTS,
)
PLANTS: Final[tuple[Plant, ...]] = (*_HALVED, *part_c.PLANTS, *part_d.PLANTS)
PAIRS: Final[tuple[Pair, ...]] = (*clean_pairs.PAIRS, *part_c.PAIRS, *part_d.PAIRS)
SEED: Final = 3005


def plant_numbers(which: str) -> list[int]:
    """The numbers of one part's faults in `PLANTS`: "A", "B", "C", "D", or "" for all."""
    return _numbers((len(_HALVED), len(part_c.PLANTS), len(part_d.PLANTS)), which)


def pair_numbers(which: str) -> list[int]:
    """The numbers of one part's clean pairs in `PAIRS`: "A", "B", "C", "D", or "" for all."""
    return _numbers((len(clean_pairs.PAIRS), len(part_c.PAIRS), len(part_d.PAIRS)), which)


def _numbers(counts: tuple[int, int, int], which: str) -> list[int]:
    halved, third, _ = counts
    every, of_c = range(sum(counts)), halved + third
    drawn = [int(each) for each in np.random.default_rng(SEED).permutation(halved)]
    middle = (halved + 1) // 2
    parts = {"A": drawn[:middle], "B": drawn[middle:], "C": every[halved:of_c], "D": every[of_c:], "": every}
    return sorted(parts[which])


__all__ = ["PAIRS", "PLANTS", "pair_numbers", "plant_numbers"]
