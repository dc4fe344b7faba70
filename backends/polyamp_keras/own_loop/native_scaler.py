"""`LossScaleOptimizer` of Keras on torch and JAX: a Keras optimizer with polyamp's rules, for `fit` and custom loops.

scale_loss(loss)     float32 first, then times the scale (S6)
apply(gradients)     [sum over micro-batches] -> unscale -> norm and finite flag -> clip -> the inner optimizer
                     -> scale adjustment  (S8 to S15)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from polyamp.errors import GradientError, LossScaleError
from polyamp.rules.step_checks import check_any_gradient, check_loss
from polyamp_keras.arrays import at_least_float32, dtype_name, is_floating, native_variable, read_value, variable_name
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.variables import statistics_variables
from polyamp_keras.own_loop.optimizer_update import apply_or_accumulate
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.own_loop.scaler_state import ApplyCall
from polyamp_keras.precision.output_casts import warn_narrow_loss


@keras.saving.register_keras_serializable(package="polyamp", name="LossScaleOptimizer")
class KerasLossScaleOptimizer(ScaledOptimizer):
    """Wrapper of a Keras optimizer that scales the loss, and unscales, checks and clips the gradients.

    It is `polyamp_keras.LossScaleOptimizer` where Keras runs on torch or JAX, and a
    `keras.optimizers.LossScaleOptimizer`, so that `model.compile` does not wrap it again. A step with non-finite
    gradients does not change the inner optimizer (moments, count, schedule, moving average) or the parameters (decay,
    constraints). `keep_statistics` does the same for running statistics. It adds no wait for the device to a step.

    Args:
        inner_optimizer: a Keras optimizer or one of polyamp's specs. Its `clipnorm`, `clipvalue` or `global_clipnorm`
            act on the unscaled gradients.
        initial_scale: a `polyamp.LossScaler`, "dynamic", "off" or a preset's name; or, as in Keras, the first scale.
        dynamic_growth_steps: as in Keras, the finite steps before the scale grows. With either of Keras's numbers the
            scaler is `LossScaler.like("keras")`.
        name: name of the optimizer, as in Keras.
        scaler: the scaler, as a keyword.
        clip_norm, clip_value, clip_eps: limits of the unscaled gradients (S11), as in `polyamp.Recipe`.
        accumulate_steps: calls of `apply` per update (S8). Between updates only the sum of gradients changes.
        **options: arguments that Keras's wrapper accepts for older files; only their defaults are allowed.

    Attributes:
        scaler, clip_norm, clip_value, clip_eps, accumulate_steps: as given; the scaler as a `LossScaler`.
        initial_scale, dynamic_growth_steps: the scaler's first scale and growth interval.
        dynamic_scale: the scale, float32 scalar variable; `step_counter`: the finite steps since it grew.

    Raises:
        LossScaleError: a scaler wrapped twice, an inner `loss_scale_factor`, or a scaler and Keras's numbers.
        RecipeError: an impossible value, or a setting of the inner optimizer that would act a second time.

    Example:
        >>> import keras, polyamp
        >>> from polyamp_keras import LossScaleOptimizer
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> scaler = polyamp.LossScaler(init_scale=1024.0)
        >>> optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), scaler, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> _ = model.fit(keras.ops.full((4, 2), float("inf")), keras.ops.zeros((4, 1)), verbose=0)
        >>> float(optimizer.dynamic_scale), optimizer.skipped_steps, int(optimizer.iterations)
        (512.0, 1, 0)
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scaled = False  # whether `scale_loss` was called since the last `apply`, or ever in a trace
        self._starts: list[Any] = []  # statistics at the start of an accumulation, and whether they are known
        self._start_known: Any = None
        self._running: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    # Running statistics (S12).

    def prepare_statistics(self, model: Any) -> None:
        """Create the variables that running statistics need with `accumulate_steps`. They are not saved.

        Raises:
            ModelError: the model is not built.
        """
        running = self._running[model] = list(statistics_variables(model).pass_updated_variables.values())
        shapes, known = ([tuple(each.shape) for each in variables] for variables in (running, self._starts))
        if self.accumulate_steps == 1 or (shapes == known and self._start_known is not None):
            return
        with keras.name_scope(self.name):
            self._start_known = keras.Variable(0, dtype="int32", trainable=False, name="window_start_known")
            zeros = [keras.ops.zeros(each.shape, each.dtype) for each in running]
            self._starts = [keras.Variable(zero, trainable=False, name="window_start") for zero in zeros]

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables, the inner optimizer's, the statistics at the start of an accumulation, and in a
        step that a monitor reads its figures."""
        known = [] if self._start_known is None else [self._start_known, *self._starts]
        return [*super().variables, *known, *([] if self.figures is None else self.figures.variables)]

    def save_own_variables(self, store: Any) -> None:
        """Save the variables as in Keras, without the statistics at the start of an accumulation."""
        for index, variable in enumerate(super().variables):
            store[str(index)] = keras.ops.convert_to_numpy(read_value(variable))

    def load_own_variables(self, store: Any) -> None:
        """Load the variables as in the base class. The statistics at the start of an accumulation are then unknown."""
        known, self._start_known = self._start_known, None
        try:
            super().load_own_variables(store)
        finally:
            self._start_known = known
        if known is not None:
            known.assign(0)

    def settle_statistics(
        self, before: Sequence[Any], after: Sequence[Any], places: Sequence[int] | None = None
    ) -> list[Any]:
        """Return the running statistics after `apply`: those of the forward pass, or after a skipped update the values
        from before it; in an accumulation, from before its first micro-batch.

        Args:
            before, after: the statistics before and after the forward pass, tensors in the same order.
            places: their indices among `running_statistics`; None for all of them.
        """
        old = list(before)
        if self.accumulate_steps > 1:
            begins = keras.ops.equal(native_variable(self._state.micro_step), 1)
            begins = begins | keras.ops.equal(native_variable(self._start_known), 0)
            starts = self._starts if places is None else [self._starts[place] for place in places]
            for start, value in zip(starts, before, strict=True):
                start.assign(keras.ops.where(begins, value, native_variable(start)))
            self._start_known.assign(1)
            old = [native_variable(start) for start in starts]
        skipped = self.update_was_skipped
        return [keras.ops.where(skipped, first, last) for first, last in zip(old, after, strict=True)]

    @contextlib.contextmanager
    def keep_statistics(self, model: Any) -> Iterator[None]:
        """Context manager around one forward pass and its `apply` that restores running statistics after a skipped
        update.

        Variables that the forward pass writes, such as BatchNorm's moving mean, get their values from the start of the
        block or of the accumulation. Random seeds are not restored. In a JAX loop of `stateless_call` and
        `stateless_apply`, use `stateless_keep_statistics`.

        Args:
            model: a built Keras model or layer.

        Raises:
            ModelError: the model is not built.
        """
        if model not in self._running:
            self.prepare_statistics(model)
        running = self._running[model]
        before = [ENGINE.copy_value(variable) for variable in running]
        try:
            yield
        except BaseException:
            for variable, value in zip(running, before, strict=True):
                variable.assign(value)
            raise
        after = [native_variable(variable) for variable in running]
        with ENGINE.no_gradients():
            for variable, value in zip(running, self.settle_statistics(before, after), strict=True):
                variable.assign(value)

    def stateless_keep_statistics(
        self, model: Any, before: Sequence[Any], after: Sequence[Any], optimizer_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return a model's non-trainable variables after `stateless_apply`: those from before a skipped update.

        Random seeds keep their new values.

        Args:
            model: the model; `prepare_statistics(model)` must have been called if `accumulate_steps` is above 1.
            before: `model.non_trainable_variables` as values before `stateless_call`.
            after: those that `stateless_call` returned.
            optimizer_variables: those that `stateless_apply` returned.

        Returns:
            The non-trainable variables and the optimizer's variables, lists of values in the same order.

        Example:
            >>> import keras, polyamp
            >>> from polyamp_keras import LossScaleOptimizer
            >>> model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
            >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=8.0))
            >>> optimizer.build(model.trainable_variables)
            >>> weights, before, state = [
            ...     [v.value for v in each]
            ...     for each in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
            ... ]
            >>> _, after = model.stateless_call(weights, before, keras.ops.full((4, 2), float("inf")), training=True)
            >>> infinite = [keras.ops.full_like(weight, float("inf")) for weight in weights]
            >>> _ = optimizer.scale_loss(keras.ops.ones(()))
            >>> weights, state = optimizer.stateless_apply(state, infinite, weights)
            >>> statistics, state = optimizer.stateless_keep_statistics(model, before, after, state)
            >>> [bool(keras.ops.all(keras.ops.isfinite(each))) for each in statistics]
            [True, True]
        """
        if model not in self._running:
            self.prepare_statistics(model)
        places = {id(variable): place for place, variable in enumerate(model.non_trainable_variables)}
        numbers = [number for number, variable in enumerate(self._running[model]) if id(variable) in places]
        own = [places[id(self._running[model][number])] for number in numbers]
        variables, result = self.variables, list(after)
        with keras.StatelessScope(state_mapping=list(zip(variables, optimizer_variables, strict=True))) as scope:
            settled = self.settle_statistics([before[n] for n in own], [after[n] for n in own], numbers)
        for place, value in zip(own, settled, strict=True):
            result[place] = value
        return result, [scope.get_current_value(variable) for variable in variables]

    # The two halves of a step.

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss in float32, times the scale.

        Args:
            loss: floating. A loss in 16 bits causes a warning, since it was computed in 16 bits. For a loss that is not
                a scalar, the gradient is that of its sum, as in Keras.

        Raises:
            LossError: not floating.
        """
        self._scaled = True
        loss = keras.ops.convert_to_tensor(native_variable(loss))
        if self.figures is not None and ENGINE.LOSS_REACHES_APPLY:
            self.figures.see_loss(loss)
        warn_narrow_loss(dtype_name(loss), stacklevel=3)
        check_loss((), dtype_name(loss), what="what calls scale_loss()")
        wide, share = keras.ops.cast(loss, "float32"), self.current_share()
        if self.scaler.scales:
            wide = wide * native_variable(self.dynamic_scale)
        return wide if share is None else wide * share.weight

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale, check and clip gradients of the scaled loss, and update unless one of them is not finite.

        Args:
            grads: one gradient per variable, floating; None is accepted. A variable whose gradient is None at all
                `accumulate_steps` calls, and its state in the inner optimizer, do not change (S23); a None at only some
                calls counts as 0.
            trainable_variables: the variables; None for those of `build`.

        Raises:
            LossScaleError: `scale_loss` was not called.
            GradientError: no gradients, one that is not floating, or not one per variable.
        """
        grads, variables = self.match_gradients(grads, trainable_variables)
        traced = any(ENGINE.is_traced(gradient) for gradient in grads)
        if self.scaler.scales and not self._scaled:
            raise LossScaleError(
                "apply() was called, but scale_loss() was not since the last update: dividing by the scale would "
                "shrink correct gradients. Differentiate scaled = optimizer.scale_loss(loss), once for each apply()."
            )
        self._scaled = self._scaled and traced
        check_any_gradient(grads, who="apply()", then="The loss depends on none of the trainable variables.")
        with ENGINE.no_gradients():
            self._apply(grads, variables)
        if not traced and self._watch.is_due(self.scaler, per_update=self.accumulate_steps):
            self.raise_if_stuck()

    def _apply(self, grads: list[Any], variables: list[Any]) -> None:
        unused = [variable for gradient, variable in zip(grads, variables, strict=True) if gradient is None]
        pairs = list(zip(grads, variables, strict=True))
        if self.accumulate_steps > 1:  # a variable without a gradient now may have had one earlier
            pairs = [(keras.ops.zeros(v.shape, at_least_float32(v)) if g is None else g, v) for g, v in pairs]
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        wide = []
        for gradient, variable in pairs:
            if not is_floating(gradient):
                raise GradientError(
                    f"gradients must be floating tensors. Received: {gradient!r} for {variable_name(variable)}."
                )
            dtype = at_least_float32(gradient)
            wide.append(gradient if dtype_name(gradient) == dtype else keras.ops.cast(gradient, dtype))
        used = [variable for _, variable in pairs]
        apply_or_accumulate(ApplyCall(self, self._state, self.current_share(), used, variables, unused), wide)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Return the trainable variables and the optimizer's variables after `apply`, as values; nothing is written.

        For a loop on JAX: see `stateless_keep_statistics` for the model's other variables.

        Args:
            optimizer_variables: values of `optimizer.variables`, in order.
            grads: one gradient per variable of `build`.
            trainable_variables: values of the variables of `build`, in order.
        """
        return keras.optimizers.Optimizer.stateless_apply(self, optimizer_variables, grads, trainable_variables)
