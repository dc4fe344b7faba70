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

    def counted(gradients: Any) -> Any:
        calls.append(len(gradients))
        return of_keras(gradients)

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


@pytest.mark.parametrize("compiled", [False, True])
def test_s10_one_number_among_many_that_is_not_finite_skips(backend: str, compiled: bool) -> None:
    """Under XLA the maximum of as many numbers is that of the others, where one is NaN."""
    variables = [keras.Variable(np.ones(size, "float32"), name=f"v{size}") for size in (3, 2**16)]
    optimizer = polyamp_keras.LossScaleOptimizer(polyamp.sgd(1.0), polyamp.LossScaler(init_scale=4.0))
    optimizer.build(variables)

    def update(gradients: Any) -> None:
        optimizer.scale_loss(keras.ops.ones(()))
        optimizer.apply(gradients, variables)

    def update_on_jax(gradients: Any) -> None:
        import jax

        optimizer.scale_loss(keras.ops.ones(()))
        state = ([v.value for v in optimizer.variables], gradients, [v.value for v in variables])
        weights, state = jax.jit(optimizer.stateless_apply)(*state)
        for variable, value in zip([*variables, *optimizer.variables], [*weights, *state], strict=True):
            variable.assign(value)

    run = update_on_jax if backend == "jax" and compiled else update
    if backend == "tensorflow" and compiled:
        import tensorflow as tf

        run = tf.function(update, jit_compile=True)
    for number, bad in enumerate((np.nan, np.inf, -np.inf)):
        large = np.linspace(-1.0, 1.0, 2**16, dtype="float32")
        large[1000 * number] = bad
        run([keras.ops.convert_to_tensor(each) for each in (np.ones(3, "float32"), large)])
        assert optimizer.skipped_steps == number + 1
        assert [name.rsplit("/", 1)[-1] for name in optimizer.not_finite()] == ["v65536"]
    for variable in variables:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), 1.0)
