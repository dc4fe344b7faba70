"""All faults and clean pairs of part E, which was written after part D's faults had been looked at, and apart."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_e import (
    in_language,
    in_loops,
    in_loops_of_16_bits,
    in_pictures,
    in_precision,
    in_vectors,
)
from tests.parity.held_out.part_e.clean_pairs import PAIRS
from tests.parity.held_out.planted import Plant

PLANTS: Final[tuple[Plant, ...]] = (
    *in_language.PLANTS,
    *in_pictures.PLANTS,
    *in_vectors.PLANTS,
    *in_precision.PLANTS,
    *in_loops.PLANTS,
    *in_loops_of_16_bits.PLANTS,
)
__all__ = ["PAIRS", "PLANTS"]
