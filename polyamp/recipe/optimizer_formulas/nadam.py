"""`NAdam` and `NAdamW`: Adam with Nesterov's momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import (
    NativeOptimizer,
    NativeOptimizers,
    Shape,
    Slots,
    SlotSelector,
    Spec,
    one_minus_power,
    scalar_shape,
)
from polyamp.schedules import Schedule


class NAdam(Spec):
    """Adam with Nesterov's momentum on a schedule (Dozat 2016; torch.optim.NAdam).

    `momentum_decay` moves the momentum from about half of `betas[0]` to all of it. `weight_decay` is L2, added to the
    gradient, unless `decoupled_weight_decay`.

    >>> import polyamp
    >>> polyamp.nadam().slots
    ('exp_avg', 'exp_avg_sq', 'mu_product')
    """

    tag: ClassVar[str] = "nadam"
    slot_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "mu_product")
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = {"mu_product": scalar_shape}
    native: ClassVar[NativeOptimizers] = {"torch": (NativeOptimizer("torch.optim.NAdam", mark="momentum_decay"),)}

    learning_rate: float | Schedule = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    groups: Sequence[Group] = ()

    def initial(self, slot: str) -> float:
        return 1.0 if slot == "mu_product" else 0.0

    @property
    def decouples_decay(self) -> bool:
        return self.decoupled_weight_decay

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        def momentum(number: Any) -> Any:
            return self.betas[0] * (0.5 + 0.5 * one_minus_power(0.96, number * self.momentum_decay, xp))

        root = xp.sqrt(one_minus_power(self.betas[1], count, xp))
        return {"root": root, "mu": momentum(count), "next_mu": momentum(count + 1.0)}

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        rate, mu, next_mu = numbers["rate"], numbers["mu"], numbers["next_mu"]
        mean = beta1 * slots["exp_avg"] + (1.0 - beta1) * grad
        square = beta2 * slots["exp_avg_sq"] + (1.0 - beta2) * (grad * grad)
        new = keep({"exp_avg": mean, "exp_avg_sq": square, "mu_product": slots["mu_product"] * mu})
        product = new["mu_product"]
        root = xp.sqrt(new["exp_avg_sq"]) / numbers["root"] + self.eps
        now = rate * (1.0 - mu) / (1.0 - product)
        ahead = rate * next_mu / (1.0 - product * next_mu)
        return (now * grad + ahead * new["exp_avg"]) / root, new


class NAdamW(NAdam):
    """NAdam with decoupled weight decay: torch.optim.NAdam(decoupled_weight_decay=True), with AdamW's decay.

    optax.nadamw is another formula: Nesterov's step with bias corrections, without a schedule of the momentum.

    >>> import polyamp
    >>> polyamp.nadamw().weight_decay
    0.01
    """

    tag: ClassVar[str] = "nadamw"
    native: ClassVar[NativeOptimizers] = {}

    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decoupled_weight_decay:
            raise RecipeError("nadamw decouples its weight decay. Received: decoupled_weight_decay=False. Use nadam.")


nadam = NAdam
nadamw = NAdamW
