"""The part of `compile` and `guard` that is of Keras on TensorFlow: a wrapper of the model's `train_step`.

It restores running statistics after a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.compat import build_symbolically, set_build_function
from polyamp_keras.models.layers import own_class
from polyamp_keras.own_loop.fit_checks import replace_keras_wrapper, scaling_optimizer
from polyamp_keras.own_loop.fit_guard import install_functions
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.saved_guard import FitBackend, SavedGuard
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.distributed.replicas import check_replicated
from polyamp_tensorflow.own_loop.native_scaler import LossScaleOptimizer
from polyamp_tensorflow.step.tensorflow_only.graph_function import needs_xla


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


def _choose_jit(model: Any, plan: ResolvedPolicy, jit_compile: bool | str | None, run_eagerly: bool) -> bool | str:
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


if keras.config.backend() == "tensorflow":  # elsewhere it is that of polyamp_keras
    SavedGuard.backend = FitBackend(
        LossScaleOptimizer,
        _choose_jit,
        _install_guard,
        scope=lambda model: model.distribute_strategy.scope(),
        check_optimizer=check_replicated,
    )
