"""A Keras optimizer's step count and learning rate are read once an update, and its numbers stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp_tensorflow.step.tensorflow_only.scalar_reads import ScalarReads, share_scalar_reads

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "schedule, decay": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), weight_decay=0.1
    ),
    "average": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=2),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "members": lambda: keras.optimizers.MultiOptimizer(
        lambda variable: keras.optimizers.Adam(0.1) if variable.shape == (3,) else keras.optimizers.RMSprop(0.2)
    ),
}


def built(name: str) -> tuple[Any, list[Any]]:
    variables = [
        keras.Variable(np.arange(3, dtype=np.float32), constraint=keras.constraints.NonNeg()),
        keras.Variable(np.ones((2, 2), np.float32)),
    ]
    optimizer = OPTIMIZERS[name]()
    optimizer.build(variables)
    return optimizer, variables


def traced(optimizer: Any, variables: list[Any], *, shared: bool) -> Any:
    def update(gradients: list[Any]) -> None:
        if not shared:
            optimizer.apply(gradients, variables)
            return
        with share_scalar_reads(optimizer):
            optimizer.apply(gradients, variables)

    return update


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_keras_bit_for_bit(name: str, graph: bool) -> None:
    rng = np.random.default_rng(0)
    steps = [[rng.standard_normal(shape).astype(np.float32) for shape in ((3,), (2, 2))] for _ in range(4)]
    found = []
    for shared in (True, False):
        optimizer, variables = built(name)
        update = traced(optimizer, variables, shared=shared)
        update = tf.function(update, autograph=False) if graph else update
        for number, gradients in enumerate(steps):
            if number == 2 and "schedule" not in name and name != "members":
                optimizer.learning_rate = 0.05
            update([tf.constant(gradient) for gradient in gradients])
        found.append([variable.numpy() for variable in [*variables, *optimizer.variables]])
    assert int(optimizer.iterations) == 4
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_graph_reads_each_once() -> None:
    counts = []
    for shared in (True, False):
        optimizer, variables = built("adam")
        update = tf.function(traced(optimizer, variables, shared=shared), autograph=False)
        graph = update.get_concrete_function([tf.zeros(3), tf.zeros((2, 2))]).graph
        inner = {id(outer): tensor for outer, tensor in graph.captures}
        scalars = [inner[id(variable.value.handle)] for variable in (optimizer.iterations, optimizer.learning_rate)]
        counts.append([[op.type for op in scalar.consumers()].count("ReadVariableOp") for scalar in scalars])
    assert counts[0] == [1, 1]
    assert counts[1][0] > 2
    assert counts[1][1] >= 2


def test_an_assignment_acts_at_once_and_is_read_from_then_on() -> None:
    count, other = keras.Variable(1.0), keras.Variable(5.0)

    def body() -> Any:
        with ScalarReads([(count, count.value.read_value())]):
            before = count + 0.0
            count.assign(count + 1.0)
            other.assign(other + count)
            return before, count + 0.0

    for number in (1.0, 2.0):
        assert [float(value) for value in tf.function(body, autograph=False)()] == [number, number + 1.0]
    assert (float(count), float(other)) == (3.0, 10.0)


def test_a_class_outside_keras_is_left_as_it_is() -> None:
    class OwnCount(keras.optimizers.SGD):  # type: ignore[misc]  # Keras is untyped
        """Writes to the variable inside Keras's."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.iterations.value.assign_add(1)
            super().update_step(gradient * keras.ops.cast(self.iterations, "float32"), variable, learning_rate)

    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer = OwnCount(1.0)
    optimizer.build([variable])
    tf.function(traced(optimizer, [variable], shared=True), autograph=False)([tf.ones(2)])
    np.testing.assert_array_equal(variable.numpy(), [-1.0, -1.0])
    assert int(optimizer.iterations) == 2
