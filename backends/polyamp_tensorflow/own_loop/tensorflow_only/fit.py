"""`compile`, which configures `model.fit` by a recipe, and `LossScaleLogger`, which logs the loss scale.

`fit`, `evaluate` and `predict` are Keras's own. A wrapper of the model's `train_step` restores running statistics after
a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules import step_checks, stuck_scale
from polyamp_keras.arrays import dtype_name
from polyamp_keras.compat import build_symbolically, set_build_function
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.keras_serialization import add_setting, model_settings, remove_setting
from polyamp_keras.models.layers import own_class
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.compile_arguments import check_compile_arguments, compile_model
from polyamp_keras.own_loop.fit_checks import (
    check_average,
    check_losses,
    check_model,
    replace_keras_wrapper,
    scaling_optimizer,
)
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.optimizer_checks import check_recipe_optimizer
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.spec_optimizer import resolve_groups
from polyamp_keras.precision.apply_policy import APPLIED_BY_COMPILE, AppliedPolicy
from polyamp_keras.precision.policy_application import CACHED_FUNCTIONS
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer
from polyamp_tensorflow.precision.autocast import resolve_policy
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.optimizers import make_optimizer
from polyamp_tensorflow.step.tensorflow_only.graph_function import needs_xla


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
    check_model(model)
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    check_compile_arguments(model, {name: value for name, value in given.items() if value is not None}, more)
    check_losses([loss, *more.values()])
    plan = resolve_policy(model, recipe.policy)
    check_recipe_optimizer(recipe.optimizer, recipe.clip_norm)
    check_average(recipe)
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
        replace_keras_wrapper(model, LossScaleOptimizer)
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


@contextlib.contextmanager
def _count_micro_batch(optimizer: LossScaleOptimizer, data: Any) -> Iterator[None]:
    """Context manager that weights a micro-batch by its rows on all replicas, or by the divisor of its loss."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    (rows,) = replicas.sum_over_replicas([tf.cast(tf.shape(arrays[0])[0], tf.float32)])

    def count(divisor: Any) -> None:
        (total,) = replicas.sum_over_replicas([divisor])
        optimizer.count_micro_batch(total)

    with optimizer.micro_batch(rows), report_loss_divisors(count):
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
    with ENGINE.matmul_precision(precision):
        result = function(*args)
    optimizer = model.optimizer
    if watch is None or not isinstance(optimizer, LossScaleOptimizer):
        return result
    if watch.is_due(optimizer.scaler, model.steps_per_execution, optimizer.accumulate_steps):
        optimizer.raise_if_stuck()
    return result


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


if keras.config.backend() == "tensorflow":  # elsewhere a file's guard is that of polyamp_keras
    SavedGuard.guard_model = staticmethod(_install_guard)
