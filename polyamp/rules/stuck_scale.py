"""S17: detection of a loss scale that is stuck at its minimum.

A gradient that is infinite at every scale needs the user's attention. `train_step` and `apply_gradients` check with the
`StuckScaleMonitor` of their state; the scalers for custom loops own one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from polyamp.errors import LossScaleStuckError
from polyamp.recipe.scaler import LossScaler


class StuckScaleMonitor:
    """Host-side step count of one state, passed on to the state that a step returns.

    Args:
        shared: several states share one count, because they cannot be distinguished. The step that is followed by a
            check then shifts by one in each period of `patience`, so that no state is missed among up to `patience`
            states that alternate.

    Example:
        >>> from polyamp import LossScaler
        >>> watch, scaler = StuckScaleMonitor(), LossScaler(patience=3)
        >>> [watch.is_due(scaler) for _ in range(6)]
        [False, False, True, False, False, True]
    """

    __slots__ = ("shared", "steps")

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.steps = 0

    def is_due(self, scaler: LossScaler, steps: int = 1, per_update: int = 1) -> bool:
        """Count steps, and return whether a check is due; this is so every `patience` updates.

        Args:
            scaler: the scaler's description.
            steps: number of steps since the last call.
            per_update: number of steps per update.
        """
        before, self.steps = self.steps, self.steps + steps
        period = scaler.patience * per_update
        if self.shared:
            passed = any(_is_shifting_period(number, period) for number in range(before + 1, self.steps + 1))
        else:
            passed = self.steps // period != before // period
        return passed and scaler.checks and scaler.on_stuck != "ignore"


def _is_shifting_period(number: int, period: int) -> bool:
    """Whether step `number` is one of `period`, 2 `period` + 1, 3 `period` + 2, ..."""
    block, offset = divmod(number, period)
    return block > 0 and offset == (block - 1) % period


class StuckFinding(NamedTuple):
    """What is known of gradients that are not finite.

    Attributes:
        parameters: paths of their parameters.
        loss_is_finite: whether the loss is finite; None if it is not known.
        call: the call of `polyamp.find_nonfinite` for this training.
    """

    parameters: tuple[str, ...]
    loss_is_finite: bool | None = None
    call: str = "polyamp.find_nonfinite(loss_fn, policy, model, batch)"


def stuck_message(
    skips: int, scaler: LossScaler, found: StuckFinding | Iterable[str], *, where: str = "loss_fn"
) -> str:
    """Return the message for a stuck scale.

    Args:
        skips: consecutive skips at the minimum scale.
        scaler: the scaler's description.
        found: parameters with non-finite gradients, if known, or more.
        where: function that computes the loss.
    """
    found = _finding(found)
    listed = ", ".join(found.parameters) or "none on the last batch taken as a whole"
    return (
        f"{skips} steps in a row were skipped although the loss scale is at its floor of {scaler.min_scale:g}: the "
        f"gradients are not finite whatever the scale. Parameters with inf or NaN gradients: {listed}."
        f"{_PASSES[found.loss_is_finite]} Look for a "
        f"division by zero, a log of zero or a mask of -inf in {where}, or lower the learning rate; "
        f"{found.call} names the first operation that is not finite. "
        "LossScaler(on_stuck=...) chooses 'raise', 'warn' or 'ignore'."
    )


_PASSES: Final = {
    None: "",
    False: " The loss is not finite either: the forward pass breaks.",
    True: " The loss is finite: the backward pass breaks.",
}


def _finding(found: StuckFinding | Iterable[str]) -> StuckFinding:
    return found if isinstance(found, StuckFinding) else StuckFinding(tuple(found))


def check_stuck(
    skips: int,
    scaler: LossScaler,
    names: Callable[[], StuckFinding | Iterable[str]],
    *,
    where: str = "loss_fn",
    stacklevel: int = 3,
) -> None:
    """Raise or warn, as the scaler requests, if there are too many consecutive skips at the minimum scale.

    Args:
        skips: the number of skips, read on the host.
        scaler: the scaler's description.
        names: finds the parameters with non-finite gradients, or more.
        where: function that computes the loss.
        stacklevel: of the warning; 3 is the caller of the checking function.

    Raises:
        LossScaleStuckError: `on_stuck="raise"`; it carries what was found.
    """
    if skips < scaler.patience or scaler.on_stuck == "ignore":
        return
    found = _finding(names())
    message = stuck_message(skips, scaler, found, where=where)
    if scaler.on_stuck == "raise":
        error = LossScaleStuckError(message)
        error.parameters, error.loss_is_finite, error.call = found
        raise error
    warnings.warn(message, stacklevel=stacklevel)
