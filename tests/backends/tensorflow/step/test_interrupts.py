"""Ctrl-C at any line of a step: what is left on is taken off by the next step, which gives what it always gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe

import polyamp
import polyamp_tensorflow
from polyamp_keras.interrupts import _OPEN_BLOCKS, close_stale_blocks
from polyamp_tensorflow import apply_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*polyamp.losses.regularization")  # S25: the model has a regularizer
FOLDER = str(Path(polyamp_tensorflow.__file__).parent)
POLICY = polyamp.Policy(compute="bfloat16", float32_matmul="high")
PER_KIND = int(os.environ.get("POLYAMP_INTERRUPTS", "12"))
"""How many lines of a step are interrupted."""


def interrupted(action: Callable[[], Any], number: int) -> int:
    """Run the action with a KeyboardInterrupt at the given line of this package, counted as they run; how many ran."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert lines == number
    finally:
        sys.settrace(None)
    return lines


def what_is_on(model: Any, optimizer: Any) -> list[str]:
    """What a step sets for a time."""
    layers = model._flatten_layers() if isinstance(model, keras.Layer) else []
    left = [f"{layer.path}: {layer.compute_dtype}" for layer in layers if layer.compute_dtype != "float32"]
    left += [f"{layer.path}.call" for layer in layers if {"call", "add_loss", "_polyamp_policies"} & set(vars(layer))]
    if isinstance(model, tf.Module) and not isinstance(model, keras.Layer):
        left += [name for name, value in vars(model).items() if name == "kernel" and not isinstance(value, tf.Variable)]
    left += [name for name in vars(optimizer) if name.startswith(("_all_reduce", "_filter"))]
    if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
        left.append("a tape")
    if not tf.config.experimental.tensor_float_32_execution_enabled():
        left.append("TF32 is off")
    return left


class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(np.full((4, 2), 0.5, np.float32), name="kernel")
        self.spare = tf.Variable(np.ones(2, np.float32), name="spare")

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.kernel)


def layered() -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, kernel_initializer="ones", activity_regularizer="l2")(inputs)
    hidden = keras.layers.LayerNormalization()(hidden)
    spare = keras.layers.Dense(1)(hidden)  # S23: the optimizer's methods are stood in for
    return keras.Model(inputs, [keras.layers.Dense(2, kernel_initializer="ones")(hidden), spare])


KINDS: dict[str, tuple[Callable[[], Any], str]] = {"layers": (layered, "autocast"), "module": (Linear, "cast")}
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> Any:
    first, *_ = keras.tree.flatten(model(batch))
    return tf.reduce_mean(tf.square(tf.cast(first, tf.float32) - 1.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compile", [False, True])
def test_the_next_step_is_clean(kind: str, compile: bool) -> None:  # noqa: A002
    make, mode = KINDS[kind]
    recipe = polyamp.Recipe(
        policy=POLICY.replace(mode=mode), optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=64.0)
    )

    def fresh() -> tuple[Any, Any]:
        return polyamp.init(make(), recipe), polyamp.train_step(loss_fn, recipe, compile=compile)

    def losses(state: Any, step: Any, count: int) -> list[float]:
        return [float(step(state, X)[1].loss) for _ in range(count)]

    wanted = losses(*fresh(), 3)
    state, step = fresh()
    total = interrupted(lambda: step(state, X), 0)
    assert total > 100, "the step was traced"
    left: dict[int, list[str]] = {}
    for number in np.unique(np.linspace(1, total, PER_KIND // 3 if compile else PER_KIND, dtype=int)):
        state, step = fresh()
        interrupted(lambda step=step, state=state: step(state, X), int(number))  # type: ignore[misc]  # bound now
        found = losses(state, step, 2)
        whole = found in (wanted[:2], wanted[1:])  # the interrupted step was made, or was not
        assert whole or not compile, (number, found)  # without a graph an update is made line by line
        if on := what_is_on(state.model, state.optimizer):
            left[int(number)] = on
    assert not left
    assert not _OPEN_BLOCKS


def test_a_policy_for_good_is_on_or_off() -> None:
    model = layered()
    total = interrupted(lambda: apply_policy(model, POLICY).restore(), 0)
    for number in np.unique(np.linspace(1, total, PER_KIND, dtype=int)):
        applied: list[Any] = []
        interrupted(lambda applied=applied: applied.append(apply_policy(model, POLICY)), int(number))  # type: ignore[misc]
        if applied:
            interrupted(applied[0].restore, int(number))
            applied[0].restore()
        assert not what_is_on(model, model), number


def test_an_open_block_is_not_taken_for_a_stale_one() -> None:
    """A step inside the loss of another: its repair leaves the outer one's policy on."""
    recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1))
    outer, inner = polyamp.init(layered(), recipe), polyamp.init(layered(), recipe)
    seen = []

    def nested(model: Any, batch: Any) -> Any:
        before = len(_OPEN_BLOCKS)
        polyamp.value_and_grad(loss_fn, compile=False)(inner, X)
        close_stale_blocks()
        seen.append((before, len(_OPEN_BLOCKS), outer.model.layers[1].compute_dtype))
        return loss_fn(model, batch)

    polyamp.train_step(nested, recipe, compile=False)(outer, X)
    assert seen == [(2, 2, "bfloat16")], "the tape and the layers' policies"
    assert not _OPEN_BLOCKS
