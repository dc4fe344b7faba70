"""Keras on torch: a step of polyamp's waits for the device where Keras's own optimizer does, and nowhere else."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from tests.backends.keras.test_confirmed_defects import SGD, keras_scaler, polyamp_scaler


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a scalar on the host is `_local_scalar_dense`; the engine reads flags where that does not wait, on the
    CPU, so that the way of a GPU is asked for."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    reads = []

    class Reads(TorchDispatchMode):
        """Mode that counts reads."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(function)
            return function(*args, **(kwargs or {}))

    from polyamp_keras.engine import ENGINE

    monkeypatch.setattr(ENGINE, "read_without_wait", lambda flag: None)
    ours = polyamp_keras.LossScaleOptimizer(polyamp.sgd(0.1), polyamp.LossScaler())
    loss, gradients = keras.ops.ones(()), [keras.ops.full((2,), value) for value in (1.0, 1.0, np.inf)]
    counts = []
    for optimizer in (SGD(0.1), keras_scaler(), polyamp_scaler(), ours):
        variable = keras.Variable([1.0, 1.0])
        optimizer.build([variable])
        reads.clear()
        with Reads():
            for gradient in gradients:
                optimizer.scale_loss(loss)
                optimizer.apply([gradient], [variable])
        counts.append(len(reads))
    alone, theirs, around_keras, around_spec = counts
    assert theirs >= alone * 2 // 3 + 5  # it reads two flags in each of two applied steps, and one in the skipped one
    assert (around_keras, around_spec) == (alone, 0)  # Keras's own optimizers read their learning rate
