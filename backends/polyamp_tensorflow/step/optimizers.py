"""The optimizer of a recipe as a Keras optimizer: polyamp's specs with PyTorch's formulas, or the user's own.

Keras's Adam folds the bias correction into the step size before epsilon and its weight decay is always decoupled, so
a spec runs its own `update` over tensors instead of `keras.optimizers.Adam`. Called by the state and
`LossScaleOptimizer`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import msgspec
import tensorflow as tf

from polyamp.errors import RecipeError
from polyamp.recipe.files import convert, plain
from polyamp.recipe.members import Member, Members, members
from polyamp.recipe.optimizers import SPECS, OptimizerSpec, is_spec
from polyamp.recipe.recipe import Recipe
from polyamp_tensorflow.arrays import XP, at_least_float32, dense, raw
from polyamp_tensorflow.compat import index_in, own_trainable
from polyamp_tensorflow.models.kinds import leaves_of
from polyamp_tensorflow.models.layers import modules, names_of
from polyamp_tensorflow.step.kernels import Update, kernel
from polyamp_tensorflow.step.optimizer_checks import check_built_for, check_recipe_optimizer
from polyamp_tensorflow.step.replicas import check_replicated


@keras.saving.register_keras_serializable(package="polyamp")
class SpecOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras is untyped
    """A Keras optimizer that runs a polyamp spec: PyTorch's formulas, for `model.compile` and loops of one's own.

    Slots are float32, or float64 for float64 parameters. Sparse gradients are applied as the dense ones they stand
    for. A parameter whose gradient is None stays as it is with its slots, and bias correction counts the updates that
    it took (S23); a schedule counts the optimizer's. It is saved in `.keras` files; import polyamp_tensorflow before
    loading one.

    Args:
        spec: one of polyamp's optimizer specs.
        groups: a spec with parameter groups, resolved against the variables that it is built for, in their order (S27).
            `polyamp.init` and `polyamp_tensorflow.compile` give it; an optimizer alone does not know a model's paths.

    Attributes:
        spec: as given.
        groups: as given; one for all variables where the spec has no groups.
        missed_updates: by parameter, how many updates left it alone; int32 vector, None before `build`.

    Raises:
        RecipeError: anything else; or a spec with groups that are not resolved.

    Example:
        >>> import keras, polyamp, polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> optimizer = polyamp_tensorflow.SpecOptimizer(polyamp.adam(1e-3, eps=1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> optimizer.get_config()["spec"]["eps"]
        0.001
    """

    def __init__(self, spec: Any, name: str | None = None, *, groups: Members | None = None) -> None:
        if not is_spec(spec):
            raise RecipeError(
                f"spec must be one of polyamp's specs ({', '.join(s.__name__.lower() for s in SPECS)}), such as "
                f"polyamp.adamw(1e-3). Received: spec={spec!r}."
            )
        if spec.groups and groups is None:
            raise RecipeError(
                "spec has parameter groups, which name parameters by their paths in a model, and an optimizer alone "
                "knows no model. Use polyamp_tensorflow.compile(model, recipe, loss=...), or polyamp.init and "
                "polyamp.train_step."
            )
        rate = spec.learning_rate
        super().__init__(learning_rate=_SpecSchedule(spec) if callable(rate) else float(rate), name=name)
        self.spec = spec
        self.groups = Members([Member(spec)], {}) if groups is None else groups
        self.missed_updates: Any = None
        self._kernels: list[Update | None] | None = None
        self._counts: Any = None
        self._exact_rate: Any = None

    def build(self, variables: list[Any]) -> None:
        """Create the slots: float32, or float64 for float64 parameters; and what counts missed updates."""
        if self.built:
            return
        super().build(variables)
        self._slots = [
            {
                slot: self.add_variable(
                    shape=variable.shape,
                    initializer=keras.initializers.Constant(self._member(index).spec.initial(slot)),
                    dtype=at_least_float32(variable.dtype).name,
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
        """One update of the parameters that have a gradient; what they share is computed once."""
        if not self.built and trainable_variables is not None:
            with keras.name_scope(self.name):
                self.build(list(trainable_variables))
        grads = list(grads)
        if not grads:
            return
        variables = list(own_trainable(self) if trainable_variables is None else trainable_variables)
        self._counts = self._update_counts()
        rate, counts = (tf.cast(raw(value), tf.float32) for value in (self.learning_rate, self._counts))
        self._exact_rate = self._rate_in_float64(rate) if tf.float64 in map(_dtype, variables) else None
        self._kernels = [kernel(m.spec, self._rate(m, rate), counts) for m in self.groups.distinct]
        try:
            super().apply(grads, variables)
        finally:
            self._kernels = self._counts = self._exact_rate = None
        used = {index_in(self, v) for g, v in zip(grads, variables, strict=True) if g is not None}
        if len(used) < len(self._slots):
            self.missed_updates.assign_add([int(index not in used) for index in range(len(self._slots))])

    def _number(self, index: int) -> int:
        """Which set of hyperparameters the parameter at an index has."""
        return 0 if self.groups.alike else self.groups.order[index]

    def _member(self, index: int) -> Member:
        return self.groups.distinct[self._number(index)]

    def _rate(self, member: Member, rate: Any) -> Any:
        """A member's rate where the optimizer's own is `rate`."""
        if member.own_rate:
            return member.rate(tf.cast(raw(self.iterations), rate.dtype), XP)
        return rate if member.scale == 1.0 else rate * member.scale

    def _rate_in_float64(self, rate: Any) -> Any:
        """The rate for float64 parameters (S1): the schedule's in float64, or the very number of the spec, which
        Keras's variable holds in float32, unless another was assigned to that."""
        spec = self.spec
        if callable(spec.learning_rate):
            return spec.rate(tf.cast(raw(self.iterations), tf.float64), XP)
        own = tf.constant(spec.learning_rate, tf.float64)
        return tf.where(rate == tf.cast(own, rate.dtype), own, tf.cast(rate, tf.float64))

    def _update_counts(self) -> Any:
        """By index of the parameter, which of its updates the next one is, from 1."""
        return raw(self.iterations) + 1 - tf.cast(raw(self.missed_updates), raw(self.iterations).dtype)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one parameter, computed in the slots' dtype; only the result is rounded to the parameter's."""
        index = index_in(self, variable)
        slots = self._slots[index]
        work = at_least_float32(variable.dtype)
        member = self._member(index)
        own = None if self._kernels is None else self._kernels[self._number(index)]
        if own is not None and tf.as_dtype(variable.dtype) == work == tf.float32:
            gradient = tf.cast(dense(gradient, variable), work)
            own(index, raw(variable), gradient, {name: raw(slot) for name, slot in slots.items()})
            return
        counts = self._update_counts() if self._counts is None else self._counts
        rate = tf.cast(raw(learning_rate), work)
        if work == tf.float64:
            rate = self._rate_in_float64(raw(learning_rate)) if self._exact_rate is None else self._exact_rate
        new, new_slots = member.spec.update(
            XP,
            tf.cast(raw(variable), work),
            tf.cast(dense(gradient, variable), work),
            {name: tf.convert_to_tensor(raw(slot)) for name, slot in slots.items()},
            self._rate(member, rate),
            tf.cast(counts[index], work),
        )
        self.assign(variable, new)
        for name, value in new_slots.items():
            self.assign(slots[name], value)

    def load_own_variables(self, store: Any) -> None:
        """Keras's, and also from files written before missed updates were counted."""
        load_without(self, store, [(self.missed_updates, 0)] if self.built else [])

    def named_slots(self, parameters: list[str]) -> dict[str, Any]:
        """`<parameter>/<slot>` -> variable."""
        return {
            f"{name}/{slot}": variable
            for name, slots in zip(parameters, self._slots, strict=True)
            for slot, variable in slots.items()
        }

    def get_config(self) -> dict[str, Any]:
        """The name and the spec as a table, as a recipe file has it; and which variable is in which group."""
        config = {"name": self.name, "spec": plain(self.spec)}
        if self.groups.plain and not self.spec.groups:
            return config
        distinct = [{**member._asdict(), "spec": plain(member.spec)} for member in self.groups.distinct]
        return {**config, "groups": {"distinct": distinct, "numbers": dict(self.groups.numbers)}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SpecOptimizer:
        """The optimizer that `get_config` described.

        Raises:
            RecipeError: the table is not a spec's.
        """
        try:
            spec = convert(config["spec"], OptimizerSpec)
            found, groups = config.get("groups"), None
            if found is not None:
                distinct = [Member(**{**m, "spec": convert(m["spec"], OptimizerSpec)}) for m in found["distinct"]]
                groups = Members(distinct, found["numbers"])
        except msgspec.ValidationError as error:
            raise RecipeError(f"the config of a SpecOptimizer: {error}") from error
        return cls(spec, name=config.get("name"), groups=groups)


def _dtype(variable: Any) -> Any:
    return tf.as_dtype(variable.dtype)


class _SpecSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # Keras is untyped
    """The learning rate of a spec as Keras's optimizers ask for it."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, step: Any) -> Any:
        return self.spec.rate(tf.cast(raw(step), tf.float32), XP)

    def get_config(self) -> dict[str, Any]:
        return {"spec": plain(self.spec)}


def load_without(optimizer: Any, store: Any, later: list[tuple[Any, int]]) -> None:
    """`keras.optimizers.Optimizer.load_own_variables`, for files too that were written before some variables existed.

    Args:
        optimizer: the optimizer.
        store: index -> array, in the order of `optimizer.variables`.
        later: the variables that an older file does not hold, and what they are filled with then.
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


def groups_of(model: Any, recipe: Recipe, parameters: Mapping[str, Any]) -> Members:
    """The recipe's optimizer, resolved against a model's parameters.

    Raises:
        RecipeError, PolicyError: a group, a kind or an alias that does not fit the model.
    """
    return members(
        recipe,
        parameters,
        lambda: leaves_of(model, parameters),
        backend="tensorflow",
        modules=lambda: itertools.chain.from_iterable(names_of(modules(model)).values()),
    )


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Any], groups: Members) -> Any:
    """The recipe's optimizer, built for these parameters.

    Args:
        recipe: the recipe.
        parameters: path -> variable.
        groups: what `groups_of` returned.

    Raises:
        RecipeError: a native optimizer that serves another model, or whose members scale or accumulate.
        LossScaleError, UnsupportedError: one that cannot work on the present strategy's replicas.
    """
    optimizer = SpecOptimizer(recipe.optimizer, groups=groups) if is_spec(recipe.optimizer) else recipe.optimizer
    check = functools.partial(check_recipe_optimizer, clip_norm=recipe.clip_norm)
    build_optimizer(optimizer, list(parameters.values()), check)
    return optimizer


def build_optimizer(optimizer: Any, variables: list[Any], check: Callable[[Any], None]) -> None:
    """Build a Keras optimizer for these variables, and look at it before and, when its members are known, after.

    Args:
        optimizer: not built, or built for just these variables.
        variables: what it will update.
        check: raises for settings that it must not have.

    Raises:
        RecipeError: it serves another model; and what `check` raises.
        LossScaleError, UnsupportedError: it cannot work on the present strategy's replicas.
    """

    def look() -> None:
        check(optimizer)
        check_replicated(optimizer)
        check_built_for(optimizer, variables)

    look()
    if not optimizer.built:
        optimizer.build(variables)
        look()


def optimizer_variables(optimizer: Any, parameters: list[str]) -> dict[str, Any]:
    """The optimizer's variables by names that do not depend on what else the process has built."""
    if not isinstance(optimizer, SpecOptimizer):
        return {f"{number:04d}": variable for number, variable in enumerate(optimizer.variables)}
    named = {"iteration": optimizer.iterations, "missed_updates": optimizer.missed_updates}
    named |= optimizer.named_slots(parameters)
    if not callable(optimizer.spec.learning_rate):
        named["learning_rate"] = optimizer.learning_rate
    return named
