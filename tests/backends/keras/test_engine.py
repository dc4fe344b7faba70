"""The engine of this Keras backend has the verbs of its protocol, and measures gradients as S10 and S11 ask."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp_keras.engine import ENGINE, KerasEngine, StepEngine


def test_an_engine_has_the_verbs_of_its_protocol(backend: str) -> None:
    protocol = KerasEngine if backend == "tensorflow" else StepEngine
    for name, verb in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            given = list(inspect.signature(getattr(ENGINE, name)).parameters)
            assert given == list(inspect.signature(verb).parameters)[1:], name


def test_s11_a_norm_is_computed_only_where_it_clips(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm reads every gradient twice; what `fit` without a clip needs is whether one is not finite."""
    if backend == "tensorflow":
        assert not hasattr(ENGINE, "global_norm")  # its step is polyamp_tensorflow's
        return
    calls: list[int] = []
    of_keras = ENGINE.global_norm

    def counted(gradients: Any, magnitudes: Any) -> Any:
        calls.append(len(gradients))
        return of_keras(gradients, magnitudes)

    monkeypatch.setattr(ENGINE, "global_norm", counted)

    def weights(gradients: Any, **limits: Any) -> list[Any]:
        variables = [keras.Variable(np.zeros(2, "float32")) for _ in gradients]
        optimizer = polyamp_keras.LossScaleOptimizer(polyamp.sgd(1.0), polyamp.LossScaler(init_scale=4.0), **limits)
        optimizer.build(variables)
        optimizer.scale_loss(keras.ops.ones(()))
        optimizer.apply([keras.ops.convert_to_tensor(np.float32(gradient)) for gradient in gradients], variables)
        return [keras.ops.convert_to_numpy(variable.value).tolist() for variable in variables]

    assert weights([[12.0, 0.0], [0.0, 16.0]]) == [[-3.0, 0.0], [0.0, -4.0]]
    assert weights([[12.0, 0.0], [np.nan, 16.0]]) == [[0.0, 0.0], [0.0, 0.0]]
    assert calls == []
    assert weights([[1.2e31, 0.0], [0.0, 1.6e31]], clip_norm=1.0) == [
        pytest.approx([-0.6, 0.0], rel=1e-6),
        pytest.approx([0.0, -0.8], rel=1e-6),
    ]
    assert calls == [2]
