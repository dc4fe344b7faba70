"""How far apart two right computations may be: from the dtype's roundoff, the depth, and each side's own distance from
a wider run of itself. Called by `verdict`.

Two programs of one formula differ by rounding alone. How much rounding matters in *this* model at *this* place is
measured: each side is run once more in a wider dtype (float64 beside float32, float32 beside a 16-bit policy), and the
distance between its two runs is what its rounding did there, whatever amplified it: depth, cancellation, a ReLU that
switched, the steps before. Two sides a and b, whose own distances are da and db, are right if

    |a - b| <= FACTOR * max(own(da, db), u * sqrt(depth) * |a|)

with u the unit roundoff of the dtype: n roundings of random sign add up to sqrt(n) of them (Higham, "Accuracy and
Stability of Numerical Algorithms", 2.8). In float32 `own` is their sum: a wrong formula is wrong in float64 too,
so that it is no part of an own distance. Under a policy it is the smaller: there a fault may be in the 16-bit program
alone (a softmax in 16 bits, a cast that was forgotten) and is then a part of its side's own distance, and only of
that side's.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

FACTOR: Final = 6.0
"""How many times rounding's share two sides may be apart."""
RANDOM: Final = 1e-2
"""A relative distance of a module's output from its own float64 run that rounding does not make."""
UNJUDGED: Final = 8.0
"""How many times the floor counts where neither side has a judge: a sum of n products of random sign rounds like
sqrt(n / 2) roundings of its result, over the 32 lanes in which processors add; 8 is that of 4096 products."""
DRIFT: Final = 3.0
"""How many times the relative distance of the parameters what they make may be apart."""
_CAP: Final = 16.0
"""How many times the arithmetic's share an own distance may be that two different policies are allowed."""


class Judge(NamedTuple):
    """What decides in one phase.

    Attributes:
        roundoff: the unit roundoff of the coarsest dtype of both sides.
        wide: whether own distances are those from float64, of a run of the same formula.
        alike: whether both sides have the same policy.
    """

    roundoff: float
    wide: bool
    alike: bool

    def arithmetic(self, depth: float, scale: float) -> float:
        """What roundings one after another alone make."""
        return self.roundoff * math.sqrt(max(depth, 1.0)) * scale

    def allowed(
        self,
        own: tuple[float | None, float | None],
        depth: float,
        scale: float,
        *,
        alone: bool = True,
        switched: bool = False,
        drift: float = 0.0,
    ) -> float:
        """The largest distance that rounding explains.

        Args:
            own: how far each side is from its own wider run; None where there is none.
            depth: how many roundings followed each other, about.
            scale: what one rounding is relative to: the norm of the values.
            alone: whether both sides compute from the same numbers, as in the first step: then a fault of one side's
                16-bit program is that side's own distance alone.
            switched: whether units may have switched before it that rounding alone decided.
            drift: how far the parameters are apart that make it, relatively, where nothing is wrong with that.

        >>> Judge(2.0**-24, True, True).allowed((1e-6, 2e-6), 4, 1.0) == FACTOR * 3e-6
        True
        """
        floor = self.arithmetic(depth, scale)
        most = math.sqrt(self.roundoff * math.sqrt(max(depth, 1.0))) * scale
        known = [each for each in own if each is not None]
        if not known:
            plain = FACTOR * UNJUDGED * floor
        elif not self.alike:
            return FACTOR * max(floor, min(max(known), _CAP * floor))
        elif self.wide:
            plain = FACTOR * max(floor, sum(known) * len(own) / len(known))  # one that has no judge is as the other
        else:
            plain = FACTOR * max(floor, min(known) if alone else max(known))
        if switched:
            plain = max(plain, 2.0 * (min(max(known), most) if len(known) == len(own) else most))
        return max(plain, DRIFT * drift * scale)
