"""`LossScaleOptimizer`, the native scaler: a Keras optimizer with polyamp's rules, for `fit` and custom loops.

scale_loss(loss)     float32 first, then times the scale (S6)
apply(gradients)     sum over replicas -> [sum over micro-batches] -> unscale -> norm and finite flag -> clip
                     -> the inner optimizer under one condition for all replicas -> scale adjustment  (S8 to S15)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import GradientError, RecipeError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.rules.step_checks import check_any_gradient, check_options
from polyamp.rules.stuck_scale import StuckScaleMonitor, check_stuck
from polyamp_tensorflow.arrays import at_least_float32, native_variable, to_dense_float32
from polyamp_tensorflow.compat import check_optimizer_variables, own_trainable_variables
from polyamp_tensorflow.own_loop.skip_report import non_finite_names
from polyamp_tensorflow.own_loop.tensorflow_only.fit_figures import FitFigures
from polyamp_tensorflow.own_loop.tensorflow_only.keras_loss_scale_optimizer import (
    adopt_keras_scale,
    check_scaler_options,
    is_keras_wrapper_file,
    keras_numbers,
    load_from_keras,
    pop_inner_optimizer,
    scaler_from_arguments,
)
from polyamp_tensorflow.own_loop.tensorflow_only.optimizer_update import apply_or_accumulate
from polyamp_tensorflow.own_loop.tensorflow_only.running_statistics import (
    CURRENT_STATISTICS,
    ForwardPassStatistics,
    StartValues,
    prepare_statistics,
)
from polyamp_tensorflow.own_loop.tensorflow_only.scaler_state import (
    ApplyCall,
    MicroBatchShare,
    ScaleLossCalls,
    ScalerState,
    micro_batch_share,
)
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.grad_stats import scale_custom_loop_loss
from polyamp_tensorflow.step.optimizers import SpecOptimizer, build_optimizer, load_older_variables
from polyamp_tensorflow.step.tensorflow_only.optimizer_checks import (
    check_built_for,
    check_inner_optimizer,
    check_scaled_variables,
    warn_about_average,
)

_Base: Any = keras.optimizers.LossScaleOptimizer


def native_scaler(scaler: LossScaler, **options: Any) -> LossScaleOptimizer:
    """Return the `LossScaleOptimizer` of a scaler, as `scaler.native("tensorflow")`.

    Args:
        scaler: the scaler.
        **options: `optimizer`, the optimizer to wrap; and `clip_norm`, `clip_value`, `clip_eps`, `accumulate_steps`.

    Raises:
        RecipeError: no optimizer to wrap.
    """
    known = ("optimizer", "clip_norm", "clip_value", "clip_eps", "accumulate_steps")
    check_options(options, known, function="native", backend="tensorflow")
    if "optimizer" not in options:
        raise RecipeError(
            "native('tensorflow') wraps a Keras optimizer or one of polyamp's specs. Received: no optimizer. Call "
            "scaler.native('tensorflow', optimizer=keras.optimizers.Adam(1e-3))."
        )
    return LossScaleOptimizer(options.pop("optimizer"), scaler, **options)


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaleOptimizer(_Base):  # type: ignore[misc]  # Keras is untyped
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
        values: Any = {"scaler": scaler, "clip_norm": clip_norm, "clip_value": clip_value, "clip_eps": clip_eps}
        Recipe(policy="mixed_float16", accumulate_steps=accumulate_steps, **values)  # a recipe checks them
        inner = SpecOptimizer(given) if is_spec(given) else given
        check_inner_optimizer(inner, clip_norm)
        super().__init__(inner, initial_scale=scaler.init_scale, dynamic_growth_steps=scaler.growth_interval, name=name)
        self.scaler, self.accumulate_steps = scaler, accumulate_steps
        self.clip_norm, self.clip_value, self.clip_eps = clip_norm, clip_value, clip_eps
        start = LossScaleState(scaler.init_scale, 0, scaler.hysteresis, 0, 0)
        scale = LossScaleState(*(self._scalar(field, value) for field, value in start._asdict().items()))
        self.dynamic_scale, self.step_counter = scale[:2]  # Keras's names for them
        # In files the variables are numbered in the order of their creation.
        self._state = ScalerState(scale, self._scalar("last_update_skipped", 0), self._scalar("micro_step", 0))
        self._calls = ScaleLossCalls()
        self._starts: weakref.WeakKeyDictionary[Any, StartValues] = weakref.WeakKeyDictionary()
        self._share: MicroBatchShare | None = None
        self._watch = StuckScaleMonitor()
        self.figures: FitFigures | None = None  # while a step of `fit` that a monitor reads is run, or traced

    def _scalar(self, name: str, value: float) -> Any:
        dtype = "float32" if name == "scale" else "int32"
        return self.add_variable((), keras.initializers.Constant(value), dtype, name=name)

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
        replicas.check_replicated(self)
        build_optimizer(
            self.inner_optimizer, variables, functools.partial(check_inner_optimizer, clip_norm=self.clip_norm)
        )
        warn_about_average(self.inner_optimizer, self.accumulate_steps)
        keras.optimizers.Optimizer.build(self, variables)  # not the parent's, which adds its own scale
        state = self._state
        state.not_finite = self.add_variable((len(variables),), "zeros", "int32", name="not_finite")
        if self.accumulate_steps > 1:
            state.used = self.add_variable((len(variables),), "zeros", "int32", name="used_in_window")
            state.rows = self.add_variable((2,), "zeros", "float32", name="window_rows")
            state.sums = [
                self.add_variable(variable.shape, "zeros", at_least_float32(variable.dtype).name, name="gradient_sum")
                for variable in variables
            ]

    # State.

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state as tensors: float32 scale, int32 counters."""
        return LossScaleState(*(tf.convert_to_tensor(native_variable(variable)) for variable in self._state.scale))

    @property
    def scale_variables(self) -> LossScaleState:
        """The variables of the loss-scale state."""
        return self._state.scale

    @property
    def skipped_steps(self) -> int:
        """Number of skipped updates. Reading it waits for the device."""
        return int(self._state.scale.skipped.numpy())

    @property
    def micro_step(self) -> Any:
        """Calls of `apply` since the last update, int32 scalar."""
        return tf.convert_to_tensor(native_variable(self._state.micro_step))

    @property
    def update_was_skipped(self) -> Any:
        """Whether the last call of `apply` skipped its update, boolean scalar."""
        return tf.not_equal(native_variable(self._state.skipped), 0)

    @property
    def iterations(self) -> Any:
        """Number of applied updates, as counted by the inner optimizer (S13)."""
        return self.inner_optimizer.iterations

    def not_finite(self) -> list[str]:
        """Return the paths of the parameters with non-finite gradients at the last skipped update."""
        return non_finite_names(self, self._state.not_finite) if self.built else []

    def raise_if_stuck(self) -> None:
        """Check on the host whether every update is skipped at the minimum scale (S17), and act by `scaler.on_stuck`.

        `polyamp_tensorflow.compile` and eager loops check every `patience` steps; a custom `tf.function` cannot.

        Raises:
            LossScaleStuckError: `patience` consecutive updates were skipped at the minimum scale.
        """
        skips = int(self._state.scale.stuck.numpy())
        check_stuck(skips, self.scaler, self.not_finite, where="the model or the loss")

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

    @contextlib.contextmanager
    def micro_batch(self, rows: Any) -> Iterator[None]:
        """Context manager around `scale_loss` and `apply` that weights a micro-batch by its rows (S8).

        `fit` uses it (`polyamp_tensorflow.compile`, `guard`). Without it, and with `accumulate_steps=1`, all
        micro-batches have equal weight.

        Args:
            rows: number of examples in the micro-batch, or the divisor of its loss, over all replicas; a number or a
                scalar tensor.
        """
        if self.accumulate_steps > 1:
            self._share = micro_batch_share(self._state, tf.cast(rows, tf.float32))
        try:
            yield
        finally:
            self._share = None

    def count_micro_batch(self, weight: Any) -> None:
        """Set the weight of the micro-batch in place of its rows. Call it in `micro_batch`, before `scale_loss`.

        Args:
            weight: divisor of its loss over all replicas, float32 scalar; at least 0.
        """
        if self._share is not None:
            self._share = micro_batch_share(self._state, weight)

    def prepare_statistics(self, model: Any) -> None:
        """Create the variables that `keep_statistics` needs with `accumulate_steps`. Call it in a strategy's scope.

        Raises:
            ModelError: the model is not built.
        """
        accumulates = self.accumulate_steps > 1
        prepare_statistics(model, self._starts.setdefault(model, StartValues()) if accumulates else None)

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
        weight = None if self._share is None else self._share.weight
        if self.figures is not None:
            self.figures.see_loss(loss, weight)
        return scaled if weight is None else scaled * weight

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
        summed = replicas.sum_over_replicas(dense) if statistics is None else statistics.sum_with_gradients(dense)
        used = [variable for _, variable in pairs]
        apply_or_accumulate(ApplyCall(self, self._state, self._share, used, variables, unused), summed)
        if tf.executing_eagerly() and self._watch.is_due(self.scaler):
            self.raise_if_stuck()

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Call `apply` on pairs, and return the number of applied updates."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(list(grads), list(variables))
        return self.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Call the same method of the inner optimizer, which applies the decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Raise: this form of `apply` exists only for Keras on JAX."""
        raise UnsupportedError("stateless_apply is for Keras on JAX. On TensorFlow call apply(grads, variables).")

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
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
            **({"clip_eps": self.clip_eps} if self.clip_eps else {}),
            "accumulate_steps": self.accumulate_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LossScaleOptimizer:
        """Create an optimizer from a config of this class or of Keras's own."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        if "scaler" in config:
            config["scaler"] = LossScaler(**config["scaler"])
            for name in ("initial_scale", "dynamic_growth_steps"):  # Keras's words for two of its fields
                config.pop(name, None)
        return cls(inner, **config)

    @classmethod
    def from_keras(cls, optimizer: Any, scaler: LossScaler | str | None = None, **settings: Any) -> LossScaleOptimizer:
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
            >>> theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
            >>> theirs.build([keras.Variable([1.0])])
            >>> ours = LossScaleOptimizer.from_keras(theirs, clip_norm=1.0)
            >>> float(ours.dynamic_scale), ours.inner_optimizer is theirs.inner_optimizer
            (64.0, True)
        """
        if not isinstance(optimizer, _Base) or isinstance(optimizer, LossScaleOptimizer):
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise RecipeError(f"from_keras takes a keras.optimizers.LossScaleOptimizer. Received: {kind}.")
        numbers = {} if scaler is not None else keras_numbers(optimizer)
        made = cls(optimizer.inner_optimizer, **numbers, scaler=scaler, **{"name": optimizer.name, **settings})
        if optimizer.built:
            made.build(own_trainable_variables(optimizer))
            scale, good = float(optimizer.dynamic_scale), int(optimizer.step_counter)
            adopt_keras_scale(scale, good, made.scaler, made._state.scale)
        return made
