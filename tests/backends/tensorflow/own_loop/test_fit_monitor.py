"""`MonitorCallback` on several replicas (S35); `tests/backends/keras/test_fit_monitor.py` has the rest."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_tensorflow
from polyamp.monitor.records import MonitorRecord


def fitted(scope: contextlib.AbstractContextManager[Any]) -> list[MonitorRecord]:
    """Records of a `fit` of six batches, of which the third overflows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(48, 6)).astype(np.float32), rng.normal(size=(48, 3)).astype(np.float32)
    x[17] = np.inf
    recipe = polyamp.Recipe(
        policy="float32", optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=4)
    )
    with scope:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        polyamp_tensorflow.compile(model, recipe, loss="mse", jit_compile=False)
    monitor = polyamp.Monitor(every=1, weights=True)
    callbacks = [polyamp_tensorflow.MonitorCallback(monitor)]
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    return monitor.records


def test_s35_two_replicas_have_the_figures_of_one_process(two_cpus: Any) -> None:
    records, wanted = fitted(two_cpus.scope()), fitted(contextlib.nullcontext())
    assert [record.skipped for record in records] == [False, False, True, False, False, False]
    for one, other in zip(records, wanted, strict=True):
        for name in ("call", "step", "scale", "next_scale", "skipped", "skips", "word"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.loss == pytest.approx(other.loss, rel=1e-3, nan_ok=True)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3, nan_ok=True)
        for own, theirs in zip(one.modules, other.modules, strict=True):
            assert own.module == theirs.module
            assert own.gradients is not None
            assert theirs.gradients is not None
            assert own.gradients.elements == theirs.gradients.elements
            assert own.gradients.overflow == theirs.gradients.overflow
            assert own.update_ratio == pytest.approx(theirs.update_ratio, rel=1e-2)
