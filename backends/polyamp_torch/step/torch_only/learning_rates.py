"""Learning-rate schedules over the parameter groups of a spec's optimizer.

Each group has a multiple of its schedule's rate, `lr_scale`: initially 1, or the `learning_rate_scale` of the recipe's
group. A rate that the user writes into a group also sets it: relative to the schedule's current rate, which before the
first step is `schedule(0)`. This does not apply to native optimizers, specs without a schedule, and groups whose rate
is a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import XP, can_read_without_sync


class GroupLearningRates:
    """Learning rates of an optimizer's groups under schedules.

    Args:
        optimizer: an optimizer made from a spec.
        schedules: the schedule of each group; None if its rate is a number. Further groups use the first schedule.
        scales: the multiple of each group.
        float64: whether the parameters are float64, for which rates on a device in float32 are too coarse (S1).

    Example:
        >>> import polyamp
        >>> weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        >>> optimizer = torch.optim.SGD([{"params": weight} for weight in weights], lr=0.1)
        >>> rates = GroupLearningRates(optimizer, [polyamp.schedules.step(0.1, every=10)], [1.0])
        >>> optimizer.param_groups[1]["lr"] = 0.05
        >>> rates.set(torch.tensor(10))
        >>> [round(group["lr"], 9) for group in optimizer.param_groups]
        [0.01, 0.005]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedules: Sequence[Any | None],
        scales: Sequence[float],
        *,
        float64: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._float64 = float64
        self._schedules = list(schedules)
        self._rates: dict[Any, Any] = {schedule: float(schedule(0)) for schedule in schedules if schedule is not None}
        self._written: list[Any] = []
        for index, group in self._scheduled():
            group["lr_scale"] = scales[index] if index < len(scales) else 1.0
        self.write()

    def schedule_of(self, index: int) -> Any | None:
        """Return the schedule of a group; None if its rate is a number."""
        return self._schedules[index] if index < len(self._schedules) else self._schedules[0]

    def multiples(self) -> list[float]:
        """Return the multiple of each group, after the user's changes; the rate of a group without a schedule.

        Raises:
            UnsupportedError: a rate or `lr_scale` gives no valid multiple; or a torch scheduler is used as well.
        """
        for index, group in self._scheduled():
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
        groups = self._optimizer.param_groups
        scheduled = {index for index, _ in self._scheduled()}
        return [float(group["lr_scale"]) if index in scheduled else group["lr"] for index, group in enumerate(groups)]

    def set(self, applied: torch.Tensor) -> None:
        """Set every group's rate for the update after `applied` ones: a number on the CPU, else a device scalar.

        Rates for float64 parameters are numbers everywhere, for which the host reads the count: a GPU's fused kernels
        take no float64 scalar.
        """
        self.multiples()
        here = int(applied) if self._float64 or can_read_without_sync(applied.device) else None
        for schedule in self._rates:
            self._rates[schedule] = schedule(applied, XP) if here is None else float(schedule(here))
        self.write()

    def carry_rates(self, before: GroupLearningRates) -> None:
        """Take over the current rates of another optimizer, with this one's multiples."""
        self._rates = {schedule: before._rates.get(schedule, rate) for schedule, rate in self._rates.items()}
        self.write()

    def use_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use another optimizer with the same groups from now on."""
        self._optimizer = optimizer

    def write(self) -> None:
        """Write the current rates times the groups' multiples, for example after loading them."""
        for index, group in self._scheduled():
            scale, rate = group["lr_scale"], self._rates[self.schedule_of(index)]
            group["lr"] = rate if scale == 1.0 else rate * scale
        self._written = [group["lr"] for group in self._optimizer.param_groups]

    def _scheduled(self) -> list[tuple[int, dict[str, Any]]]:
        groups = enumerate(self._optimizer.param_groups)
        return [(index, group) for index, group in groups if self.schedule_of(index) is not None]

    def _adopt(self, index: int, group: dict[str, Any]) -> None:
        """Convert the group's rate to a multiple."""
        rate = float(self._rates[self.schedule_of(index)])
        written, known = float(group["lr"]), group.setdefault("lr_scale", 1.0)
        if rate:
            if not math.isclose(written, rate * known, rel_tol=1e-6):  # else only a rounding difference
                group["lr_scale"] = written / rate
        elif written:
            raise UnsupportedError(
                f"the schedule's rate is 0 now, so that lr={written:g} in parameter group {index} says no multiple of "
                "it. Write the multiple: group['lr_scale'] = 0.1."
            )
        else:
            group["lr_scale"] = 0.0
