"""`compile`, which configures `model.fit` by a recipe, and `LossScaleLogger`, which logs the loss scale.

`fit`, `evaluate` and `predict` are Keras's own. A wrapper of the model's `train_step` restores running statistics after
a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras
import tensorflow as tf

from polyamp.errors import LossError, LossScaleError, ModelError, UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules import step_checks, stuck_scale
from polyamp_tensorflow.arrays import dtype_name, native_variable, to_numpy
from polyamp_tensorflow.compat import build_symbolically, set_build_function
from polyamp_tensorflow.models.keras_serialization import ModelSetting, add_setting, model_settings, remove_setting
from polyamp_tensorflow.models.layers import is_built, own_class
from polyamp_tensorflow.models.variables import model_variables, seed_variables
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer
from polyamp_tensorflow.own_loop.tensorflow_only.compile_arguments import check_compile_arguments, compile_model
from polyamp_tensorflow.own_loop.tensorflow_only.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_tensorflow.precision.autocast import APPLIED_BY_COMPILE, AppliedPolicy, matmul_precision, resolve_policy
from polyamp_tensorflow.precision.tensorflow_only.policy_application import CACHED_FUNCTIONS
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.optimizers import make_optimizer, resolve_groups
from polyamp_tensorflow.step.tensorflow_only.graph_function import needs_xla
from polyamp_tensorflow.step.tensorflow_only.optimizer_checks import check_recipe_optimizer


def compile(  # noqa: A001  # Keras's word for it
    model: Any,
    recipe: Recipe,
    loss: Any = None,
    *,
    metrics: Any = None,
    loss_weights: Any = None,
    weighted_metrics: Any = None,
    run_eagerly: bool = False,
    steps_per_execution: int = 1,
    jit_compile: bool | str | None = None,
    **more: Any,
) -> None:
    """Compile a model by a recipe: `fit`, `evaluate` and `predict` follow its policy, scaler, optimizer and clip.

    The policy is applied permanently, and variables stay float32. Each batch of `fit` is a micro-batch, as with Keras's
    own accumulation: `accumulate_steps` of them form one update. Each is weighted by its rows, or by the divisor of its
    loss: the mask of its output, or sample weights with `reduction="mean_with_sample_weight"` (S8). An accumulation
    that is incomplete at the end of an epoch continues in the next epoch.

    Args:
        model: a built `keras.Model`; with a strategy, created in its scope.
        recipe: a recipe as for `polyamp.train_step`.
        loss, metrics, loss_weights, weighted_metrics, run_eagerly, steps_per_execution: as in `model.compile`. Losses
            are computed in float32.
        jit_compile: True, False or "auto" as in Keras. None is "auto", but float16 on one CPU is compiled with XLA,
            with one warning per process.
        **more: further arguments of the model's own `compile`, such as the `student_loss_fn` of keras.io's Distiller.
            Of Keras's arguments it gets those that it accepts.

    Raises:
        ModelError: not a `keras.Model`, not built, or without float32 parameters.
        LossError: a loss in 16 bits.
        PolicyError, RecipeError, LossScaleError, UnsupportedError: as from `polyamp.init`; XLA on several replicas; an
            argument that the model's `compile` does not accept, or a missing one.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
        >>> polyamp_tensorflow.compile(model, recipe, loss="mse", metrics=["mae"])
        >>> history = model.fit(keras.ops.ones((8, 4)), keras.ops.zeros((8, 2)), verbose=0)
        >>> int(model.optimizer.iterations), sorted(history.history)
        (1, ['loss', 'mae'])
    """
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"compile takes a keras.Model. Received: {type(model).__module__}.{type(model).__qualname__}. For other "
            "models keep the loop: polyamp.train_step, or polyamp_tensorflow.LossScaleOptimizer."
        )
    if not is_built(model):
        raise ModelError(
            f"compile needs a built model, to put the policy on its layers. Received: {model.name!r}, which is not "
            "built. Call it once on a batch, or give its first layer an Input."
        )
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    check_compile_arguments(model, {name: value for name, value in given.items() if value is not None}, more)
    _check_losses([loss, *more.values()])
    plan = resolve_policy(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    if recipe.ema is not None:
        raise UnsupportedError(
            f"in fit Keras keeps averages of the parameters. Received: recipe.ema={recipe.ema}. Give it ema=None "
            f"and an optimizer of Keras's with use_ema=True, ema_momentum={recipe.ema.decay:g}; or train with "
            "polyamp.train_step."
        )
    parameters = model_variables(model).parameters
    step_checks.check_parameters([(name, dtype_name(variable)) for name, variable in parameters.items()], recipe)
    with model.distribute_strategy.scope():
        optimizer = LossScaleOptimizer(
            make_optimizer(recipe, parameters, resolve_groups(model, recipe, parameters)),
            recipe.loss_scaler,
            clip_norm=recipe.clip_norm,
            clip_value=recipe.clip_value,
            clip_eps=recipe.clip_eps,
            accumulate_steps=recipe.accumulate_steps,
        )
        optimizer.build(model.trainable_variables)
        jit = _jit_compile(model, plan, jit_compile, run_eagerly)
        _install_policy(model, plan)
        settings = {
            "optimizer": optimizer,
            **given,
            "run_eagerly": run_eagerly,
            "steps_per_execution": steps_per_execution,
            "jit_compile": jit,
            "auto_scale_loss": False,
        }
        compile_model(model, settings, more)
        guard(model, recipe.policy)


def _install_policy(model: Any, plan: ResolvedPolicy) -> None:
    """Apply the policy permanently, in place of that of an earlier `compile`."""
    before = vars(model).get(APPLIED_BY_COMPILE)
    AppliedPolicy(model, plan, by_compile=True)  # first, since it may raise
    if before is not None:
        before.restore()


def guard(model: Any, policy: Policy | str | None = None) -> None:
    """Guard `model.fit` with a `LossScaleOptimizer`: restore running statistics, and detect a stuck scale.

    `compile` calls it. Call it for a model from `keras.models.load_model`, or for one that got its `LossScaleOptimizer`
    in `model.compile`. It replaces Keras's own `LossScaleOptimizer`, for example from a file, by
    `LossScaleOptimizer.from_keras`, and recompiles the model with its previous arguments.

    Args:
        model: a compiled, built model.
        policy: a policy or its spelling, whose `float32_matmul` applies to `fit`, `evaluate` and `predict`.

    Raises:
        LossScaleError: the model's optimizer is not a `LossScaleOptimizer`.
        ModelError: the model is not built.
    """
    _install_guard(model, None if policy is None else Policy.of(policy).float32_matmul)


def _install_guard(model: Any, precision: str | None) -> None:
    with model.distribute_strategy.scope():
        _replace_keras_wrapper(model)
        scaling_optimizer(model).prepare_statistics(model)
    cls = own_class(model)
    several_workers = isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def train_step(data: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if isinstance(model.optimizer, LossScaleOptimizer):  # the user may have recompiled the model
                stack.enter_context(model.optimizer.keep_statistics(model))
                stack.enter_context(_count_micro_batch(model.optimizer, data))
            logs = cls.train_step(model, data)
        return _as_vectors(logs) if several_workers else logs

    model.train_step = train_step
    install_loss_counting(model)
    if several_workers:
        model.test_step = lambda data: _as_vectors(cls.test_step(model, data))
        set_build_function(model, _build_on_first_batch)
    for name in CACHED_FUNCTIONS:
        setattr(model, f"make_{name}", _guard_function_maker(model, name, precision))
        setattr(model, name, None)
    for setting in model_settings(model):
        if isinstance(setting, SavedGuard):
            remove_setting(model, setting)
    add_setting(model, SavedGuard(model, precision))


@keras.saving.register_keras_serializable(package="polyamp_tensorflow")
class SavedGuard(ModelSetting):
    """Setting in a model's `.keras` file: the guard of the model, and its random seeds (S12)."""

    needs_compile: ClassVar[bool] = True

    def __init__(self, model: Any, precision: str | None, seeds: dict[str, Any] | None = None) -> None:
        self._model = model
        self._precision = precision
        self._seeds = seeds

    def get_config(self) -> dict[str, Any]:
        """Return the setting as plain values."""
        seeds = self._seeds
        if self._model is not None:
            seeds = {name: to_numpy(variable).tolist() for name, variable in seed_variables(self._model).items()}
        return {"float32_matmul": self._precision, "seeds": seeds}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedGuard:
        """Create the saved setting, to be applied by `install`."""
        return cls(None, config["float32_matmul"], config["seeds"])

    def install(self, model: Any) -> None:
        """Guard a model that Keras has compiled, unless its class overrides `compile`."""
        if isinstance(getattr(model, "optimizer", None), LossScaleOptimizer):
            _install_guard(model, self._precision)
            seeds = self._seeds or {}
            for name, variable in seed_variables(model).items():
                if name in seeds:
                    native_variable(variable).assign(seeds[name])


@contextlib.contextmanager
def _count_micro_batch(optimizer: LossScaleOptimizer, data: Any) -> Iterator[None]:
    """Context manager that weights a micro-batch by its rows on all replicas, or by the divisor of its loss."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    (rows,) = replicas.sum_over_replicas([tf.cast(tf.shape(arrays[0])[0], tf.float32)])
    with optimizer.micro_batch(rows), report_loss_divisors(optimizer.count_micro_batch):
        yield


def _build_on_first_batch(model: Any, iterator: Any, data_batch: Any) -> None:
    """Build a model from this worker's part of the first batch; only shapes and dtypes matter.

    Keras 3.15's own function cannot read a batch of several workers, since `strategy.reduce` takes no tuple there.
    """
    strategy = model.distribute_strategy
    if iterator is not None:
        *_, batches = next(iter(iterator))
        data_batch = keras.tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
    with strategy.scope():
        build_symbolically(model, data_batch)


def _as_vectors(logs: Any) -> Any:
    """Expand scalars to shape (1,): Keras 3.15 reduces the logs of several workers along axis 0."""
    return keras.tree.map_structure(lambda value: value[None] if value.shape.rank == 0 else value, logs)


def _guard_function_maker(model: Any, name: str, precision: str | None) -> Callable[..., Any]:
    """Return a replacement of `make_train_function` and similar methods that adds the host's part of the guard."""
    own = getattr(own_class(model), f"make_{name}")
    watch = stuck_scale.StuckScaleMonitor() if name == "train_function" else None

    def make(force: bool = False) -> Any:
        if getattr(model, name) is None or force:
            own(model, force)
            setattr(model, name, functools.partial(_run_guarded, model, getattr(model, name), precision, watch))
        return getattr(model, name)

    return make


def _run_guarded(
    model: Any,
    function: Callable[..., Any],
    precision: str | None,
    watch: stuck_scale.StuckScaleMonitor | None,
    *args: Any,
) -> Any:
    """Run a function that Keras made; check for a stuck scale when `watch`, that of a training function, is due."""
    with matmul_precision(precision):
        result = function(*args)
    optimizer = model.optimizer
    if watch is None or not isinstance(optimizer, LossScaleOptimizer):
        return result
    if watch.is_due(optimizer.scaler, model.steps_per_execution, optimizer.accumulate_steps):
        optimizer.raise_if_stuck()
    return result


def _replace_keras_wrapper(model: Any) -> None:
    """Replace Keras's own wrapper by polyamp's."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(optimizer, LossScaleOptimizer):
        settings = keras.saving.deserialize_keras_object(model.get_compile_config())
        model.compile(**{**settings, "optimizer": LossScaleOptimizer.from_keras(optimizer)})


def scaling_optimizer(model: Any) -> LossScaleOptimizer:
    """Return a model's optimizer.

    Raises:
        LossScaleError: it is not a `LossScaleOptimizer`.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer):
        raise LossScaleError(
            "the model must be compiled with a polyamp_tensorflow.LossScaleOptimizer, by polyamp_tensorflow.compile or "
            f"by model.compile. Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    return optimizer


def _check_losses(loss: Any) -> None:
    """Raise for losses that would be computed in 16 bits (S6)."""
    if keras.config.floatx() in HALF_DTYPES:
        raise UnsupportedError(
            "losses are computed in keras.config.floatx(), which must be float32 (S6). Received: "
            f"{keras.config.floatx()}. Call keras.config.set_floatx('float32') and set the compute dtype by a policy."
        )
    for part in keras.tree.flatten(loss):
        if getattr(part, "dtype", None) in HALF_DTYPES:
            raise LossError(
                f"loss must be computed in float32. Received: {type(part).__qualname__}(dtype={part.dtype!r}). Drop "
                "its dtype."
            )


def _jit_compile(model: Any, plan: ResolvedPolicy, jit_compile: bool | str | None, run_eagerly: bool) -> bool | str:
    count = model.distribute_strategy.num_replicas_in_sync
    if jit_compile is True and count > 1:
        raise UnsupportedError(
            f"jit_compile=True compiles the step of one replica. Received: a model on a strategy with {count} "
            "replicas. Drop it."
        )
    if jit_compile is not None:
        return jit_compile
    if run_eagerly or count > 1:
        return "auto"
    return True if needs_xla([plan], model.trainable_variables, stacklevel=3) else "auto"


class LossScaleLogger(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Callback that adds `loss_scale` and `skipped_steps` to the logs: progress bar, `history`, TensorBoard, CSV files.

    Callbacks get the logs in order, so list it before `TensorBoard` and `CSVLogger`. Reading the two numbers waits for
    the device after each batch, as the progress bar does.

    Raises (when `fit` starts):
        LossScaleError: the model's optimizer is not a `polyamp_tensorflow.LossScaleOptimizer`.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.sgd(0.1))
        >>> polyamp_tensorflow.compile(model, recipe, loss="mse")
        >>> x, y = keras.ops.ones((8, 4)), keras.ops.full((8, 2), float("nan"))
        >>> history = model.fit(x, y, verbose=0, callbacks=[polyamp_tensorflow.LossScaleLogger()])
        >>> history.history["loss_scale"], history.history["skipped_steps"]
        ([32.0], [1])
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise for a model without a loss scale."""
        scaling_optimizer(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add both numbers to the batch's logs."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add both numbers to the epoch's logs."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            optimizer = scaling_optimizer(self.model)
            logs["loss_scale"] = float(optimizer.scale_state.scale)
            logs["skipped_steps"] = optimizer.skipped_steps
