"""Known defects and surprises of JAX in mixed precision, for the doctor. The tests reproduce those of the CPU."""

from __future__ import annotations

from typing import Final

from polyamp.doctor.known_traps import read_known_traps

TRAPS: Final = read_known_traps(__name__)
