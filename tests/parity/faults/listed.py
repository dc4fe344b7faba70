"""All faults, in one order: what the command plants and the tests choose from."""

from __future__ import annotations

from typing import Final

from tests.parity.faults import in_gpt, in_pictures, in_precision, in_tagger, in_training, in_vit
from tests.parity.faults.planted import Fault

FAULTS: Final[tuple[Fault, ...]] = (
    *in_gpt.FAULTS,
    *in_vit.FAULTS,
    *in_pictures.FAULTS,
    *in_tagger.FAULTS,
    *in_training.FAULTS,
    *in_precision.FAULTS,
)
