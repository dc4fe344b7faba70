"""`Spec`, the base of the optimizer specs: what one optimizer is in every framework, in one place.

A spec is frozen data that a recipe file can store. It has the hyperparameters as fields, the state arrays (`slots`)
with their shapes, the formula (`step`) over an array namespace, and the native classes with the layout of their state.
The reference and TensorFlow backends run the formula directly. torch and JAX use `torch.optim` and optax where these
have it; the conformance suite compares their results with it.

Most formulas are elementwise. One that needs a parameter as a whole, such as its norm or a product of matrices, is not
`is_elementwise`: it runs on one parameter at a time and may use the second half of the array namespace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError, plain_number_hint
from polyamp.recipe.groups import check_groups
from polyamp.records import Record
from polyamp.schedules import Schedule, is_schedule

Shape = tuple[int, ...]
Slots = dict[str, Any]
SlotSelector = Callable[[Slots], Slots]


class NativeOptimizer(NamedTuple):
    """Class of a framework that has an optimizer's state: for optax, the class of the state.

    Attributes:
        name: its dotted path, such as "torch.optim.Adam".
        slots: its name of a state array -> the spec's name. In torch only the names that differ.
        options: its name of an option -> the spec's name, where they differ or not all options are the spec's.
        counts: whether it counts the updates of its parameters.
        is_fused: torch: whether its kernels accept a finite flag and a divisor.
        mark: torch: an option that no other class saves, by which a saved state is recognised.
        note: how its formula differs from the spec's; "" if it does not.
    """

    name: str
    slots: Mapping[str, str] = MappingProxyType({})
    options: Mapping[str, str] = MappingProxyType({})
    counts: bool = True
    is_fused: bool = False
    mark: str = ""
    note: str = ""


class ParameterFacts(NamedTuple):
    """What a spec may know of a parameter.

    Attributes:
        path: its path in the state.
        dimensions: number of axes.
        is_embedding: whether it is the table of an embedding; None if that cannot be told.
        outputs_first: whether a kernel's first axis is that of its outputs, as in torch, and not its last.
        compute: the policy's compute dtype.
    """

    path: str
    dimensions: int
    is_embedding: bool | None
    outputs_first: bool
    compute: str


Framework = Literal["torch", "keras", "optax"]
NativeOptimizers = Mapping[Framework, tuple[NativeOptimizer, ...]]


def _keep_all_slots(slots: Slots) -> Slots:
    return slots


def scalar_shape(shape: Shape) -> Shape:
    """Return the shape of a slot that is one number for each parameter."""
    return ()


class Spec(Record):
    """Base class of the specs.

    `groups`, the last field of each spec, has other hyperparameters for some parameters (S27).
    `polyamp.rules.group_members` resolves them; the formula ignores them.
    """

    word: ClassVar[str] = "spec"
    slot_names: ClassVar[tuple[str, ...]] = ()
    """Value of `slots`, if it does not depend on hyperparameters."""
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = MappingProxyType({})
    """Slot -> function from the parameter's shape to the slot's; a slot without one has the parameter's shape."""
    native: ClassVar[NativeOptimizers] = MappingProxyType({})
    """Library -> its classes that have this optimizer's state."""
    is_elementwise: ClassVar[bool] = True
    """Whether an element of the new parameter depends on no other element."""
    has_decoupled_decay: ClassVar[bool] = False
    """Value of `decouples_decay`, if it does not depend on hyperparameters."""
    has_own_decay: ClassVar[bool] = False
    """Whether `step` uses `weight_decay` itself, so that `update` does not."""
    depends_on_parameter: ClassVar[bool] = False
    """Whether `parameter_settings` chooses hyperparameters for each parameter."""
    has_average: ClassVar[bool] = False
    """Whether the optimizer has an average of the parameters, `average`, at which a model is evaluated (S34)."""
    row_and_column_slots: ClassVar[tuple[str, ...]] = ()
    """Two slots with the means of a kernel's rows and of its columns, which change places where it is transposed."""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Hyperparameter that is a word -> the accepted words."""

    learning_rate: float | Schedule

    def __post_init__(self) -> None:
        if not is_schedule(self.learning_rate):
            check_number("learning_rate", self.learning_rate)
        for name in self.hyperparameters:
            self._check_hyperparameter(name, getattr(self, name))
        groups: Any = getattr(self, "groups")  # noqa: B009  # the last field, declared in every subclass
        if groups:
            groups = check_groups(self, groups)
        self._set_field("groups", tuple(groups))

    def __dir__(self) -> list[str]:
        """Return what users need: the fields. The formulas are for whoever writes an optimizer."""
        shown = (*self.field_names, "replace", "to_dict")
        return [name for name in super().__dir__() if name.startswith("__") or name in shown]

    def _check_hyperparameter(self, name: str, value: Any) -> None:
        """Raise RecipeError for an impossible value. A spec with hyperparameters of other kinds extends it."""
        default = self.defaults[name]
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise RecipeError(f"{name} must be True or False. Received: {name}={value!r}.")
        elif name in self.choices:
            if value not in self.choices[name]:
                words = ", ".join(map(repr, self.choices[name]))
                raise RecipeError(f"{name} must be one of {words}. Received: {name}={value!r}.")
        elif isinstance(default, tuple):
            if not isinstance(value, tuple) or len(value) != 2:
                raise RecipeError(f"{name} must be a pair of numbers. Received: {name}={value!r}.")
            for item in value:
                check_number(name, item, below=1.0)
        else:
            check_number(name, value, below=1.0 if name in ("momentum", "alpha") else math.inf)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the fields other than the rate and the groups."""
        return self.field_names[1:-1]

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the per-parameter state arrays, which are at least float32."""
        return self.slot_names

    @classmethod
    def unchecked(cls, options: Mapping[str, Any]) -> Self:
        """Return the spec with the options of a native optimizer, which may have values that a spec refuses."""
        spec = cls.__new__(cls)
        for name, default in cls.defaults.items():
            spec._set_field(name, options.get(name, default))
        return spec

    def initial(self, slot: str) -> float:
        """Return the initial value of a slot."""
        return 0.0

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        """Return the shape of a slot of a parameter with this shape."""
        rule = self.slot_shapes.get(slot)
        return shape if rule is None else rule(shape)

    def parameter_settings(self, parameter: ParameterFacts) -> Mapping[str, Any]:
        """Return hyperparameters that depend on the parameter, by name. A rate here gives way to a group's.

        Raises:
            RecipeError: they cannot be determined; names the parameter and what to set.
        """
        return {}

    @property
    def needs_model(self) -> bool:
        """Whether parameters have different hyperparameters, so that a model resolves them."""
        groups: Any = getattr(self, "groups")  # noqa: B009  # the last field, declared in every subclass
        return bool(groups) or self.depends_on_parameter

    @property
    def decouples_decay(self) -> bool:
        """Whether `weight_decay` shrinks the parameter, instead of being added to the gradient (L2)."""
        return self.has_decoupled_decay

    @property
    def counts_updates(self) -> bool:
        """Whether the formula depends on the number of the parameter's update (S23): if it has `corrections`."""
        return type(self).corrections is not Spec.corrections

    def rate(self, count: Any, xp: ArrayNamespace) -> Any:
        """Return the learning rate of the update after `count` applied ones, as a scalar of `count`'s framework, in its
        dtype if that is floating."""
        rate = self.learning_rate
        return rate(count, xp) if callable(rate) else xp.asarray(rate, count * 1.0)

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
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
        decay: float = getattr(self, "weight_decay")  # noqa: B009  # a field of every spec
        before = param
        if decay and not self.has_own_decay:
            if self.decouples_decay:
                param = param * (1.0 - rate * decay)
            else:
                grad = grad + decay * param
        numbers = count if isinstance(count, dict) else self.corrections(xp, rate, count)
        change, new = self.step(xp, before, grad, slots, {"rate": rate, **numbers}, keep)
        return param - change, new

    def average(self, param: Any, slots: Slots) -> Any:
        """Return the parameter's average, of its shape and dtype, if the optimizer `has_average`."""
        raise NotImplementedError  # a spec with averages defines it

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        """Return what is subtracted from the parameter, and the new slots.

        Args:
            xp, slots, keep: as in `update`.
            param: the parameter before any decay.
            grad: the gradient, with an L2 decay.
            numbers: the learning rate as "rate", and the `corrections`.
        """
        raise NotImplementedError  # every spec defines its own


def one_minus_power(base: float, exponent: Any, xp: ArrayNamespace) -> Any:
    """Return 1 - base**exponent without cancellation (the plain form loses 4 digits in float32 at 0.999 and 1)."""
    return -xp.expm1(exponent * math.log(base)) if base > 0.0 else xp.asarray(1.0, exponent)


def check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    """Raise RecipeError unless a hyperparameter is a finite number of at least 0 and below a limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < below:
        limit = "of at least 0" + (f" and below {below:g}" if below < math.inf else "")
        schedule = " or a polyamp.schedules schedule" if name == "learning_rate" else ""
        instead = plain_number_hint(value) or (_rate_hint(value) if name == "learning_rate" else "")
        raise RecipeError(f"{name} must be a finite number {limit}{schedule}. Received: {name}={value!r}.{instead}")


def _rate_hint(value: Any) -> str:
    """Return a hint for a value that is no learning rate: "" or a sentence with a leading space."""
    if hasattr(value, "__next__") or type(value) in (list, tuple, dict):
        return " The parameters are the model's: polyamp.init(model, recipe) gives them to the optimizer."
    if isinstance(value, type):
        return f" That is the class {getattr(value, 'tag', '') or value.__name__}: call it with its arguments."
    from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES  # for this message alone

    made_by = value if hasattr(value, "__qualname__") else type(value)  # optax: a function inside of its maker
    name = f"{(made_by.__module__ or '').partition('.')[0]}.{made_by.__qualname__.partition('.')[0]}"
    if name in LIBRARY_SCHEDULES:
        return f' Write polyamp.schedules.like("{name}", ...), with the arguments of its call.'
    return " Write one of polyamp.schedules; another library's schedule is no data." if callable(value) else ""
