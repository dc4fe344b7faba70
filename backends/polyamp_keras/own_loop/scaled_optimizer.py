"""Base class of the `LossScaleOptimizer`s: arguments, variables, state and files, alike on every Keras backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from polyamp.errors import GradientError, RecipeError
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.clip_limits import ClipLimits, clip_arguments
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.rules.stuck_scale import StuckScaleMonitor, check_stuck
from polyamp_keras.arrays import at_least_float32, native_variable, read_value
from polyamp_keras.compat import check_optimizer_variables, own_trainable_variables
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.fit_figures import FitFigures
from polyamp_keras.own_loop.native_loss_scale_optimizer import (
    adopt_keras_scale,
    check_scaler_options,
    is_keras_wrapper_file,
    keras_numbers,
    load_from_keras,
    pop_inner_optimizer,
    scaler_from_arguments,
)
from polyamp_keras.own_loop.optimizer_checks import (
    check_built_for,
    check_inner_optimizer,
    check_scaled_variables,
    warn_about_average,
)
from polyamp_keras.own_loop.scaler_state import MicroBatchShare, ScalerState, micro_batch_share
from polyamp_keras.own_loop.skip_report import non_finite_names
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer, build_optimizer, load_older_variables

_Base: Any = keras.optimizers.LossScaleOptimizer


class ScaledOptimizer(_Base):  # type: ignore[misc]  # Keras is untyped
    """What the `LossScaleOptimizer`s of all Keras backends share. Their own part is a step: `scale_loss` and `apply`.

    A subclass documents the arguments.
    """

    def __init__(
        self,
        inner_optimizer: Any = None,
        initial_scale: float | LossScaler | str | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        scaler: LossScaler | str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        clip_eps: float = 0.0,
        accumulate_steps: int = 1,
        **options: Any,
    ) -> None:
        given = pop_inner_optimizer(inner_optimizer, options)
        check_scaler_options(options)
        scaler = scaler_from_arguments(initial_scale, dynamic_growth_steps, scaler)
        limits = ClipLimits(clip_norm, clip_value, clip_eps)
        values: Any = {"scaler": scaler, "accumulate_steps": accumulate_steps, **clip_arguments(limits)}
        Recipe(policy="mixed_float16", **values)  # a recipe checks them
        inner = SpecOptimizer(given) if is_spec(given) else given
        check_inner_optimizer(inner, clip_norm)
        super().__init__(inner, initial_scale=scaler.init_scale, dynamic_growth_steps=scaler.growth_interval, name=name)
        self.scaler, self.accumulate_steps = scaler, accumulate_steps
        self.clip_norm, self.clip_value, self.clip_eps = limits
        start = LossScaleState(scaler.init_scale, 0, scaler.hysteresis, 0, 0)
        scale = LossScaleState(*(self._scalar(field, value) for field, value in start._asdict().items()))
        self.dynamic_scale, self.step_counter = scale[:2]  # Keras's names for them
        # In files the variables are numbered in the order of their creation.
        self._state = ScalerState(scale, self._scalar("last_update_skipped", 0), self._scalar("micro_step", 0))
        self._rows: Any = None  # of the current micro-batch; None if it counts as one
        self._watch = StuckScaleMonitor()
        self.figures: FitFigures | None = None  # while a step of `fit` that a monitor reads is run, or traced

    def _scalar(self, name: str, value: float) -> Any:
        dtype = "float32" if name == "scale" else "int32"
        return self.add_variable((), keras.initializers.Constant(value), dtype, name=name)

    def check_inner(self, optimizer: Any) -> None:
        """Raise for an inner optimizer that scales, accumulates or clips a second time."""
        check_inner_optimizer(optimizer, self.clip_norm)

    def build(self, var_list: Any) -> None:
        """Create the inner optimizer's variables, and those for accumulation.

        Raises:
            RecipeError: it or the inner optimizer is built for other variables; a member of the inner one (of a
                `keras.optimizers.MultiOptimizer`) has a setting that would act a second time.
            LossScaleError: float16 parameters with a scaler that scales; created outside the strategy's scope.
            UnsupportedError: variables that are overwritten by their gradients (float8); a setting that Keras does not
                support on several replicas.
        """
        variables = list(var_list)
        if self.built:
            check_built_for(self, variables)
            return
        check_scaled_variables(variables, self.scaler)
        build_optimizer(self.inner_optimizer, variables, self.check_inner)
        warn_about_average(self.inner_optimizer, self.accumulate_steps)
        keras.optimizers.Optimizer.build(self, variables)  # not the parent's, which adds its own scale
        state = self._state
        state.not_finite = self.add_variable((len(variables),), "zeros", "int32", name="not_finite")
        if self.accumulate_steps > 1:
            state.used = self.add_variable((len(variables),), "zeros", "int32", name="used_in_window")
            state.rows = self.add_variable((2,), "zeros", "float32", name="window_rows")
            state.sums = [
                self.add_variable(variable.shape, "zeros", at_least_float32(variable), name="gradient_sum")
                for variable in variables
            ]

    # State.

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state as tensors: float32 scale, int32 counters."""
        return LossScaleState(*(read_value(variable) for variable in self._state.scale))

    @property
    def scale_variables(self) -> LossScaleState:
        """The variables of the loss-scale state."""
        return self._state.scale

    @property
    def clip(self) -> ClipLimits:
        """The limits of the unscaled gradients."""
        return ClipLimits(self.clip_norm, self.clip_value, self.clip_eps)

    @property
    def skipped_steps(self) -> int:
        """Number of skipped updates. Reading it waits for the device."""
        return int(keras.ops.convert_to_numpy(read_value(self._state.scale.skipped)))

    @property
    def micro_step(self) -> Any:
        """Calls of `apply` since the last update, int32 scalar."""
        return read_value(self._state.micro_step)

    @property
    def update_was_skipped(self) -> Any:
        """Whether the last call of `apply` skipped its update, boolean scalar."""
        return keras.ops.not_equal(native_variable(self._state.skipped), 0)

    @property
    def iterations(self) -> Any:
        """Number of applied updates, as counted by the inner optimizer (S13)."""
        return self.inner_optimizer.iterations

    def not_finite(self) -> list[str]:
        """Return the paths of the parameters with non-finite gradients at the last skipped update."""
        return non_finite_names(self, self._state.not_finite) if self.built else []

    def raise_if_stuck(self) -> None:
        """Check on the host whether every update is skipped at the minimum scale (S17), and act by `scaler.on_stuck`.

        `compile` and eager loops check every `patience` steps; a compiled function of the user cannot.

        Raises:
            LossScaleStuckError: `patience` consecutive updates were skipped at the minimum scale.
        """
        skips = int(keras.ops.convert_to_numpy(read_value(self._state.scale.stuck)))
        check_stuck(skips, self.scaler, self.not_finite, where="the model or the loss")

    @contextlib.contextmanager
    def micro_batch(self, rows: Any) -> Iterator[None]:
        """Context manager around `scale_loss` and `apply` that weights a micro-batch by its rows (S8).

        `fit` uses it (`compile`, `guard`). Without it, and with `accumulate_steps=1`, all
        micro-batches have equal weight.

        Args:
            rows: number of examples in the micro-batch, or the divisor of its loss, over all replicas; a number or a
                scalar tensor.
        """
        if self.accumulate_steps > 1:
            self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def count_micro_batch(self, weight: Any) -> None:
        """Set the weight of the micro-batch in place of its rows. Call it in `micro_batch`, before `scale_loss`.

        Args:
            weight: divisor of its loss over all replicas, float32 scalar; at least 0.
        """
        if self._rows is not None:
            self._rows = weight

    def current_share(self) -> MicroBatchShare | None:
        """Return the share of the current micro-batch in its update; None if all count alike."""
        if self._rows is None:
            return None
        rows = keras.ops.convert_to_tensor(self._rows)
        return micro_batch_share(self._state, keras.ops.cast(rows, "float32"))

    def match_gradients(self, grads: Any, trainable_variables: Any) -> tuple[list[Any], list[Any]]:
        """Return the gradients that `apply` got and their variables; build the optimizer if it is not.

        Raises:
            GradientError: no variables for an optimizer that is not built, or not one gradient per variable.
        """
        grads = list(grads)
        if not self.built:
            if trainable_variables is None:
                raise GradientError("apply() without variables needs build(trainable_variables) first.")
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        variables = own_trainable_variables(self) if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise GradientError(f"apply() got {len(grads)} gradients for {len(variables)} variables.")
        check_optimizer_variables(self, variables)
        return grads, variables

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Call `apply` on pairs, and return the number of applied updates."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(list(grads), list(variables))
        return self.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Call the same method of the inner optimizer, which applies the decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def make_figures(self, model: Any, selection: MonitorSelection) -> FitFigures:
        """Return figures for the steps of a model's `fit` that a monitor reads."""
        return FitFigures(model_variables(model).parameters, selection)

    # Saving.

    def load_own_variables(self, store: Any) -> None:
        """Load the variables as in Keras; also from files of Keras's own wrapper around the same kind of optimizer, and
        from older files without the record of used parameters.
        """
        inner = self.inner_optimizer
        if self.built and not isinstance(inner, SpecOptimizer) and is_keras_wrapper_file(store, inner):
            load_from_keras(store, inner, self.scaler, self._state.scale)
            return
        rows = [(self._state.rows, 0)] if self._state.sums else []
        later = [(self._state.used, 1)] if self._state.sums else []
        if self.built and isinstance(self.inner_optimizer, SpecOptimizer):
            later.append((self.inner_optimizer.missed_updates, 0))
        only_rows = bool(rows) and len(store.keys()) == len(self.variables) - 1
        load_older_variables(self, store, rows if only_rows else [*rows, *later])

    def get_config(self) -> dict[str, Any]:
        """Return the arguments for `from_config` as plain values."""
        return {
            "name": self.name,
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "scaler": self.scaler.to_dict(),
            "accumulate_steps": self.accumulate_steps,
            **clip_arguments(self.clip),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create an optimizer from a config of this class or of Keras's own."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        if "scaler" in config:
            config["scaler"] = LossScaler(**config["scaler"])
            for name in ("initial_scale", "dynamic_growth_steps"):  # Keras's words for two of its fields
                config.pop(name, None)
        return cls(inner, **config)

    @classmethod
    def from_keras(cls, optimizer: Any, scaler: LossScaler | str | None = None, **settings: Any) -> Any:
        """Create a replacement of a `keras.optimizers.LossScaleOptimizer`, around the same inner optimizer.

        Args:
            optimizer: Keras's wrapper; if it is built, its scale and its count of good steps are copied.
            scaler: the new scaler; None for the constants of Keras's wrapper with polyamp's minimum scale.
            **settings: `clip_norm`, `clip_value`, `clip_eps`, `accumulate_steps`, `name`.

        Raises:
            RecipeError: not Keras's wrapper.
            LossScaleError: its scale is outside the scaler's bounds.

        Example:
            >>> import keras
            >>> from polyamp_keras import LossScaleOptimizer
            >>> theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
            >>> theirs.build([keras.Variable([1.0])])
            >>> ours = LossScaleOptimizer.from_keras(theirs, clip_norm=1.0)
            >>> float(ours.dynamic_scale), ours.inner_optimizer is theirs.inner_optimizer
            (64.0, True)
        """
        if not isinstance(optimizer, _Base) or isinstance(optimizer, ScaledOptimizer):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise RecipeError(f"from_keras takes a keras.optimizers.LossScaleOptimizer. Received: {kind}.")
        numbers = {} if scaler is not None else keras_numbers(optimizer)
        made = cls(optimizer.inner_optimizer, **numbers, scaler=scaler, **{"name": optimizer.name, **settings})
        if optimizer.built:
            made.build(own_trainable_variables(optimizer))
            scale, good = float(optimizer.dynamic_scale), int(optimizer.step_counter)
            adopt_keras_scale(scale, good, made.scaler, made._state.scale)
        return made
