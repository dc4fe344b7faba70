"""`RMSprop`: the gradient over its running root mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import NativeOptimizer, NativeOptimizers, Slots, SlotSelector, Spec
from polyamp.schedules import Schedule


class RMSprop(Spec):
    """RMSprop (torch.optim.RMSprop): epsilon outside the root, the learning rate outside the momentum.

    >>> import polyamp
    >>> polyamp.rmsprop(centered=True).slots
    ('square_avg', 'grad_avg')
    """

    tag: ClassVar[str] = "rmsprop"
    native: ClassVar[NativeOptimizers] = {
        "torch": (NativeOptimizer("torch.optim.RMSprop", {"momentum_buffer": "momentum"}, mark="centered"),),
        "keras": (
            NativeOptimizer(
                "keras.optimizers.RMSprop",
                {"velocities": "square_avg", "momentums": "momentum", "average_gradients": "grad_avg"},
                {"rho": "alpha", "momentum": "momentum", "centered": "centered", "epsilon": "eps"},
                counts=False,
                note="Keras's RMSprop adds epsilon inside the root, polyamp's and torch's outside of it",
            ),
        ),
        "optax": (
            NativeOptimizer("optax.ScaleByRmsState", {"nu": "square_avg"}, counts=False),
            NativeOptimizer("optax.ScaleByRStdDevState", {"mu": "grad_avg", "nu": "square_avg"}, counts=False),
        ),
    }

    learning_rate: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("square_avg", *(("grad_avg",) if self.centered else ()), *(("momentum",) if self.momentum else ()))

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        new: Slots = {"square_avg": self.alpha * slots["square_avg"] + (1.0 - self.alpha) * (grad * grad)}
        if self.centered:
            new["grad_avg"] = self.alpha * slots["grad_avg"] + (1.0 - self.alpha) * grad
        new = keep(new)
        variance = new["square_avg"]
        if self.centered:
            variance = variance - new["grad_avg"] * new["grad_avg"]
        step = grad / (xp.sqrt(variance) + self.eps)
        if self.momentum:
            new |= keep({"momentum": self.momentum * slots["momentum"] + step})
            step = new["momentum"]
        return numbers["rate"] * step, new


rmsprop = RMSprop
