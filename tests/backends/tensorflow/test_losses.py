"""TensorFlow: chunked losses in graphs: the size of their tensors, lengths that a trace does not know, XLA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp

RNG = np.random.default_rng(0)
HIDDEN, WEIGHT = RNG.normal(size=(2, 32, 4)).astype(np.float32), RNG.normal(size=(500, 4)).astype(np.float32)
TOKENS = RNG.integers(0, 500, (2, 32))


def chunked(hidden: Any, weight: Any, tokens: Any, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([hidden, weight])
        loss = polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=8, z_loss=0.1, **options)
    return loss, tape.gradient(loss, [hidden, weight])


def whole() -> Any:
    hidden, weight = tf.constant(HIDDEN), tf.constant(WEIGHT)
    with tf.GradientTape() as tape:
        tape.watch([hidden, weight])
        loss = polyamp.losses.causal_language_model(tf.matmul(hidden, weight, transpose_b=True), TOKENS, z_loss=0.1)
    return loss, tape.gradient(loss, [hidden, weight])


def operations(graph: Any) -> Iterator[Any]:
    """The operations of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for function in graph.as_graph_def().library.function:
        yield from graph._get_function(function.signature.name).graph.get_operations()


def test_s24_no_tensor_of_the_graph_holds_more_than_a_chunks_logits() -> None:
    made = tf.function(chunked).get_concrete_function(tf.constant(HIDDEN), tf.constant(WEIGHT), tf.constant(TOKENS))
    shapes = [tensor.shape for operation in operations(made.graph) for tensor in operation.outputs]
    known = [int(np.prod(shape.as_list())) for shape in shapes if shape.is_fully_defined()]
    assert max(known) == 2 * 4 * 500


@pytest.mark.parametrize("how", ["eager", "known", "unknown", "xla"])
def test_s24_chunks_are_the_whole_however_they_are_traced(how: str) -> None:
    arguments = tf.constant(HIDDEN), tf.constant(WEIGHT), tf.constant(TOKENS)
    unknown = [tf.TensorSpec((None, None, 4)), tf.TensorSpec((500, 4)), tf.TensorSpec((None, None), tf.int64)]
    made = {
        "eager": chunked,
        "known": tf.function(chunked),
        "unknown": tf.function(chunked, input_signature=unknown),
        "xla": tf.function(chunked, jit_compile=True),
    }[how]
    loss, found = made(*arguments)
    expected, gradients = whole()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for one, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * float(tf.reduce_max(tf.abs(other))))
