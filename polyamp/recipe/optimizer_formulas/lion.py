"""`Lion`: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import NativeOptimizer, NativeOptimizers, Slots, SlotSelector, Spec
from polyamp.schedules import Schedule


class Lion(Spec):
    """Lion, the sign of an interpolated momentum, with decoupled decay (arxiv.org/abs/2302.06675).

    >>> import polyamp
    >>> polyamp.lion().betas
    (0.9, 0.99)
    """

    tag: ClassVar[str] = "lion"
    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    has_decoupled_decay: ClassVar[bool] = True
    native: ClassVar[NativeOptimizers] = {
        "keras": (NativeOptimizer("keras.optimizers.Lion", {"momentums": "exp_avg"}, counts=False),),
        "optax": (NativeOptimizer("optax.ScaleByLionState", {"mu": "exp_avg"}, counts=False),),
    }

    learning_rate: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        direction = xp.sign(beta1 * slots["exp_avg"] + (1.0 - beta1) * grad)
        return numbers["rate"] * direction, keep({"exp_avg": beta2 * slots["exp_avg"] + (1.0 - beta2) * grad})


lion = Lion
