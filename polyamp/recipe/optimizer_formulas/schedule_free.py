"""`ScheduleFreeAdamW`: AdamW whose averages take the place of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import (
    NativeOptimizers,
    Shape,
    Slots,
    SlotSelector,
    Spec,
    one_minus_power,
    scalar_shape,
)
from polyamp.schedules import Schedule

_LEAST_SUM = 1e-30


class ScheduleFreeAdamW(Spec):
    """Schedule-free AdamW (arxiv.org/abs/2405.15682; github.com/facebookresearch/schedule_free, AdamWScheduleFree).

    Three sequences: z takes AdamW's steps without a first moment, x is the weighted mean of all z, and the parameters
    are y = betas[0] * x + (1 - betas[0]) * z, at which gradients and decay are taken. Evaluate and save x:
    `polyamp.averaged(state)`. The weight of an update is the square of the largest rate so far.

    The state has `distance`, z - y, from which x follows, and two numbers for each parameter. The rate is constant
    after a warm-up, which a schedule says: `schedules.linear_warmup`. optax.contrib.schedule_free_adamw is the same at
    a constant rate; its weights' schedule stands one update ahead of that of its steps.

    >>> import polyamp
    >>> polyamp.schedule_free().slots
    ('distance', 'exp_avg_sq', 'max_rate', 'weight_sum')
    """

    tag: ClassVar[str] = "schedule_free"
    slot_names: ClassVar[tuple[str, ...]] = ("distance", "exp_avg_sq", "max_rate", "weight_sum")
    has_decoupled_decay: ClassVar[bool] = True
    has_own_decay: ClassVar[bool] = True
    has_average: ClassVar[bool] = True
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = dict.fromkeys(
        ("max_rate", "weight_sum"), scalar_shape
    )
    native: ClassVar[NativeOptimizers] = {}

    learning_rate: float | Schedule = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.betas[0]:
            raise RecipeError(f"betas[0] must be above 0: it holds the average. Received: betas={self.betas!r}.")

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        return {"root": xp.sqrt(one_minus_power(self.betas[1], count, xp))}

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        square = beta2 * slots["exp_avg_sq"] + (1.0 - beta2) * (grad * grad)
        largest = xp.maximum(slots["max_rate"], slots["max_rate"] * 0.0 + numbers["rate"])
        weight = largest * largest
        total = slots["weight_sum"] + weight
        kept = 1.0 - weight / xp.maximum(total, xp.asarray(_LEAST_SUM, total))  # share of the old average
        step = numbers["rate"] * (grad / (xp.sqrt(square) / numbers["root"] + self.eps) + self.weight_decay * param)
        distance = kept * (slots["distance"] - beta1 * step)
        change = step + (distance - slots["distance"])
        return change, keep({"distance": distance, "exp_avg_sq": square, "max_rate": largest, "weight_sum": total})

    def average(self, param: Any, slots: Slots) -> Any:
        beta1 = self.betas[0]
        return param - ((1.0 - beta1) / beta1) * slots["distance"]


schedule_free = ScheduleFreeAdamW
