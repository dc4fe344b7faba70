"""S17: when the host looks whether a loss scale is stuck at its floor, and what it says then.

A gradient that is infinite whatever the scale needs a person. Every way in looks: `train_step` and `apply_gradients` by
the `Watch` of their state, the scalers for loops of one's own by one that they keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Protocol

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

    Example:
        >>> from polyamp import LossScaler
        >>> watch, scaler = Watch(), LossScaler(patience=3)
        >>> [watch.due(scaler) for _ in range(6)]
        [False, False, True, False, False, True]
    """

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def due(self, scaler: Patience, steps: int = 1, per_update: int = 1) -> bool:
        """Count steps: whether the host looks after them, which it does every `patience` updates.

        Args:
            scaler: the scaler's description.
            steps: how many there were since the last call.
            per_update: how many of them make an update.
        """
        period = scaler.patience * per_update
        before = self.steps // period
        self.steps += steps
        return self.steps // period != before and scaler.checks and scaler.on_stuck != "ignore"


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


def say(message: str, scaler: Patience, *, stacklevel: int = 3) -> None:
    """Raise or warn, as the scaler asks.

    Raises:
        LossScaleStuckError: `on_stuck="raise"`.
    """
    if scaler.on_stuck == "raise":
        raise LossScaleStuckError(message)
    if scaler.on_stuck == "warn":
        warnings.warn(message, stacklevel=stacklevel)


def is_stuck(skips: Any, scaler: Patience) -> bool:
    """Whether so many consecutive skips at the floor are too many."""
    return int(skips) >= scaler.patience
