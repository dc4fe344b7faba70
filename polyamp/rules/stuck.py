"""S17: when the host looks whether a loss scale is stuck at its floor, and what it says then.

A gradient that is infinite whatever the scale needs a person. Every way in looks: `train_step` and `apply_gradients` by
the `Watch` of their state, the scalers for loops of one's own by one that they keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Protocol

from polyamp.errors import LossScaleStuckError


class Patience(Protocol):
    """The fields of a `LossScaler` that the rule reads."""

    @property
    def patience(self) -> int:
        """See `LossScaler`."""

    @property
    def on_stuck(self) -> str:
        """See `LossScaler`."""

    @property
    def min_scale(self) -> float:
        """See `LossScaler`."""

    @property
    def checks(self) -> bool:
        """See `LossScaler`."""


class Watch:
    """The host's count of one state's steps. A state that a step returns has that of the state which it was given.

    Args:
        shared: several states count together, because they cannot be told apart. Then the step within every
            `patience` that is followed by a look moves on by one each time, so that of up to `patience` states
            that take turns none is passed over.

    Example:
        >>> from polyamp import LossScaler
        >>> watch, scaler = Watch(), LossScaler(patience=3)
        >>> [watch.due(scaler) for _ in range(6)]
        [False, False, True, False, False, True]
    """

    __slots__ = ("shared", "steps")

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.steps = 0

    def due(self, scaler: Patience, steps: int = 1, per_update: int = 1) -> bool:
        """Count steps: whether the host looks after them, which it does every `patience` updates.

        Args:
            scaler: the scaler's description.
            steps: how many there were since the last call.
            per_update: how many of them make an update.
        """
        before, self.steps = self.steps, self.steps + steps
        period = scaler.patience * per_update
        if self.shared:
            passed = any(_moving(number, period) for number in range(before + 1, self.steps + 1))
        else:
            passed = self.steps // period != before // period
        return passed and scaler.checks and scaler.on_stuck != "ignore"


def _moving(number: int, period: int) -> bool:
    """Whether step `number` is one of `period`, 2 `period` + 1, 3 `period` + 2, ..."""
    block, offset = divmod(number, period)
    return block > 0 and offset == (block - 1) % period


def sentence(skips: int, scaler: Patience, names: Iterable[str], *, where: str = "loss_fn") -> str:
    """What is said of a scale that is stuck.

    Args:
        skips: consecutive skips at the floor.
        scaler: the scaler's description.
        names: of the parameters whose gradients are not finite, if it is known.
        where: what computes the loss.
    """
    listed = ", ".join(names) or "none on the last batch taken as a whole"
    return (
        f"{skips} steps in a row were skipped although the loss scale is at its floor of {scaler.min_scale:g}: the "
        f"gradients are not finite whatever the scale. Parameters with inf or NaN gradients: {listed}. Look for a "
        f"division by zero, a log of zero or a mask of -inf in {where}, or lower the learning rate; "
        "LossScaler(on_stuck=...) chooses 'raise', 'warn' or 'ignore'."
    )


def check(
    skips: int, scaler: Patience, names: Callable[[], Iterable[str]], *, where: str = "loss_fn", stacklevel: int = 3
) -> None:
    """Raise or warn, as the scaler asks, if so many consecutive skips at the floor are too many.

    Args:
        skips: as the host read them.
        scaler: the scaler's description.
        names: finds the parameters whose gradients are not finite.
        where: what computes the loss.
        stacklevel: of the warning; 3 is the caller of the function that looks.

    Raises:
        LossScaleStuckError: `on_stuck="raise"`.
    """
    if skips < scaler.patience or scaler.on_stuck == "ignore":
        return
    message = sentence(skips, scaler, names(), where=where)
    if scaler.on_stuck == "raise":
        raise LossScaleStuckError(message)
    warnings.warn(message, stacklevel=stacklevel)
