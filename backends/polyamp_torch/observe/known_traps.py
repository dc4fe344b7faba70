"""Known defects and surprises of torch in mixed precision, for the doctor."""

from __future__ import annotations

from typing import Final

from polyamp.doctor.measurements import KnownTrap

TRAPS: Final[tuple[KnownTrap, ...]] = ()
