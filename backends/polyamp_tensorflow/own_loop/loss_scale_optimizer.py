"""`LossScaleOptimizer`: a Keras optimizer that scales losses by polyamp's rules, for `fit` and for loops of one's own.

    scale_loss(loss)     float32 first, then times the scale (S6)
    apply(gradients)     sum over replicas -> [window of micro-batches] -> unscale -> norm and finite flag -> clip
                         -> the inner optimizer under one condition for all replicas -> scale adjustment  (S8 to S15)

`window` holds the update itself, `replicas` what `tf.distribute` asks for, `loop_memory` what is known of calls and
of running statistics.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from polyamp.errors import GradientError, RecipeError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import stuck
from polyamp.rules.refusals import check_any
from polyamp.rules.scale import LossScaleState
from polyamp_tensorflow.arrays import at_least_float32, dense_wide, raw, variable_name
from polyamp_tensorflow.compat import check_known, index_in, own_trainable
from polyamp_tensorflow.own_loop import keras_arguments, window
from polyamp_tensorflow.own_loop.loop_memory import (
    STATISTICS,
    ScaleCalls,
    WindowStarts,
    keep_statistics,
    running_statistics,
    total_with_statistics,
)
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.measure import scale_own_loss
from polyamp_tensorflow.step.optimizer_checks import (
    check_built_for,
    check_inner_optimizer,
    check_scaled_variables,
    warn_of_average,
)
from polyamp_tensorflow.step.optimizers import SpecOptimizer, build_optimizer, load_without

_Base: Any = keras.optimizers.LossScaleOptimizer
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _as_written(method: _Method) -> _Method:
    """Keep AutoGraph away, which would rewrite the method and the exceptions from it."""
    unconverted: _Method = tf.autograph.experimental.do_not_convert(method)
    return unconverted


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaleOptimizer(_Base):  # type: ignore[misc]  # Keras is untyped
    """Wraps a Keras optimizer: scaled losses in, unscaled, checked and clipped gradients to the inner optimizer.

    It is a `keras.optimizers.LossScaleOptimizer`, so that `model.compile` does not wrap it again. A step whose
    gradients are not finite leaves the inner optimizer as it is, with its moments, count, schedule and moving average,
    and the parameters with their decay and constraints; `keep_statistics` does the same for running statistics.

    Args:
        inner_optimizer: a Keras optimizer or one of polyamp's specs. Its `clipnorm`, `clipvalue` or `global_clipnorm`
            act on the unscaled gradients, after the sum over replicas.
        initial_scale: a `polyamp.LossScaler`, "dynamic", "off" or a preset's name; or, as in Keras, the first scale.
        dynamic_growth_steps: as in Keras, the finite steps before the scale grows. With either of Keras's numbers the
            scaler is `LossScaler.like("keras")`.
        name: as of any Keras optimizer.
        scaler: the scaler by name.
        clip_norm: largest global L2 norm of the unscaled gradients (S11), or None.
        accumulate_steps: calls of `apply` per update (S8). Between them nothing but the sum of gradients moves.
        **options: what Keras's wrapper takes for the sake of older files; refused in its words unless at its default.

    Attributes:
        scaler, clip_norm, accumulate_steps: as given; the scaler as a `LossScaler`.
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
        accumulate_steps: int = 1,
        **options: Any,
    ) -> None:
        given = keras_arguments.inner_of(inner_optimizer, options)
        keras_arguments.check_options(options)
        scaler = keras_arguments.described(initial_scale, dynamic_growth_steps, scaler)
        values: Any = {"scaler": scaler, "clip_norm": clip_norm, "accumulate_steps": accumulate_steps}
        Recipe(policy="mixed_float16", **values)  # a recipe checks all three
        inner = SpecOptimizer(given) if is_spec(given) else given
        check_inner_optimizer(inner, clip_norm)
        super().__init__(inner, initial_scale=scaler.init_scale, dynamic_growth_steps=scaler.growth_interval, name=name)
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.accumulate_steps = accumulate_steps
        start = LossScaleState(scaler.init_scale, 0, scaler.hysteresis, 0, 0)
        self._scale_variables = LossScaleState(*(self._scalar(field, v) for field, v in start._asdict().items()))
        self.dynamic_scale, self.step_counter = self._scale_variables[:2]  # Keras's names for them
        self._skipped = self._scalar("last_update_skipped", 0)
        self._micro_step = self._scalar("micro_step", 0)
        self._calls = ScaleCalls()
        self._window_starts = WindowStarts()
        self._share: Any = None
        self._watch = stuck.Watch()

    def _scalar(self, name: str, value: float) -> Any:
        dtype = "float32" if name == "scale" else "int32"
        return self.add_variable((), keras.initializers.Constant(value), dtype, name=name)

    def build(self, var_list: Any) -> None:
        """Create the inner optimizer's variables, and those of the window of micro-batches.

        Raises:
            RecipeError: it or the inner optimizer is built for other variables; a member of the inner one (of a
                `keras.optimizers.MultiOptimizer`) has a setting that would act a second time.
            LossScaleError: float16 parameters with a scaler that scales; made outside of the strategy's scope.
            UnsupportedError: variables that are overwritten by their gradients (float8); what Keras's optimizer does
                not do on several replicas.
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
        warn_of_average(self.inner_optimizer, self.accumulate_steps)
        keras.optimizers.Optimizer.build(self, variables)  # not the parent's, which adds a scale of its own
        self._not_finite = self.add_variable((len(variables),), "zeros", "int32", name="not_finite")
        self._sums = []
        if self.accumulate_steps > 1:
            self._used = self.add_variable((len(variables),), "zeros", "int32", name="used_in_window")
            self._rows = self.add_variable((2,), "zeros", "float32", name="window_rows")
            self._sums = [
                self.add_variable(variable.shape, "zeros", at_least_float32(variable.dtype).name, name="gradient_sum")
                for variable in variables
            ]

    # What is known.

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state as tensors: float32 scale, int32 counters."""
        return LossScaleState(*(tf.convert_to_tensor(raw(variable)) for variable in self._scale_variables))

    @property
    def scale_variables(self) -> LossScaleState:
        """The same as the variables that hold it."""
        return self._scale_variables

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far. Reading it waits for the device."""
        return int(self._scale_variables.skipped.numpy())

    @property
    def update_was_skipped(self) -> Any:
        """Boolean scalar: the last call of `apply` ended in a skipped update."""
        return tf.not_equal(raw(self._skipped), 0)

    @property
    def iterations(self) -> Any:
        """Number of applied updates, the inner optimizer's own count (S13)."""
        return self.inner_optimizer.iterations

    def not_finite(self) -> list[str]:
        """Paths of the parameters whose gradients were not finite at the last skipped update."""
        if not self.built:
            return []
        counts = self._not_finite.numpy()
        pairs = zip(own_trainable(self), counts, strict=True)
        return [variable_name(variable) for variable, count in pairs if count]

    def raise_if_stuck(self) -> None:
        """Look on the host whether every update is skipped at the floor of the scale (S17), by `scaler.on_stuck`.

        `polyamp_tensorflow.compile` and eager loops do so every `patience` steps; a `tf.function` of one's own cannot.

        Raises:
            LossScaleStuckError: `patience` updates in a row were skipped there.
        """
        skips = int(self._scale_variables.stuck.numpy())
        stuck.check(skips, self.scaler, self.not_finite, where="the model or the loss")

    @contextlib.contextmanager
    def keep_statistics(self, model: Any) -> Iterator[None]:
        """A `with` block around one forward pass and its `apply`: a skipped update takes back running statistics.

        What the forward pass writes, such as BatchNorm's moving mean, or a parameter that a layer constrains in its
        `call`, is put back as it was at the start of the block, or of the window of micro-batches. Of running
        statistics on several replicas what is kept is the mean over them, which Keras leaves apart; `apply` sends it
        along with the gradients. Seeds of random numbers move on. Without a strategy, or inside a replica.

        Args:
            model: a built Keras model or layer.

        Raises:
            ModelError: a model that is not built.
        """
        micro_step = raw(self._micro_step) if self.accumulate_steps > 1 else None
        with keep_statistics(model, self._window_starts, micro_step, lambda: self.update_was_skipped):
            yield

    @contextlib.contextmanager
    def micro_batch(self, rows: Any) -> Iterator[None]:
        """A `with` block around `scale_loss` and `apply` of a micro-batch of so many rows: it counts by its share (S8).

        `fit` has it by itself (`polyamp_tensorflow.compile`, `guard`). Without it, and with `accumulate_steps=1`, all
        micro-batches count alike.

        Args:
            rows: examples in the micro-batch, or what else its loss is a mean over, of all replicas together; a number,
                or a scalar.
        """
        if self.accumulate_steps > 1:
            self._share = window.share_of(self._held({}) if self.built else None, tf.cast(rows, tf.float32))
        try:
            yield
        finally:
            self._share = None

    def count_micro_batch(self, weight: Any) -> None:
        """In a `micro_batch` block, before `scale_loss`: the micro-batch counts by this and not by its rows.

        Args:
            weight: what its loss is a mean over, a float32 scalar, of all replicas together; at least 0.
        """
        if self._share is not None:
            self._share = window.share_of(self._held({}) if self.built else None, weight)

    def prepare_statistics(self, model: Any) -> None:
        """Create what `keep_statistics` needs with `accumulate_steps`; call it in a strategy's scope beforehand.

        Raises:
            ModelError: a model that is not built.
        """
        running_statistics(model)
        if self.accumulate_steps > 1:
            self._window_starts.of(model)

    # The two halves of a step.

    @_as_written
    def scale_loss(self, loss: Any) -> Any:
        """The loss in float32, times the scale.

        Args:
            loss: floating. One in 16 bits was computed in them, and a warning says so. Of another shape than a scalar
                the gradient is that of its sum, as with Keras's.

        Raises:
            LossError: not floating.
        """
        self._calls.note()
        scale = raw(self.dynamic_scale) if self.scaler.scales else None
        scaled = scale_own_loss(loss, scale, what="what calls scale_loss()")
        return scaled if self._share is None else scaled * self._share.weight

    @_as_written
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale, check and clip gradients of the scaled loss, and update unless one of them is not finite.

        Args:
            grads: one gradient per variable, floating; None and `tf.IndexedSlices` are accepted. A variable whose
                gradient is None at every call of a window of `accumulate_steps`, and the inner optimizer's state of
                it, stay as they are (S23); a None among others counts as 0.
            trainable_variables: the variables; those that `build` was given if None.

        Raises:
            LossScaleError: `scale_loss` was not called; or a call outside of the replicas.
            GradientError: no gradients, one that is not floating, or another number of them than of variables.
        """
        replicas.check_context()
        grads = list(grads)
        if not self.built:
            if trainable_variables is None:
                raise GradientError("apply() without variables needs build(trainable_variables) first.")
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        variables = own_trainable(self) if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise GradientError(f"apply() got {len(grads)} gradients for {len(variables)} variables.")
        check_known(self, variables)
        if self.scaler.scales:
            self._calls.consume()
        check_any(grads, who="apply()", then="The loss depends on none of the trainable variables.")
        indices = [index for index, gradient in enumerate(grads) if gradient is not None]
        unused = [variable for gradient, variable in zip(grads, variables, strict=True) if gradient is None]
        if self.accumulate_steps > 1:  # what has no gradient now may have had one earlier in the window
            grads = [
                tf.zeros(v.shape, at_least_float32(v.dtype)) if g is None else g
                for g, v in zip(grads, variables, strict=True)
            ]
            indices = list(range(len(grads)))
        seen = STATISTICS.get()
        if seen is not None:
            seen.end_pass(variables)
        summed = total_with_statistics([dense_wide(grads[index], variables[index]) for index in indices])
        held = self._held({id(variable): index_in(self, variable) for variable in variables})
        window.update(window.Call(held, [variables[index] for index in indices], variables, unused), summed)
        if tf.executing_eagerly() and self._watch.due(self.scaler):
            self.raise_if_stuck()

    def _held(self, owners: dict[int, int]) -> window.Held:
        """What an update reads and writes."""
        return window.Held(
            inner=self.inner_optimizer,
            scaler=self.scaler,
            clip_norm=self.clip_norm,
            accumulate_steps=self.accumulate_steps,
            owners=owners,
            scale=self._scale_variables,
            skipped=self._skipped,
            not_finite=self._not_finite,
            micro_step=self._micro_step,
            sums=self._sums,
            used=self._used if self._sums else None,
            rows=self._rows if self._sums else None,
            share=self._share,
        )

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """`apply` on pairs; returns the number of applied updates."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(list(grads), list(variables))
        return self.iterations

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """The inner optimizer's, which decays."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Keras's JAX form of `apply`, which does not exist on TensorFlow."""
        raise UnsupportedError("stateless_apply is for Keras on JAX. On TensorFlow call apply(grads, variables).")

    # Saving.

    def load_own_variables(self, store: Any) -> None:
        """Keras's; also from files of Keras's own wrapper around the same kind of optimizer, and from files written
        before it was known which parameters a window and an update used.
        """
        inner = self.inner_optimizer
        if self.built and not isinstance(inner, SpecOptimizer) and keras_arguments.is_of_keras(store, inner):
            keras_arguments.load_from_keras(store, inner, self.scaler, self._scale_variables)
            return
        rows = [(self._rows, 0)] if self.built and self._sums else []
        later = [(self._used, 1)] if self.built and self._sums else []
        if self.built and isinstance(self.inner_optimizer, SpecOptimizer):
            later.append((self.inner_optimizer.missed_updates, 0))
        only_rows = bool(rows) and len(store.keys()) == len(self.variables) - 1
        load_without(self, store, rows if only_rows else [*rows, *later])

    def get_config(self) -> dict[str, Any]:
        """Everything that `from_config` needs, as plain values."""
        return {
            "name": self.name,
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "scaler": self.scaler.to_dict(),
            "clip_norm": self.clip_norm,
            "accumulate_steps": self.accumulate_steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LossScaleOptimizer:
        """The optimizer that `get_config` described, this class's or that of Keras's own."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        if "scaler" in config:
            config["scaler"] = LossScaler(**config["scaler"])
            for name in ("initial_scale", "dynamic_growth_steps"):  # Keras's words for two of its fields
                config.pop(name, None)
        return cls(inner, **config)

    @classmethod
    def from_keras(cls, optimizer: Any, scaler: LossScaler | str | None = None, **settings: Any) -> LossScaleOptimizer:
        """One in the place of a `keras.optimizers.LossScaleOptimizer`, around the same inner optimizer, which goes on.

        Args:
            optimizer: Keras's; if it is built, its scale and its count of good steps are taken over.
            scaler: its constants; None for those of Keras's wrapper under polyamp's floor.
            **settings: `clip_norm`, `accumulate_steps`, `name`.

        Raises:
            RecipeError: not Keras's wrapper.
            LossScaleError: its scale lies outside of the scaler's bounds.

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
        numbers = {} if scaler is not None else {"initial_scale": optimizer.initial_scale,
                   "dynamic_growth_steps": optimizer.dynamic_growth_steps}  # fmt: skip
        made = cls(optimizer.inner_optimizer, **numbers, scaler=scaler, **{"name": optimizer.name, **settings})
        if optimizer.built:
            made.build(own_trainable(optimizer))
            scale, good = float(optimizer.dynamic_scale), int(optimizer.step_counter)
            keras_arguments.take_over(scale, good, made.scaler, made._scale_variables)
        return made
