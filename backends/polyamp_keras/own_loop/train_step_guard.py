"""The part of `compile` and `guard` that is of Keras on torch and JAX: a wrapper of the model's `train_step`.

It restores running statistics after a skipped update. The host checks for a stuck scale every `patience` batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import own_class
from polyamp_keras.own_loop.fit_checks import check_trained_variables, replace_keras_wrapper, scaling_optimizer
from polyamp_keras.own_loop.fit_guard import install_functions
from polyamp_keras.own_loop.fit_loss_divisor import install_loss_counting, report_loss_divisors
from polyamp_keras.own_loop.native_scaler import KerasLossScaleOptimizer
from polyamp_keras.own_loop.saved_guard import FitBackend, SavedGuard


def _install_guard(model: Any, precision: str | None) -> None:
    replace_keras_wrapper(model, KerasLossScaleOptimizer)
    optimizer = scaling_optimizer(model)
    ENGINE.check_fit(getattr(model, "jit_compile", False))
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    optimizer.prepare_statistics(model)
    step = own_class(model).train_step
    model.train_step = ENGINE.guarded_train_step(model, step, KerasLossScaleOptimizer, _count_micro_batch)
    if ENGINE.LOSS_REACHES_APPLY:
        install_loss_counting(model)
    keeps = ENGINE.KEEPS_FIT_STATE
    install_functions(model, precision, _check_stuck if keeps else None, check_trained_variables if keeps else None)


@contextlib.contextmanager
def _count_micro_batch(optimizer: KerasLossScaleOptimizer, data: Any) -> Iterator[None]:
    """Context manager that weights a micro-batch by its rows, or by the divisor of its loss."""
    arrays = [leaf for leaf in keras.tree.flatten(data) if len(getattr(leaf, "shape", ()))]
    if optimizer.accumulate_steps == 1 or not arrays:
        yield
        return
    with optimizer.micro_batch(float(arrays[0].shape[0])), report_loss_divisors(optimizer.count_micro_batch):
        yield


def _choose_jit(model: Any, plan: ResolvedPolicy, jit_compile: bool | str | None, run_eagerly: bool) -> bool | str:
    jit = "auto" if jit_compile is None else jit_compile
    ENGINE.check_fit(jit)
    return jit


def _check_stuck(model: Any, result: Any) -> None:
    ENGINE.store_fit_state(model, result)
    model.optimizer.raise_if_stuck()


SavedGuard.backend = FitBackend(KerasLossScaleOptimizer, _choose_jit, _install_guard)
