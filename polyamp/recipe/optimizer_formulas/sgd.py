"""`SGD`: stochastic gradient descent, with momentum and Nesterov's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import NativeOptimizer, NativeOptimizers, Slots, SlotSelector, Spec
from polyamp.schedules import Schedule


class SGD(Spec):
    """Stochastic gradient descent (docs.pytorch.org, torch.optim.SGD). `weight_decay` is L2, added to the gradient.

    >>> import polyamp
    >>> polyamp.sgd(0.1, momentum=0.9).slots
    ('momentum',)
    """

    tag: ClassVar[str] = "sgd"
    native: ClassVar[NativeOptimizers] = {
        "torch": (
            NativeOptimizer(
                "torch.optim.SGD", {"momentum_buffer": "momentum"}, counts=False, is_fused=True, mark="dampening"
            ),
        ),
        "keras": (
            NativeOptimizer(
                "keras.optimizers.SGD",
                {"momentums": "momentum"},
                {"momentum": "momentum", "nesterov": "nesterov"},
                counts=False,
            ),
        ),
        "optax": (NativeOptimizer("optax.TraceState", {"trace": "momentum"}, counts=False),),
    }

    learning_rate: float | Schedule = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise RecipeError("nesterov=True needs a momentum above 0. Received: momentum=0.0.")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        if not self.momentum:
            return numbers["rate"] * grad, {}
        new = keep({"momentum": self.momentum * slots["momentum"] + grad})
        step = grad + self.momentum * new["momentum"] if self.nesterov else new["momentum"]
        return numbers["rate"] * step, new


sgd = SGD
