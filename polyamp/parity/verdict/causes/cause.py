"""`Cause`: the likely cause of a difference, in words and numbers."""

from __future__ import annotations

from typing import NamedTuple

from polyamp.parity.report_data import DivergenceKind


class Cause(NamedTuple):
    """Likely cause of a difference.

    Attributes:
        kind: label of the cause.
        sentence: the cause in words.
        evidence: the observations that support it, a sentence each, the strongest first.
    """

    kind: DivergenceKind
    sentence: str
    evidence: list[str]
