"""`LossScaleOptimizer`, the native scaler: a Keras optimizer with polyamp's rules, for `fit` and custom loops.

scale_loss(loss)     float32 first, then times the scale (S6)
apply(gradients)     sum over replicas -> [sum over micro-batches] -> unscale -> norm and finite flag -> clip
                     -> the inner optimizer under one condition for all replicas -> scale adjustment  (S8 to S15)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import RecipeError, UnsupportedError
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.clip_limits import ClipLimits, clip_arguments
from polyamp.recipe.scaler import LossScaler
from polyamp.rules.step_checks import check_any_gradient, check_options
from polyamp_keras.arrays import native_variable
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.own_loop.scaler_state import ApplyCall
from polyamp_tensorflow.arrays import at_least_float32, to_dense_float32
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.own_loop.tensorflow_only.fit_figures import ReplicaFigures
from polyamp_tensorflow.own_loop.tensorflow_only.optimizer_update import apply_or_accumulate
from polyamp_tensorflow.own_loop.tensorflow_only.running_statistics import (
    CURRENT_STATISTICS,
    ForwardPassStatistics,
    StartValues,
    prepare_statistics,
)
from polyamp_tensorflow.own_loop.tensorflow_only.scale_loss_calls import ScaleLossCalls
from polyamp_tensorflow.step.grad_stats import scale_custom_loop_loss


def native_scaler(scaler: LossScaler, **options: Any) -> LossScaleOptimizer:
    """Return the `LossScaleOptimizer` of a scaler, as `scaler.native("tensorflow")`.

    Args:
        scaler: the scaler.
        **options: `optimizer`, the optimizer to wrap; and `clip_norm`, `clip_value`, `clip_eps`, `accumulate_steps`.

    Raises:
        RecipeError: no optimizer to wrap.
    """
    known = ("optimizer", *clip_arguments(ClipLimits()), "accumulate_steps")
    check_options(options, known, function="native", backend="tensorflow")
    if "optimizer" not in options:
        raise RecipeError(
            "native('tensorflow') wraps a Keras optimizer or one of polyamp's specs. Received: no optimizer. Call "
            "scaler.native('tensorflow', optimizer=keras.optimizers.Adam(1e-3))."
        )
    return LossScaleOptimizer(options.pop("optimizer"), scaler, **options)


class LossScaleOptimizer(ScaledOptimizer):
    """Wrapper of a Keras optimizer that scales the loss, and unscales, checks and clips the gradients.

    It is a `keras.optimizers.LossScaleOptimizer`, so that `model.compile` does not wrap it again. A step with
    non-finite gradients does not change the inner optimizer (moments, count, schedule, moving average) or the
    parameters (decay, constraints). `keep_statistics` does the same for running statistics.

    Args:
        inner_optimizer: a Keras optimizer or one of polyamp's specs. Its `clipnorm`, `clipvalue` or `global_clipnorm`
            act on the unscaled gradients, after the sum over replicas.
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
        >>> from polyamp_tensorflow import LossScaleOptimizer
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
        self._calls = ScaleLossCalls()
        self._starts: weakref.WeakKeyDictionary[Any, StartValues] = weakref.WeakKeyDictionary()

    def check_inner(self, optimizer: Any) -> None:
        """Raise for an inner optimizer that acts a second time, or does not work on the current strategy's replicas."""
        super().check_inner(optimizer)
        replicas.check_replicated(optimizer)

    def build(self, var_list: Any) -> None:
        """Create the variables, as in the base class.

        Raises:
            LossScaleError: created outside the strategy's scope.
            UnsupportedError: a setting that Keras does not support on several replicas.
        """
        if not self.built:
            replicas.check_replicated(self)
        super().build(var_list)

    @contextlib.contextmanager
    def keep_statistics(self, model: Any) -> Iterator[None]:
        """Context manager around one forward pass and its `apply` that restores running statistics after a skipped
        update.

        Variables that the forward pass writes, such as BatchNorm's moving mean or a parameter that a layer constrains
        in its `call`, get their values from the start of the block or of the accumulation. On several replicas the kept
        statistics are the means over them, which Keras does not compute; `apply` reduces them with the gradients.
        Random seeds are not restored. Use it without a strategy, or inside a replica.

        Args:
            model: a built Keras model or layer.

        Raises:
            ModelError: the model is not built.
        """
        micro_step = native_variable(self._state.micro_step) if self.accumulate_steps > 1 else None
        statistics = ForwardPassStatistics(model, self._starts.setdefault(model, StartValues()), micro_step)
        with statistics.record():
            yield
        statistics.settle(lambda: self.update_was_skipped)

    def prepare_statistics(self, model: Any) -> None:
        """Create the variables that `keep_statistics` needs with `accumulate_steps`. Call it in a strategy's scope.

        Raises:
            ModelError: the model is not built.
        """
        accumulates = self.accumulate_steps > 1
        prepare_statistics(model, self._starts.setdefault(model, StartValues()) if accumulates else None)

    def make_figures(self, model: Any, selection: MonitorSelection) -> ReplicaFigures:
        """Return figures for the steps of a model's `fit` that a monitor reads."""
        with model.distribute_strategy.scope():
            return ReplicaFigures(model_variables(model).parameters, selection)

    # The two halves of a step.

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # untyped; it rewrites errors
    def scale_loss(self, loss: Any) -> Any:
        """Return the loss in float32, times the scale.

        Args:
            loss: floating. A loss in 16 bits causes a warning, since it was computed in 16 bits. For a loss that is not
                a scalar, the gradient is that of its sum, as in Keras.

        Raises:
            LossError: not floating.
        """
        self._calls.record()
        scaled = scale_custom_loop_loss(loss, native_variable(self.dynamic_scale) if self.scaler.scales else None)
        if self.figures is not None:
            self.figures.see_loss(loss)
        share = self.current_share()
        return scaled if share is None else scaled * share.weight

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # untyped; it rewrites errors
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale, check and clip gradients of the scaled loss, and update unless one of them is not finite.

        Args:
            grads: one gradient per variable, floating; None and `tf.IndexedSlices` are accepted. A variable whose
                gradient is None at all `accumulate_steps` calls, and its state in the inner optimizer, do not change
                (S23); a None at only some calls counts as 0.
            trainable_variables: the variables; None for those of `build`.

        Raises:
            LossScaleError: `scale_loss` was not called; or `apply` was called outside the replicas.
            GradientError: no gradients, one that is not floating, or not one per variable.
        """
        replicas.check_context()
        grads, variables = self.match_gradients(grads, trainable_variables)
        if self.scaler.scales:
            self._calls.consume()
        check_any_gradient(grads, who="apply()", then="The loss depends on none of the trainable variables.")
        pairs = list(zip(grads, variables, strict=True))
        unused = [variable for gradient, variable in pairs if gradient is None]
        if self.accumulate_steps > 1:  # a variable without a gradient now may have had one earlier
            pairs = [(tf.zeros(v.shape, at_least_float32(v.dtype)) if g is None else g, v) for g, v in pairs]
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        statistics = CURRENT_STATISTICS.get()
        if statistics is not None:
            statistics.end_pass(variables)
        dense = [to_dense_float32(gradient, variable) for gradient, variable in pairs]
        summed = all_reduce_sum(dense) if statistics is None else statistics.sum_with_gradients(dense)
        used = [variable for _, variable in pairs]
        apply_or_accumulate(ApplyCall(self, self._state, self.current_share(), used, variables, unused), summed)
        if tf.executing_eagerly() and self._watch.is_due(self.scaler):
            self.raise_if_stuck()

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Raise: this form of `apply` exists only for Keras on JAX."""
        raise UnsupportedError("stateless_apply is for Keras on JAX. On TensorFlow call apply(grads, variables).")


if keras.config.backend() == "tensorflow":  # elsewhere the name in files is that of polyamp_keras's class
    keras.saving.register_keras_serializable(package="polyamp")(LossScaleOptimizer)
