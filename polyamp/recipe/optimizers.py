"""Optimizer specs with PyTorch's defaults and formulas (S21): one class each, the only place that knows an optimizer.

`polyamp.recipe.optimizer_spec` describes what a spec consists of; docs/guides/add_an_optimizer.md adds one.
"""

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

__all__ = ["adagrad", "adam", "adamw", "lion", "nadam", "rmsprop", "sgd"]


class SGD(Spec):
    """Stochastic gradient descent (docs.pytorch.org, torch.optim.SGD). `weight_decay` is L2, added to the gradient.

    >>> sgd(0.1, momentum=0.9).slots
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
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        if not self.momentum:
            return numbers["rate"] * grad, {}
        new = keep({"momentum": self.momentum * slots["momentum"] + grad})
        step = grad + self.momentum * new["momentum"] if self.nesterov else new["momentum"]
        return numbers["rate"] * step, new


_KERAS_ADAM_NOTE = (
    "Keras's Adam adds epsilon to the root before its bias correction, polyamp's and torch's behind it: at first as a "
    "larger epsilon would"
)


class _AdamFormula(Spec):
    """Moments shared by Adam and AdamW; epsilon is added to the bias-corrected root."""

    learning_rate: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def counts_updates(self) -> bool:
        return True

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        beta1, beta2 = self.betas
        root = xp.sqrt(one_minus_power(beta2, count, xp))
        return {"root": root, "rate": rate / one_minus_power(beta1, count, xp)}

    def step(
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        mean = beta1 * slots["exp_avg"] + (1.0 - beta1) * grad
        square = beta2 * slots["exp_avg_sq"] + (1.0 - beta2) * (grad * grad)
        new = keep({"exp_avg": mean, "exp_avg_sq": square})
        root = xp.sqrt(new["exp_avg_sq"]) / numbers["root"] + self.eps
        return numbers["rate"] * (new["exp_avg"] / root), new


class Adam(_AdamFormula):
    """Adam (arxiv.org/abs/1412.6980; torch.optim.Adam). `weight_decay` is L2, added to the gradient.

    >>> adam().betas
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
    """Adam with decoupled weight decay (arxiv.org/abs/1711.05101; torch.optim.AdamW).

    >>> adamw().weight_decay
    0.01
    """

    tag: ClassVar[str] = "adamw"
    native: ClassVar[NativeOptimizers] = {"torch": (NativeOptimizer("torch.optim.AdamW", is_fused=True),)}

    weight_decay: float = 1e-2

    @property
    def decouples_decay(self) -> bool:
        return True


class RMSprop(Spec):
    """RMSprop (torch.optim.RMSprop): epsilon outside the root, the learning rate outside the momentum.

    >>> rmsprop(centered=True).slots
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
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
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


class Adagrad(Spec):
    """Adagrad (jmlr.org/papers/v12/duchi11a.html; torch.optim.Adagrad): epsilon outside the root.

    >>> adagrad().learning_rate
    0.01
    """

    tag: ClassVar[str] = "adagrad"
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

    @property
    def slots(self) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value

    @property
    def counts_updates(self) -> bool:
        return self.lr_decay > 0.0

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        return {"rate": rate / (1.0 + (count - 1.0) * self.lr_decay)}

    def step(
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        new = keep({"sum": slots["sum"] + grad * grad})
        return numbers["rate"] * (grad / (xp.sqrt(new["sum"]) + self.eps)), new


class Lion(Spec):
    """Lion, the sign of an interpolated momentum, with decoupled decay (arxiv.org/abs/2302.06675).

    >>> lion().betas
    (0.9, 0.99)
    """

    tag: ClassVar[str] = "lion"
    native: ClassVar[NativeOptimizers] = {
        "keras": (NativeOptimizer("keras.optimizers.Lion", {"momentums": "exp_avg"}, counts=False),),
        "optax": (NativeOptimizer("optax.ScaleByLionState", {"mu": "exp_avg"}, counts=False),),
    }

    learning_rate: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg",)

    @property
    def decouples_decay(self) -> bool:
        return True

    def step(
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        direction = xp.sign(beta1 * slots["exp_avg"] + (1.0 - beta1) * grad)
        return numbers["rate"] * direction, keep({"exp_avg": beta2 * slots["exp_avg"] + (1.0 - beta2) * grad})


class NAdam(Spec):
    """Adam with Nesterov's momentum on a schedule (Dozat 2016; torch.optim.NAdam).

    `momentum_decay` moves the momentum from about half of `betas[0]` to all of it. `weight_decay` is L2, added to the
    gradient, unless `decoupled_weight_decay`.

    >>> nadam().slots
    ('exp_avg', 'exp_avg_sq', 'mu_product')
    """

    tag: ClassVar[str] = "nadam"
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = {"mu_product": scalar_shape}
    native: ClassVar[NativeOptimizers] = {"torch": (NativeOptimizer("torch.optim.NAdam", mark="momentum_decay"),)}

    learning_rate: float | Schedule = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "mu_product")

    def initial(self, slot: str) -> float:
        return 1.0 if slot == "mu_product" else 0.0

    @property
    def decouples_decay(self) -> bool:
        return self.decoupled_weight_decay

    @property
    def counts_updates(self) -> bool:
        return True

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        def momentum(number: Any) -> Any:
            return self.betas[0] * (0.5 + 0.5 * one_minus_power(0.96, number * self.momentum_decay, xp))

        root = xp.sqrt(one_minus_power(self.betas[1], count, xp))
        return {"root": root, "mu": momentum(count), "next_mu": momentum(count + 1.0)}

    def step(
        self, xp: ArrayNamespace, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
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


OptimizerSpec = SGD | Adam | AdamW | RMSprop | Adagrad | Lion | NAdam
"""Any optimizer spec; in a recipe file a table with `type = "adamw"` etc."""
SPECS: tuple[type[OptimizerSpec], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad, Lion, NAdam)

sgd = SGD
adam = Adam
adamw = AdamW
rmsprop = RMSprop
adagrad = Adagrad
lion = Lion
nadam = NAdam


def is_spec(value: Any) -> bool:
    """Return True for a polyamp spec, False for a framework's own optimizer."""
    return isinstance(value, Spec)
