"""`Adagrad`: the gradient over the root of the sum of its squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_spec import NativeOptimizer, NativeOptimizers, Slots, SlotSelector, Spec
from polyamp.schedules import Schedule


class Adagrad(Spec):
    """Adagrad (jmlr.org/papers/v12/duchi11a.html; torch.optim.Adagrad): epsilon outside the root.

    >>> import polyamp
    >>> polyamp.adagrad().learning_rate
    0.01
    """

    tag: ClassVar[str] = "adagrad"
    slot_names: ClassVar[tuple[str, ...]] = ("sum",)
    native: ClassVar[NativeOptimizers] = {
        "torch": (
            NativeOptimizer(
                "torch.optim.Adagrad",
                options={name: name for name in ("lr_decay", "weight_decay", "eps")},
                mark="initial_accumulator_value",
            ),
        ),
        "keras": (
            NativeOptimizer(
                "keras.optimizers.Adagrad",
                {"accumulators": "sum"},
                {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"},
                counts=False,
                note="Keras's Adagrad adds epsilon inside the root, polyamp's and torch's outside of it",
            ),
        ),
        "optax": (
            NativeOptimizer(
                "optax.ScaleByRssState",
                {"sum_of_squares": "sum"},
                counts=False,
                note="optax adds Adagrad's epsilon inside the root, polyamp and torch outside of it",
            ),
        ),
    }

    learning_rate: float | Schedule = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    groups: Sequence[Group] = ()

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value

    @property
    def counts_updates(self) -> bool:
        return self.lr_decay > 0.0

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        return {"rate": rate / (1.0 + (count - 1.0) * self.lr_decay)}

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        new = keep({"sum": slots["sum"] + grad * grad})
        return numbers["rate"] * (grad / (xp.sqrt(new["sum"]) + self.eps)), new


adagrad = Adagrad
