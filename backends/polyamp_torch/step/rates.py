"""A schedule over the parameter groups of a spec's optimizer: each group has its own multiple of the schedule's rate.

The multiple is the group's `lr_scale`, 1 at first. A rate that is written into a group by hand says it too: over the
rate that the schedule has at that moment, which before the first step is `schedule(0)`. Called by the state and by the
steps; native optimizers, and specs without a schedule, have none of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from polyamp.errors import UnsupportedError


class Rates:
    """The learning rates of an optimizer's groups under a schedule.

    Args:
        optimizer: made from a spec.
        schedule: the spec's.

    Example:
        >>> import polyamp
        >>> weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        >>> optimizer = torch.optim.SGD([{"params": weight} for weight in weights], lr=0.1)
        >>> rates = Rates(optimizer, polyamp.schedules.step(0.1, every=10))
        >>> optimizer.param_groups[1]["lr"] = 0.05
        >>> rates.set(0.01)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.01, 0.005]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self._optimizer = optimizer
        self._rate: Any = float(schedule(0))
        self._written: list[Any] = []
        for group in optimizer.param_groups:
            group["lr_scale"] = 1.0
        self.write()

    def multiples(self) -> list[float]:
        """Of each group, after what was written into the groups by hand.

        Raises:
            UnsupportedError: a rate or `lr_scale` that says no multiple; or a scheduler of torch's on top.
        """
        for index, group in enumerate(self._optimizer.param_groups):
            if "initial_lr" in group:
                raise UnsupportedError(
                    "the optimizer's rate has two schedules: the recipe's and one of torch's lr_scheduler. Give the "
                    "recipe a constant learning_rate, or leave torch's scheduler out."
                )
            # the same object, not the same number: a schedule may begin at 0, and a group be set to 0
            if "lr_scale" not in group or not any(group["lr"] is known for known in self._written):
                self._adopt(index, group)
            if not 0.0 <= group["lr_scale"] < math.inf:
                raise UnsupportedError(
                    f"lr_scale must be a finite number of at least 0. Received: lr_scale={group['lr_scale']!r} in "
                    f"parameter group {index}."
                )
        return [float(group["lr_scale"]) for group in self._optimizer.param_groups]

    def set(self, rate: Any) -> None:
        """The schedule's rate for the next update, into every group by its multiple: a number, or a scalar tensor."""
        self.multiples()
        self._rate = rate
        self.write()

    def write(self) -> None:
        """The rate of now by the multiples that the groups say, as after loading them."""
        for group in self._optimizer.param_groups:
            scale = group["lr_scale"]
            group["lr"] = self._rate if scale == 1.0 else self._rate * scale
        self._written = [group["lr"] for group in self._optimizer.param_groups]

    def _adopt(self, index: int, group: dict[str, Any]) -> None:
        """Take the group's rate for a multiple."""
        written, rate, known = float(group["lr"]), float(self._rate), group.setdefault("lr_scale", 1.0)
        if rate:
            if not math.isclose(written, rate * known, rel_tol=1e-6):  # else the same number by another way
                group["lr_scale"] = written / rate
        elif written:
            raise UnsupportedError(
                f"the schedule's rate is 0 now, so that lr={written:g} in parameter group {index} says no multiple of "
                "it. Write the multiple: group['lr_scale'] = 0.1."
            )
        else:
            group["lr_scale"] = 0.0
