"""Optimizer specs: sgd, adam, adamw, rmsprop, adagrad and lion, with PyTorch's defaults and PyTorch's formulas (S21).

A spec is frozen data that a recipe file can store. `spec.update` is its formula, written once over an array namespace.
The reference and TensorFlow backends run it directly. torch and JAX use `torch.optim` and optax; the conformance suite
compares their results with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError, plain_number_hint
from polyamp.recipe.groups import Group, check_groups
from polyamp.records import Record
from polyamp.schedules import Schedule, is_schedule

Slots = dict[str, Any]
SlotSelector = Callable[[Slots], Slots]


def _keep_all_slots(slots: Slots) -> Slots:
    return slots


class _Spec(Record):
    """Base class of the specs. `slots` names the per-parameter arrays, of the parameter's shape, at least float32.

    `groups`, the last field of each spec, has other hyperparameters for some parameters (S27).
    `polyamp.rules.group_members` resolves them; `update` ignores them.
    """

    word: ClassVar[str] = "spec"

    learning_rate: float | Schedule

    def __post_init__(self) -> None:
        if not is_schedule(self.learning_rate):
            _check_number("learning_rate", self.learning_rate, low=0.0)
        for name in self.hyperparameters:
            value = getattr(self, name)
            if name in ("nesterov", "centered"):
                if not isinstance(value, bool):
                    raise RecipeError(f"{name} must be True or False. Received: {name}={value!r}.")
            elif name == "betas":
                if not isinstance(value, tuple) or len(value) != 2:
                    raise RecipeError(f"betas must be a pair of numbers. Received: betas={value!r}.")
                for beta in value:
                    _check_number("betas", beta, low=0.0, below=1.0)
            else:
                _check_number(name, value, low=0.0, below=1.0 if name in ("momentum", "alpha") else math.inf)
        groups: Any = getattr(self, "groups")  # noqa: B009  # the last field, declared in every subclass
        if groups:
            groups = check_groups(self, groups)
        self._set_field("groups", tuple(groups))

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the fields other than the rate and the groups."""
        return self.field_names[1:-1]

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the per-parameter state arrays."""
        raise NotImplementedError  # every spec defines its own

    def initial(self, slot: str) -> float:
        """Return the initial value of a slot."""
        return 0.0

    def rate(self, count: Any, xp: ArrayNamespace) -> Any:
        """Return the learning rate of the update after `count` applied ones, as a scalar of `count`'s framework, in its
        dtype if that is floating."""
        rate = self.learning_rate
        return rate(count, xp) if callable(rate) else xp.asarray(rate, count * 1.0)

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> dict[str, Any]:
        """Return the quantities that depend on the update's number, by name: scalars, or vectors if `count` is a vector
        over parameters. `update` computes them itself; a backend may compute those of all parameters at once."""
        return {}

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        """Return the result of one update of one parameter.

        Args:
            xp: the framework's array namespace.
            param: the parameter, float32, or float64 if it is stored so (S1).
            grad: its gradient, of the same dtype and shape.
            slots: this spec's state arrays for the parameter.
            rate: learning rate, scalar of this dtype.
            count: number of this update of this parameter (S23), starting at 1, as a scalar of this dtype; or the
                `corrections` computed from it.
            keep: selects the slots before the parameter is computed from them. A compiled step that skips by choosing
                between old and new slots chooses here, so that no old slot is read after the new one.

        Returns:
            The new parameter and the new slots.
        """
        raise NotImplementedError  # every spec defines its own


class SGD(_Spec):
    """Stochastic gradient descent (docs.pytorch.org, torch.optim.SGD). `weight_decay` is L2, added to the gradient.

    >>> sgd(0.1, momentum=0.9).slots
    ('momentum',)
    """

    tag: ClassVar[str] = "sgd"

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

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        if self.weight_decay:
            grad = grad + self.weight_decay * param
        if not self.momentum:
            return param - rate * grad, {}
        new = keep({"momentum": self.momentum * slots["momentum"] + grad})
        step = grad + self.momentum * new["momentum"] if self.nesterov else new["momentum"]
        return param - rate * step, new


class _AdamFormula(_Spec):
    """Moments shared by Adam and AdamW; epsilon is added to the bias-corrected root."""

    learning_rate: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()
    _decoupled: ClassVar[bool]

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> dict[str, Any]:
        beta1, beta2 = self.betas
        root = xp.sqrt(_one_minus_power(beta2, count, xp))
        return {"root": root, "rate": rate / _one_minus_power(beta1, count, xp)}

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        if self.weight_decay and self._decoupled:
            param = param * (1.0 - rate * self.weight_decay)
        elif self.weight_decay:
            grad = grad + self.weight_decay * param
        mean = beta1 * slots["exp_avg"] + (1.0 - beta1) * grad
        square = beta2 * slots["exp_avg_sq"] + (1.0 - beta2) * (grad * grad)
        new = keep({"exp_avg": mean, "exp_avg_sq": square})
        corrected = count if isinstance(count, dict) else self.corrections(xp, rate, count)
        root = xp.sqrt(new["exp_avg_sq"]) / corrected["root"] + self.eps
        param = param - corrected["rate"] * (new["exp_avg"] / root)
        return param, new


class Adam(_AdamFormula):
    """Adam (arxiv.org/abs/1412.6980; torch.optim.Adam). `weight_decay` is L2, added to the gradient.

    >>> adam().betas
    (0.9, 0.999)
    """

    tag: ClassVar[str] = "adam"

    _decoupled: ClassVar[bool] = False


class AdamW(_AdamFormula):
    """Adam with decoupled weight decay (arxiv.org/abs/1711.05101; torch.optim.AdamW).

    >>> adamw().weight_decay
    0.01
    """

    tag: ClassVar[str] = "adamw"

    weight_decay: float = 1e-2
    _decoupled: ClassVar[bool] = True


class RMSprop(_Spec):
    """RMSprop (torch.optim.RMSprop): epsilon outside the root, the learning rate outside the momentum.

    >>> rmsprop(centered=True).slots
    ('square_avg', 'grad_avg')
    """

    tag: ClassVar[str] = "rmsprop"

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

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        if self.weight_decay:
            grad = grad + self.weight_decay * param
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
        return param - rate * step, new


class Adagrad(_Spec):
    """Adagrad (jmlr.org/papers/v12/duchi11a.html; torch.optim.Adagrad): epsilon outside the root.

    >>> adagrad().learning_rate
    0.01
    """

    tag: ClassVar[str] = "adagrad"

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

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> dict[str, Any]:
        return {"rate": rate / (1.0 + (count - 1.0) * self.lr_decay)}

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        if self.weight_decay:
            grad = grad + self.weight_decay * param
        new = keep({"sum": slots["sum"] + grad * grad})
        rate = (count if isinstance(count, dict) else self.corrections(xp, rate, count))["rate"]
        return param - rate * (grad / (xp.sqrt(new["sum"]) + self.eps)), new


class Lion(_Spec):
    """Lion, the sign of an interpolated momentum, with decoupled decay (arxiv.org/abs/2302.06675).

    >>> lion().betas
    (0.9, 0.99)
    """

    tag: ClassVar[str] = "lion"

    learning_rate: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(
        self,
        xp: ArrayNamespace,
        param: Any,
        grad: Any,
        slots: Slots,
        rate: Any,
        count: Any,
        *,
        keep: SlotSelector = _keep_all_slots,
    ) -> tuple[Any, Slots]:
        beta1, beta2 = self.betas
        direction = xp.sign(beta1 * slots["exp_avg"] + (1.0 - beta1) * grad)
        if self.weight_decay:
            param = param * (1.0 - rate * self.weight_decay)
        return param - rate * direction, keep({"exp_avg": beta2 * slots["exp_avg"] + (1.0 - beta2) * grad})


OptimizerSpec = SGD | Adam | AdamW | RMSprop | Adagrad | Lion
"""Any optimizer spec; in a recipe file a table with `type = "adamw"` etc."""
SPECS: tuple[type[OptimizerSpec], ...] = (SGD, Adam, AdamW, RMSprop, Adagrad, Lion)

sgd = SGD
adam = Adam
adamw = AdamW
rmsprop = RMSprop
adagrad = Adagrad
lion = Lion


def is_spec(value: Any) -> bool:
    """Return True for a polyamp spec, False for a framework's own optimizer."""
    return isinstance(value, _Spec)


def _one_minus_power(beta: float, count: Any, xp: ArrayNamespace) -> Any:
    """Return 1 - beta**count without cancellation (the plain form loses 4 digits in float32 at beta=0.999, count=1)."""
    return -xp.expm1(count * math.log(beta)) if beta > 0.0 else xp.asarray(1.0, count)


def _check_number(name: str, value: Any, *, low: float, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < below:
        limit = f"of at least {low:g}" + (f" and below {below:g}" if below < math.inf else "")
        schedule = " or a polyamp.schedules schedule" if name == "learning_rate" else ""
        instead = plain_number_hint(value) or (_rate_hint(value) if name == "learning_rate" else "")
        raise RecipeError(f"{name} must be a finite number {limit}{schedule}. Received: {name}={value!r}.{instead}")


def _rate_hint(value: Any) -> str:
    """Return a hint for a value that is no learning rate: "" or a sentence with a leading space."""
    if hasattr(value, "__next__") or type(value) in (list, tuple, dict):
        return " The parameters are the model's: polyamp.init(model, recipe) gives them to the optimizer."
    if isinstance(value, type):
        return f" That is the class {getattr(value, 'tag', '') or value.__name__}: call it with its arguments."
    return " Write one of polyamp.schedules; another library's schedule is no data." if callable(value) else ""
