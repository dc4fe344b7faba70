"""Whether a loss scale is searching, settled or sinking: one word for each record, with its reason (S35)."""

from __future__ import annotations

from typing import Final, NamedTuple

from polyamp.monitor.records import ScaleWord
from polyamp.recipe.scaler import LossScaler

SINKING_FACTOR: Final = 16.0
"""Factor by which a scale falls without growing, after its search, from which on it is sinking."""
SMALLEST_USEFUL: Final = 1.0
"""Scale below which gradients are made smaller: no loss scale helps then."""


class ScalePoint(NamedTuple):
    """A record's part for the word. Attributes: as in `MonitorRecord`."""

    call: int
    scale: float
    skips: int | None


class WordWithReason(NamedTuple):
    """Attributes: the word; the numbers behind it."""

    word: ScaleWord
    reason: str


class ScaleJudge:
    """Gives each record of a training its word, in order.

    - settled: the policy scales nothing, or by a fixed number; or the scale has grown, or `growth_interval` steps
      without a skip are behind it; and it is not sinking.
    - sinking: the scale is below 1; or, once settled, it has fallen by a factor of 16 since it last grew.
    - searching: everything before that. Skips in this time are the search, and no fault.

    Args:
        scaler: the recipe's.

    Example:
        >>> judge = ScaleJudge(LossScaler(growth_interval=200))
        >>> judge(ScalePoint(100, 8192.0, 3)).word, judge(ScalePoint(300, 8192.0, 0)).word
        ('searching', 'settled')
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self._last: ScalePoint | None = None
        self._clean = 0
        self._top: float | None = None

    def __call__(self, point: ScalePoint) -> WordWithReason:
        """Return the word of the next record."""
        scaler = self._scaler
        if not scaler.scales:
            return WordWithReason("settled", "the loss is not scaled")
        if scaler.kind == "static":
            return WordWithReason("settled", f"the scale is fixed at {point.scale:g}")
        before = self._last or ScalePoint(0, point.scale, 0)
        self._last = point
        fell = bool(point.skips) or point.scale < before.scale
        self._clean = 0 if fell else self._clean + point.call - before.call
        if point.scale > before.scale or (self._top is None and self._clean >= scaler.growth_interval):
            self._top = point.scale
        if point.scale < SMALLEST_USEFUL:
            return WordWithReason("sinking", f"the scale is {point.scale:g}, below 1")
        if self._top is None:
            clean = f"{self._clean} of {scaler.growth_interval} steps without an overflow, and no growth yet"
            return WordWithReason("searching", clean)
        if point.scale * SINKING_FACTOR <= self._top:
            return WordWithReason("sinking", f"the scale fell from {self._top:g} to {point.scale:g} without growing")
        return WordWithReason("settled", f"the scale is {point.scale:g}; it last grew to {self._top:g}")
