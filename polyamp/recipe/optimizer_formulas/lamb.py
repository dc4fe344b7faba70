"""`Lamb`: Adam's step, scaled for each parameter to the parameter's own norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_formulas.adam import adam_corrections, moments
from polyamp.recipe.optimizer_spec import NativeOptimizers, Slots, SlotSelector, Spec
from polyamp.schedules import Schedule


class Lamb(Spec):
    """LAMB (arxiv.org/abs/1904.00962, version 5): Adam's step plus the decay, scaled by the parameter's norm over its.

    A parameter or a step of norm 0 is not scaled. There is no limit on the ratio and no clip of its own: a recipe has
    `clip_norm`. optax.lamb has this formula, without decay by default; keras.optimizers.Lamb has it without decay, and
    puts its own outside of the ratio. timm's Lamb divides the gradients by their global norm first, and does not scale
    parameters without decay. torch has none.

    >>> import polyamp
    >>> polyamp.lamb().slots
    ('exp_avg', 'exp_avg_sq')
    """

    tag: ClassVar[str] = "lamb"
    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    has_decoupled_decay: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = False
    has_own_decay: ClassVar[bool] = True
    native: ClassVar[NativeOptimizers] = {}

    learning_rate: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2
    groups: Sequence[Group] = ()

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        own = adam_corrections(xp, self.betas, 1.0, count)
        return {"root": own["root"], "factor": own["rate"]}

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        mean, square = moments(self.betas, grad, slots["exp_avg"], slots["exp_avg_sq"])
        new = keep({"exp_avg": mean, "exp_avg_sq": square})
        root = xp.sqrt(new["exp_avg_sq"]) / numbers["root"] + self.eps
        step = numbers["factor"] * (new["exp_avg"] / root) + self.weight_decay * param
        length, own = xp.norm(param), xp.norm(step)
        one = xp.asarray(1.0, length)
        positive = xp.minimum(length, own) > 0.0
        ratio = xp.where(positive, length / xp.where(positive, own, one), one)
        return numbers["rate"] * ratio * step, new


lamb = Lamb
