"""All faults."""

from __future__ import annotations

from typing import Final

from tests.porting.faults import in_autoencoder, in_gpt, in_resnet, in_tagger, in_vit
from tests.porting.faults.planting import Fault

FAULTS: Final[tuple[Fault, ...]] = (
    *in_gpt.FAULTS,
    *in_vit.FAULTS,
    *in_resnet.FAULTS,
    *in_tagger.FAULTS,
    *in_autoencoder.FAULTS,
)
