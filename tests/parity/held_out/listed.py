"""All faults and clean pairs, in one order, and in which part each is.

Half A is looked at while rules are mended, half B was drawn before anything was run and was kept for an end. Parts C,
D and E were written later and apart, in other sizes, each for the end after the one before.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from tests.parity.held_out import clean_pairs, in_language, in_pictures, in_training, in_vectors
from tests.parity.held_out.clean_pairs import Pair
from tests.parity.held_out.part_c import listed as part_c
from tests.parity.held_out.part_d import listed as part_d
from tests.parity.held_out.part_e import listed as part_e
from tests.parity.held_out.planted import Plant

_HALVED: Final[tuple[Plant, ...]] = (
    *in_language.PLANTS,
    *in_pictures.PLANTS,
    *in_vectors.PLANTS,
    *in_training.PLANTS,
)
PLANTS: Final[tuple[Plant, ...]] = (*_HALVED, *part_c.PLANTS, *part_d.PLANTS, *part_e.PLANTS)
PAIRS: Final[tuple[Pair, ...]] = (*clean_pairs.PAIRS, *part_c.PAIRS, *part_d.PAIRS, *part_e.PAIRS)
SEED: Final = 3005
_LATER: Final = (part_c, part_d, part_e)


def plant_numbers(which: str) -> list[int]:
    """The numbers of one part's faults in `PLANTS`: "A" to "E", or "" for all."""
    return _numbers((len(_HALVED), *(len(part.PLANTS) for part in _LATER)), which)


def pair_numbers(which: str) -> list[int]:
    """The numbers of one part's clean pairs in `PAIRS`: "A" to "E", or "" for all."""
    return _numbers((len(clean_pairs.PAIRS), *(len(part.PAIRS) for part in _LATER)), which)


def _numbers(counts: tuple[int, ...], which: str) -> list[int]:
    every, ends = range(sum(counts)), list(itertools.accumulate(counts))
    halved = ends[0]
    drawn = [int(each) for each in np.random.default_rng(SEED).permutation(halved)]
    middle = (halved + 1) // 2
    later = {part: every[start:end] for part, start, end in zip("CDE", ends, ends[1:], strict=False)}
    return sorted({"A": drawn[:middle], "B": drawn[middle:], **later, "": every}[which])


__all__ = ["PAIRS", "PLANTS", "pair_numbers", "plant_numbers"]
