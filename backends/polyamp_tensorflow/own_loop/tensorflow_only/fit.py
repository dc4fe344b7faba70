"""`compile`, which configures `model.fit` by a recipe, and `guard`, for Keras on TensorFlow.

`fit`, `evaluate` and `predict` are Keras's own. A wrapper of the model's `train_step` restores running statistics after
a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.compat import build_symbolically, set_build_function
from polyamp_keras.models.layers import own_class
from polyamp_keras.own_loop.fit_checks import replace_keras_wrapper, scaling_optimizer
from polyamp_keras.own_loop.fit_guard import check_compile, compile_with, install_functions, wrap_optimizer
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.saved_guard import SavedGuard
from polyamp_keras.own_loop.spec_optimizer import resolve_groups
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer
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
    given = {"loss": loss, "metrics": metrics, "loss_weights": loss_weights, "weighted_metrics": weighted_metrics}
    plan, parameters = check_compile(model, recipe, given, more)
    with model.distribute_strategy.scope():
        inner = make_optimizer(recipe, parameters, resolve_groups(model, recipe, parameters))
        optimizer = wrap_optimizer(LossScaleOptimizer, inner, recipe)
        optimizer.build(model.trainable_variables)
        jit = _jit_compile(model, plan, jit_compile, run_eagerly)
        execution = {"run_eagerly": run_eagerly, "steps_per_execution": steps_per_execution, "jit_compile": jit}
        compile_with(model, plan, {"optimizer": optimizer, **given, **execution}, more)
        guard(model, recipe.policy)


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
    install_functions(model, precision, lambda model, result: model.optimizer.raise_if_stuck())


@contextlib.contextmanager
def _count_micro_batch(optimizer: LossScaleOptimizer, data: Any) -> Iterator[None]:
    """Context manager that weights a micro-batch by its rows on all replicas, or by the divisor of its loss."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    (rows,) = all_reduce_sum([tf.cast(tf.shape(arrays[0])[0], tf.float32)])

    def count(divisor: Any) -> None:
        (total,) = all_reduce_sum([divisor])
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
