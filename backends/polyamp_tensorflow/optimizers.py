"""The optimizer of a recipe as a Keras optimizer: polyamp's specs with PyTorch's formulas, or the user's own.

Keras's Adam folds the bias correction into the step size before epsilon and its weight decay is always decoupled, so
a spec runs its own `update` over tensors instead of `keras.optimizers.Adam`. Called by the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import keras
import msgspec
import tensorflow as tf

from polyamp.errors import LossScaleError, RecipeError
from polyamp.optimizers import SPECS, OptimizerSpec, is_spec
from polyamp.recipe import Recipe
from polyamp_tensorflow.arrays import XP, dense, raw
from polyamp_tensorflow.kernels import Update, kernel

_KNOBS: Final = {
    "clipnorm": "Recipe(clip_norm=...), the norm over all gradients",
    "clipvalue": "Recipe(clip_norm=...), the norm over all gradients",
    "global_clipnorm": "Recipe(clip_norm=...)",
    "gradient_accumulation_steps": "Recipe(accumulate_steps=...)",
    "loss_scale_factor": "Recipe(scaler=polyamp.LossScaler.static(...))",
}
"""Settings of Keras's optimizers that would act a second time on what the step does itself -> what replaces them."""


@keras.saving.register_keras_serializable(package="polyamp")
class SpecOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras is untyped
    """A Keras optimizer that runs a polyamp spec: PyTorch's formulas, for `model.compile` and loops of one's own.

    Slots are float32, or float64 for float64 parameters. Sparse gradients are applied as the dense ones they stand
    for. It is saved in `.keras` files; import polyamp_tensorflow before loading one.

    Args:
        spec: one of polyamp's optimizer specs.

    Raises:
        RecipeError: anything else.

    Example:
        >>> import keras, polyamp, polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> optimizer = polyamp_tensorflow.SpecOptimizer(polyamp.adam(1e-3, eps=1e-3))
        >>> model.compile(optimizer, loss="mse")
        >>> optimizer.get_config()["spec"]["eps"]
        0.001
    """

    def __init__(self, spec: Any, name: str | None = None) -> None:
        if not is_spec(spec):
            raise RecipeError(
                f"spec must be one of polyamp's specs ({', '.join(s.__name__.lower() for s in SPECS)}), such as "
                f"polyamp.adamw(1e-3). Received: spec={spec!r}."
            )
        rate = spec.learning_rate
        super().__init__(learning_rate=_SpecSchedule(spec) if callable(rate) else float(rate), name=name)
        self.spec = spec
        self._kernel: Update | None = None

    def build(self, variables: list[Any]) -> None:
        """Create the slots: float32, or float64 for float64 parameters."""
        if self.built:
            return
        super().build(variables)
        self._slots = [
            {
                slot: self.add_variable(
                    shape=variable.shape,
                    initializer=keras.initializers.Constant(self.spec.initial(slot)),
                    dtype=_work_dtype(variable).name,
                    name=slot,
                )
                for slot in self.spec.slots
            }
            for variable in variables
        ]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """One update of all parameters; what they share is computed once."""
        count = tf.cast(raw(self.iterations), tf.float32) + 1.0
        self._kernel = kernel(self.spec, tf.cast(raw(self.learning_rate), tf.float32), count)
        try:
            super().apply(grads, trainable_variables)
        finally:
            self._kernel = None

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One update of one parameter, computed in the slots' dtype; only the result is rounded to the parameter's."""
        slots = self._slots[self._get_variable_index(variable)]
        work = _work_dtype(variable)
        if self._kernel is not None and tf.as_dtype(variable.dtype) == work == tf.float32:
            gradient = tf.cast(dense(gradient, variable), work)
            self._kernel(raw(variable), gradient, {name: raw(slot) for name, slot in slots.items()})
            return
        new, new_slots = self.spec.update(
            XP,
            tf.cast(raw(variable), work),
            tf.cast(dense(gradient, variable), work),
            {name: tf.convert_to_tensor(raw(slot)) for name, slot in slots.items()},
            tf.cast(raw(learning_rate), work),
            tf.cast(raw(self.iterations), work) + 1.0,
        )
        self.assign(variable, new)
        for name, value in new_slots.items():
            self.assign(slots[name], value)

    def named_slots(self, parameters: list[str]) -> dict[str, Any]:
        """`<parameter>/<slot>` -> variable."""
        return {
            f"{name}/{slot}": variable
            for name, slots in zip(parameters, self._slots, strict=True)
            for slot, variable in slots.items()
        }

    def get_config(self) -> dict[str, Any]:
        """The name and the spec as a table, as a recipe file has it."""
        return {"name": self.name, "spec": msgspec.to_builtins(self.spec)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SpecOptimizer:
        """The optimizer that `get_config` described.

        Raises:
            RecipeError: the table is not a spec's.
        """
        try:
            spec = msgspec.convert(config["spec"], OptimizerSpec)
        except msgspec.ValidationError as error:
            raise RecipeError(f"the config of a SpecOptimizer: {error}") from error
        return cls(spec, name=config.get("name"))


class _SpecSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # Keras is untyped
    """The learning rate of a spec as Keras's optimizers ask for it."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, step: Any) -> Any:
        return self.spec.rate(tf.cast(raw(step), tf.float32), XP)

    def get_config(self) -> dict[str, Any]:
        return {"spec": msgspec.to_builtins(self.spec)}


def make_optimizer(recipe: Recipe, parameters: Mapping[str, Any]) -> Any:
    """The recipe's optimizer, built for these parameters.

    Raises:
        RecipeError: a native optimizer that serves another model.
    """
    optimizer = SpecOptimizer(recipe.optimizer) if is_spec(recipe.optimizer) else recipe.optimizer
    variables = list(parameters.values())
    if not optimizer.built:
        optimizer.build(variables)
        return optimizer
    known = {id(raw(variable)) for variable in optimizer._trainable_variables}
    if known != {id(raw(variable)) for variable in variables}:
        raise RecipeError(
            f"optimizer: this {type(optimizer).__qualname__} is already built for the variables of another model. "
            "Make a new optimizer for each model, or use one of polyamp's specs, which can be shared."
        )
    return optimizer


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that is not Keras's or that would scale, clip or accumulate by itself (S20).

    Raises:
        LossScaleError: a `LossScaleOptimizer`, which would scale a second time.
        RecipeError: another framework's optimizer, or a setting that the recipe has its own field for.
    """
    if is_spec(optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise LossScaleError(
            "optimizer: a keras LossScaleOptimizer in a recipe is a scaler wrapped twice, because polyamp scales the "
            "loss itself. Pass its inner_optimizer, and choose the scale with Recipe(scaler=polyamp.LossScaler(...))."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise RecipeError(
            "optimizer must be one of polyamp's specs or a keras.optimizers.Optimizer. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    for knob, instead in _KNOBS.items():
        value = getattr(optimizer, knob, None)
        if value is not None:
            raise RecipeError(
                f"optimizer: {type(optimizer).__qualname__}({knob}={value!r}) would act before polyamp's finite check "
                f"or on scaled gradients. Leave it unset and use {instead} instead."
            )


def check_inner_optimizer(optimizer: Any, clip_norm: float | None) -> None:
    """Refuse an optimizer that cannot stand inside a `LossScaleOptimizer` (S20).

    Raises:
        LossScaleError: a scaler wrapped twice, or a `loss_scale_factor`.
        RecipeError: not a Keras optimizer, or a setting that would act a second time.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise LossScaleError(
            "optimizer: a LossScaleOptimizer inside another is a scaler wrapped twice. Pass its inner_optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise RecipeError(
            "optimizer must be a keras.optimizers.Optimizer or one of polyamp's specs. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    for member in [optimizer, *getattr(optimizer, "optimizers", ())]:
        name = type(member).__qualname__
        if member.loss_scale_factor is not None:
            raise LossScaleError(
                f"optimizer: {name}(loss_scale_factor={member.loss_scale_factor!r}) inside a LossScaleOptimizer is a "
                "scaler wrapped twice. Leave it unset; LossScaler.static(...) gives a constant scale."
            )
        if member.gradient_accumulation_steps is not None:
            raise RecipeError(
                f"optimizer: {name}(gradient_accumulation_steps={member.gradient_accumulation_steps!r}) would count "
                "micro-batches as updates. Leave it unset and use LossScaleOptimizer(accumulate_steps=...) instead."
            )
        if clip_norm is not None and member.global_clipnorm is not None:
            raise RecipeError(
                f"optimizer: {name}(global_clipnorm={member.global_clipnorm!r}) and clip_norm={clip_norm!r} both clip "
                "by the global norm. Leave one of them unset."
            )


def optimizer_variables(optimizer: Any, parameters: list[str]) -> dict[str, Any]:
    """The optimizer's variables by names that do not depend on what else the process has built."""
    if not isinstance(optimizer, SpecOptimizer):
        return {f"{number:04d}": variable for number, variable in enumerate(optimizer.variables)}
    named = {"iteration": optimizer.iterations, **optimizer.named_slots(parameters)}
    if not callable(optimizer.spec.learning_rate):
        named["learning_rate"] = optimizer.learning_rate
    return named


def _work_dtype(variable: Any) -> Any:
    return tf.float64 if tf.as_dtype(variable.dtype) == tf.float64 else tf.float32
