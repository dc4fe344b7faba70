"""A warm step calls its trace directly, and `tf.function` where more than the tensors decides which trace it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp_tensorflow.step.tensorflow_only.graph_function import TraceLookup

HARNESS = polyamp_tensorflow.BACKEND.testing()


class Counted:
    """A `tf.function` that counts its calls and traces."""

    def __init__(self, body: Any) -> None:
        self.calls = self.traces = 0

        def traced(*tensors: Any) -> Any:
            self.traces += 1
            return body(*tensors)

        self.function = tf.function(traced, autograph=False)
        self.get_concrete_function = self.function.get_concrete_function

    def __call__(self, *tensors: Any) -> Any:
        self.calls += 1
        return self.function(*tensors)


def test_equal_shapes_go_past_the_function_and_others_are_traced_once() -> None:
    counted = Counted(lambda tree: tree["x"][0] + tf.cast(tree["n"], tf.float32))
    lookup = TraceLookup(counted)
    for size in (2, 3, 2, 3, 2):
        found = lookup({"x": (tf.ones(size), None), "n": tf.constant(size)})
        np.testing.assert_array_equal(found, np.full(size, 1.0 + size))
    assert (counted.calls, counted.traces) == (2, 2)
    lookup({"n": tf.constant(2.0), "x": (tf.ones(2), None)})  # another dtype
    lookup({"n": tf.constant(2), "x": [tf.ones(2), None]})  # another structure
    assert (counted.calls, counted.traces) == (4, 4)
    np.testing.assert_array_equal(lookup({"n": tf.constant(2), "x": (tf.ones(2), None)}), [3.0, 3.0])


def test_names_and_order_are_part_of_it() -> None:
    lookup = TraceLookup(tf.function(lambda tree: tree.get("a", tf.constant(0.0)) - tree["b"], autograph=False))
    one, two = tf.constant(1.0), tf.constant(2.0)
    for _ in range(2):
        assert float(lookup({"a": one, "b": two})) == -1.0
        assert float(lookup({"b": two, "a": one})) == -1.0
        assert float(lookup({"b": two, "c": one})) == -2.0


def test_what_is_no_plain_tensor_goes_to_the_function() -> None:
    counted = Counted(lambda tree: tf.reduce_sum(tree.values))
    lookup = TraceLookup(counted)
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert [float(lookup(ragged)) for _ in range(2)] == [6.0, 6.0]
    assert counted.calls == 2


def test_inside_of_a_graph_a_strategy_or_an_eager_run_the_function_decides() -> None:
    counted = Counted(lambda x: 2.0 * x)
    lookup = TraceLookup(counted)
    for _ in range(2):
        lookup(tf.constant(1.0))
    assert counted.calls == 1
    assert float(tf.function(lambda x: lookup(x) + 1.0, autograph=False)(tf.constant(3.0))) == 7.0
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert float(lookup(tf.constant(1.0))) == 2.0
    tf.config.run_functions_eagerly(True)
    try:
        lookup(tf.constant(1.0))
    finally:
        tf.config.run_functions_eagerly(False)
    assert counted.calls == 4


def test_gradients_through_a_trace_are_those_through_the_function() -> None:
    lookup = TraceLookup(tf.function(lambda x: x * x, autograph=False))
    x = tf.constant(3.0)
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = lookup(x)
        assert float(tape.gradient(y, x)) == 6.0


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_model_that_makes_variables_in_its_first_step_trains_on(jit_compile: bool) -> None:
    made = recipe(optimizer=polyamp.sgd(0.1))
    state = polyamp.init(HARNESS.mlp(layers()), made)
    extra: list[tf.Variable] = []

    def counting(model: Any, item: Any) -> Any:
        if not extra:
            extra.append(tf.Variable(0.0, trainable=False))
        return loss_fn(model, item), extra[0].read_value()

    step = polyamp.train_step(counting, made, jit_compile=jit_compile)
    losses = [float(step(state, batch())[1].loss) for _ in range(3)]
    ((lookup,),) = [list(programs.values()) for programs in state.programs.values()]
    assert losses == sorted(losses, reverse=True)
    assert len(lookup._traces) == 1
