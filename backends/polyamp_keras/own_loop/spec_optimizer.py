"""Optimizer specs of polyamp as a Keras optimizer with PyTorch's formulas, and what a recipe's groups are for a model.

Keras's Adam applies the bias correction to the step size before epsilon, and its weight decay is always decoupled. So a
spec runs its own `update` on tensors instead of `keras.optimizers.Adam`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import msgspec

from polyamp.errors import RecipeError
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.recipe.optimizers import SPECS, OptimizerSpec, is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.serialization import record_from_data, to_plain_data
from polyamp.rules.clip import ClipSet, clip_sets
from polyamp.rules.group_members import GroupClip, GroupHyperparameters, GroupMembers, resolve_group_members
from polyamp_keras.arrays import at_least_float32, dtype_name, native_variable, read_value
from polyamp_keras.compat import own_trainable_variables, variable_index
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.keras_serialization import PUBLIC_MODULE
from polyamp_keras.models.layers import layer_path_aliases, list_layers
from polyamp_keras.models.variables import parameter_leaves
from polyamp_keras.own_loop.optimizer_checks import check_built_for, check_recipe_optimizer


@keras.saving.register_keras_serializable(package="polyamp")
class SpecOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras is untyped
    """Keras optimizer that runs a polyamp spec with PyTorch's formulas, for `model.compile` and custom loops.

    Slots are float32, or float64 for float64 parameters. Sparse gradients are converted to dense ones. A parameter
    whose gradient is None, and its slots, do not change; its bias correction counts only its own updates (S23), while a
    schedule counts all updates. The optimizer is saved in `.keras` files; import the backend before loading one.

    Args:
        spec: one of polyamp's optimizer specs.
        groups: the spec's parameter groups, resolved for the variables of `build`, in their order (S27).
            `polyamp.init` and `polyamp_keras.compile` pass it; an optimizer alone does not know a model's paths.

    Attributes:
        spec: as given.
        groups: as given; a single group for all variables if the spec has no groups.
        missed_updates: by parameter, the number of updates without a gradient; int32 vector, None before `build`.

    Raises:
        RecipeError: not a spec, or a spec with unresolved groups.

    Example:
        >>> import keras, polyamp, polyamp_keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> optimizer = polyamp_keras.SpecOptimizer(polyamp.adam(1e-3, eps=1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> optimizer.get_config()["spec"]["eps"]
        0.001
    """

    def __init__(self, spec: Any, name: str | None = None, *, groups: GroupMembers | None = None) -> None:
        if not is_spec(spec):
            raise RecipeError(
                f"spec must be one of polyamp's specs ({', '.join(s.tag for s in SPECS)}), such as "
                f"polyamp.adamw(1e-3). Received: spec={spec!r}."
            )
        if spec.needs_model and groups is None:
            reason = "has parameter groups, which name parameters by their paths in a model"
            if not spec.groups:
                reason = f"is {spec.tag}, which treats the kinds of a model's parameters differently"
            raise RecipeError(
                f"spec {reason}, and an optimizer alone knows no model. Use {PUBLIC_MODULE}.compile(model, recipe, "
                "loss=...), or polyamp.init and polyamp.train_step."
            )
        rate = spec.learning_rate
        super().__init__(learning_rate=_SpecSchedule(spec) if callable(rate) else float(rate), name=name)
        self.spec = spec
        self.groups = GroupMembers([GroupHyperparameters(spec)], {}) if groups is None else groups
        self.missed_updates: Any = None
        self._kernels: list[Any] | None = None
        self._counts: Any = None
        self._exact_rate: Any = None
        self._trains: list[Any] | None = None

    def build(self, variables: list[Any]) -> None:
        """Create the slots (float32, or float64 for float64 parameters) and the counts of missed updates."""
        if self.built:
            return
        super().build(variables)
        self._slots = [
            {
                slot: self.add_variable(
                    shape=self._member(index).spec.slot_shape(slot, tuple(variable.shape)),
                    initializer=keras.initializers.Constant(self._member(index).spec.initial(slot)),
                    dtype=at_least_float32(variable),
                    name=slot,
                )
                for slot in self.spec.slots
            }
            for index, variable in enumerate(variables)
        ]
        self.missed_updates = self.add_variable(
            (len(variables),), "zeros", "int32", aggregation="only_first_replica", name="missed_updates"
        )

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the parameters that have a gradient. Values that they share are computed once."""
        if not self.built and trainable_variables is not None:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        grads = list(grads)
        if not grads:
            return
        variables = list(own_trainable_variables(self) if trainable_variables is None else trainable_variables)
        self._counts = self._update_counts()
        rate, counts = (
            keras.ops.cast(native_variable(value), "float32") for value in (self.learning_rate, self._counts)
        )
        self._exact_rate = self._rate_in_float64(rate) if "float64" in map(dtype_name, variables) else None
        trains = self._trains = self._trains_now()
        self._kernels = [
            None if m.start else ENGINE.kernel_update(m.spec, self._rate(m, rate), counts) for m in self.groups.distinct
        ]
        try:
            super().apply(grads, variables)
        finally:
            self._kernels = self._counts = self._exact_rate = self._trains = None
        used = {variable_index(self, v) for g, v in zip(grads, variables, strict=True) if g is not None}
        if len(used) < len(self._slots) or self.groups.starts:
            missed = [self._missed(trains, index) if index in used else 1 for index in range(len(self._slots))]
            self.missed_updates.assign_add(keras.ops.stack(missed))

    def _number(self, index: int) -> int:
        """Return the number of the hyperparameter set of the parameter at an index."""
        return 0 if self.groups.is_uniform else self.groups.order[index]

    def _trains_now(self) -> list[Any]:
        """Return whether each hyperparameter set is trained in this update (S27), boolean scalars; None for always."""
        count = read_value(self.iterations)
        return [count >= member.start if member.start else None for member in self.groups.distinct]

    def _missed(self, trains: list[Any], index: int) -> Any:
        own = trains[self._number(index)]
        return 0 if own is None else keras.ops.where(own, 0, 1)

    def zero_waiting(self, variables: list[Any], gradients: list[Any]) -> list[Any]:
        """Return dense gradients with zeros for the variables that are not trained yet: no part of norm and flag."""
        if not self.groups.starts:
            return gradients
        trains = self._trains_now()
        own = [trains[self._number(variable_index(self, variable))] for variable in variables]
        return [
            gradient if flag is None else keras.ops.where(flag, gradient, keras.ops.zeros_like(gradient))
            for flag, gradient in zip(own, gradients, strict=True)
        ]

    def clip_sets(self, variables: list[Any], limits: ClipLimits) -> list[ClipSet]:
        """Return which of the variables are clipped together, by their indices in this list (S11)."""
        return clip_sets([self._member(variable_index(self, each)).clip_limits(limits) for each in variables])

    def _member(self, index: int) -> GroupHyperparameters:
        return self.groups.distinct[self._number(index)]

    def _rate(self, member: GroupHyperparameters, rate: Any) -> Any:
        """Return the learning rate of a group, given the optimizer's own `rate`."""
        if member.own_rate:
            return member.rate(keras.ops.cast(native_variable(self.iterations), dtype_name(rate)), ENGINE.XP)
        return rate if member.scale == 1.0 else rate * member.scale

    def _rate_in_float64(self, rate: Any) -> Any:
        """Return the rate for float64 parameters (S1): the schedule's in float64, or the spec's exact number. Keras's
        float32 variable is used only if another rate was assigned to it."""
        spec = self.spec
        if callable(spec.learning_rate):
            return spec.rate(keras.ops.cast(native_variable(self.iterations), "float64"), ENGINE.XP)
        own = keras.ops.convert_to_tensor(spec.learning_rate, "float64")
        return keras.ops.where(rate == keras.ops.cast(own, dtype_name(rate)), own, keras.ops.cast(rate, "float64"))

    def _update_counts(self) -> Any:
        """Return, by index of the parameter, the number of its next update, starting at 1."""
        return (
            native_variable(self.iterations)
            + 1
            - keras.ops.cast(native_variable(self.missed_updates), dtype_name(self.iterations))
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one parameter, computed in the slots' dtype; only the result is rounded to the parameter's dtype."""
        index = variable_index(self, variable)
        slots = self._slots[index]
        work = at_least_float32(variable)
        member = self._member(index)
        own = None if self._kernels is None else self._kernels[self._number(index)]
        if own is not None and dtype_name(variable) == work == "float32":
            gradient = keras.ops.cast(ENGINE.to_dense(gradient, variable), work)
            own(
                index,
                native_variable(variable),
                gradient,
                {name: native_variable(slot) for name, slot in slots.items()},
            )
            return
        counts = self._update_counts() if self._counts is None else self._counts
        rate = keras.ops.cast(native_variable(learning_rate), work)
        if work == "float64":
            rate = (
                self._rate_in_float64(native_variable(learning_rate)) if self._exact_rate is None else self._exact_rate
            )
        new, new_slots = member.spec.update(
            ENGINE.XP,
            keras.ops.cast(native_variable(variable), work),
            keras.ops.cast(ENGINE.to_dense(gradient, variable), work),
            {name: read_value(slot) for name, slot in slots.items()},
            self._rate(member, rate),
            keras.ops.cast(counts[index], work),
        )
        trains = (self._trains_now() if self._trains is None else self._trains)[self._number(index)]
        for old, value in [(variable, new), *((slots[name], value) for name, value in new_slots.items())]:
            self.assign(old, value if trains is None else _select(trains, value, old))

    def load_own_variables(self, store: Any) -> None:
        """Load the variables as in Keras; also from older files without missed updates."""
        load_older_variables(self, store, [(self.missed_updates, 0)] if self.built else [])

    def spec_and_slots(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Return the spec of the parameter at an index, and its state variables by slot."""
        return self._member(index).spec, self._slots[index]

    def named_slots(self, parameters: list[str]) -> dict[str, Any]:
        """Return `<parameter>/<slot>` -> variable."""
        return {
            f"{name}/{slot}": variable
            for name, slots in zip(parameters, self._slots, strict=True)
            for slot, variable in slots.items()
        }

    def get_config(self) -> dict[str, Any]:
        """Return the name, the spec as a table as in a recipe file, and the group of each variable."""
        config = {"name": self.name, "spec": to_plain_data(self.spec)}
        if self.groups.is_ungrouped and not self.spec.needs_model:
            return config
        distinct = [
            {**member._asdict(), "spec": to_plain_data(member.spec), "clip": member.clip and list(member.clip)}
            for member in self.groups.distinct
        ]
        return {**config, "groups": {"distinct": distinct, "numbers": dict(self.groups.numbers)}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SpecOptimizer:
        """Create an optimizer from its config.

        Raises:
            RecipeError: the table is not that of a spec.
        """
        try:
            spec = record_from_data(config["spec"], OptimizerSpec)
            found, groups = config.get("groups"), None
            if found is not None:
                distinct = [
                    GroupHyperparameters(
                        **{
                            **m,
                            "spec": record_from_data(m["spec"], OptimizerSpec),
                            "clip": GroupClip(*m["clip"]) if m.get("clip") else None,
                        }
                    )
                    for m in found["distinct"]
                ]
                groups = GroupMembers(distinct, found["numbers"])
        except msgspec.ValidationError as error:
            raise RecipeError(f"the config of a SpecOptimizer: {error}") from error
        return cls(spec, name=config.get("name"), groups=groups)


def _select(trains: Any, value: Any, variable: Any) -> Any:
    old = read_value(variable)
    return keras.ops.where(trains, keras.ops.cast(value, dtype_name(old)), old)


class _SpecSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # Keras is untyped
    """Learning rate of a spec as a Keras schedule."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, step: Any) -> Any:
        return self.spec.rate(keras.ops.cast(native_variable(step), "float32"), ENGINE.XP)

    def get_config(self) -> dict[str, Any]:
        return {"spec": to_plain_data(self.spec)}


def load_older_variables(optimizer: Any, store: Any, later: list[tuple[Any, int]]) -> None:
    """Load variables as `keras.optimizers.Optimizer.load_own_variables`, also from older files without some of them.

    Args:
        optimizer: the optimizer.
        store: index -> array, in the order of `optimizer.variables`.
        later: the variables that an older file lacks, each with its fill value.
    """
    new = {id(variable) for variable, _ in later}
    older = [variable for variable in optimizer.variables if id(variable) not in new]
    if not later or len(store.keys()) != len(older):
        keras.optimizers.Optimizer.load_own_variables(optimizer, store)
        return
    for index, variable in enumerate(older):
        variable.assign(store[str(index)])
    for variable, value in later:
        variable.assign(keras.ops.full(variable.shape, value, variable.dtype))


def resolve_groups(model: Any, recipe: Recipe, parameters: Mapping[str, Any]) -> GroupMembers:
    """Resolve the groups of the recipe's optimizer for a model's parameters.

    Raises:
        RecipeError, PolicyError: a group, a kind or an alias does not match the model.
    """
    return resolve_group_members(
        recipe,
        parameters,
        lambda: parameter_leaves(model, parameters),
        backend=keras.config.backend(),
        modules=lambda: itertools.chain.from_iterable(layer_path_aliases(list_layers(model)).values()),
    )


def make_optimizer(
    recipe: Recipe, parameters: Mapping[str, Any], groups: GroupMembers, check: Callable[[Any], None] | None = None
) -> Any:
    """Return the recipe's optimizer, built for these parameters.

    Args:
        recipe: the recipe.
        parameters: path -> variable.
        groups: the result of `resolve_groups`.
        check: raises for settings that the place does not support, beside those that no place does.

    Raises:
        RecipeError: a native optimizer of another model, or one whose members scale or accumulate; and the errors of
            `check`.
    """
    optimizer = SpecOptimizer(recipe.optimizer, groups=groups) if is_spec(recipe.optimizer) else recipe.optimizer

    def check_both(optimizer: Any) -> None:
        check_recipe_optimizer(optimizer, recipe.clip_norm)
        if check is not None:
            check(optimizer)

    build_optimizer(optimizer, list(parameters.values()), check_both)
    return optimizer


def build_optimizer(optimizer: Any, variables: list[Any], check: Callable[[Any], None]) -> None:
    """Build a Keras optimizer for these variables. Check it before and after, when its members are known.

    Args:
        optimizer: unbuilt, or built for exactly these variables.
        variables: the variables to update.
        check: raises for unsupported settings.

    Raises:
        RecipeError: it belongs to another model; and the errors of `check`.
    """

    def look() -> None:
        check(optimizer)
        check_built_for(optimizer, variables)

    look()
    if not optimizer.built:
        optimizer.build(variables)
        look()


def optimizer_variables(optimizer: Any, parameters: list[str]) -> dict[str, Any]:
    """Return the optimizer's variables by names that are independent of other objects in the process."""
    if not isinstance(optimizer, SpecOptimizer):
        return {f"{number:04d}": variable for number, variable in enumerate(optimizer.variables)}
    named = {"iteration": optimizer.iterations, "missed_updates": optimizer.missed_updates}
    named |= optimizer.named_slots(parameters)
    if not callable(optimizer.spec.learning_rate):
        named["learning_rate"] = optimizer.learning_rate
    return named
