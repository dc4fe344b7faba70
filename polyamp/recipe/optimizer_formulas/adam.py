"""`Adam` and `AdamW`: moments with bias correction; L2 or decoupled decay; AMSGrad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import NativeOptimizer, NativeOptimizers, Slots, SlotSelector, Spec, one_minus_power
from polyamp.schedules import Schedule

_KERAS_ADAM_NOTE = (
    "Keras's Adam adds epsilon to the root before its bias correction, polyamp's and torch's behind it: at first as a "
    "larger epsilon would"
)


def adam_corrections(xp: ArrayNamespace, betas: tuple[float, float], rate: Any, count: Any) -> Slots:
    """Return Adam's bias corrections: "rate", the corrected rate, and "root", the divisor of the second moment's."""
    root = xp.sqrt(one_minus_power(betas[1], count, xp))
    return {"root": root, "rate": rate / one_minus_power(betas[0], count, xp)}


def moments(betas: tuple[float, float], grad: Any, mean: Any, square: Any) -> tuple[Any, Any]:
    """Return the next running means of the gradient and of its square."""
    beta1, beta2 = betas
    return beta1 * mean + (1.0 - beta1) * grad, beta2 * square + (1.0 - beta2) * (grad * grad)


class _AdamFormula(Spec):
    """Moments shared by Adam and AdamW; epsilon is added to the bias-corrected root."""

    learning_rate: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        return adam_corrections(xp, self.betas, rate, count)

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        mean, square = moments(self.betas, grad, slots["exp_avg"], slots["exp_avg_sq"])
        new = {"exp_avg": mean, "exp_avg_sq": square}
        if self.amsgrad:
            new["max_exp_avg_sq"] = xp.maximum(slots["max_exp_avg_sq"], square)
        new = keep(new)
        root = xp.sqrt(new["max_exp_avg_sq" if self.amsgrad else "exp_avg_sq"]) / numbers["root"] + self.eps
        return numbers["rate"] * (new["exp_avg"] / root), new


class Adam(_AdamFormula):
    """Adam (arxiv.org/abs/1412.6980; torch.optim.Adam). `weight_decay` is L2, added to the gradient.

    `amsgrad` divides by the largest second moment so far (openreview.net/forum?id=ryQu7f-RZ). It is torch's: the
    largest before the bias correction, which optax.amsgrad takes after it.

    >>> import polyamp
    >>> polyamp.adam().betas
    (0.9, 0.999)
    """

    tag: ClassVar[str] = "adam"
    native: ClassVar[NativeOptimizers] = {
        "torch": (NativeOptimizer("torch.optim.Adam", is_fused=True, mark="amsgrad"),),
        "keras": (
            NativeOptimizer(
                "keras.optimizers.Adam",
                {"momentums": "exp_avg", "velocities": "exp_avg_sq"},
                {"epsilon": "eps"},
                note=_KERAS_ADAM_NOTE,
            ),
        ),
        "optax": (NativeOptimizer("optax.ScaleByAdamState", {"mu": "exp_avg", "nu": "exp_avg_sq"}),),
    }


class AdamW(_AdamFormula):
    """Adam with decoupled weight decay (arxiv.org/abs/1711.05101; torch.optim.AdamW). `amsgrad` as in `adam`.

    >>> import polyamp
    >>> polyamp.adamw().weight_decay
    0.01
    """

    tag: ClassVar[str] = "adamw"
    has_decoupled_decay: ClassVar[bool] = True
    native: ClassVar[NativeOptimizers] = {"torch": (NativeOptimizer("torch.optim.AdamW", is_fused=True),)}

    weight_decay: float = 1e-2


adam = Adam
adamw = AdamW
