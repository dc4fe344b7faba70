"""The global norm and the finite flag: at the edges of float32, in every way to run, and what they leave in a graph."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from polyamp_tensorflow.step.grad_stats import global_norm_and_finite

INF, NAN = float("inf"), float("nan")
EDGES: list[tuple[str, list[Any], float, bool]] = [
    ("ordinary", [tf.constant([3.0, 0.0]), tf.constant(4.0)], 5.0, True),
    ("an empty tensor", [tf.zeros((0, 4)), tf.constant([3.0, 4.0])], 5.0, True),
    ("nothing but zeros", [tf.zeros(3)], 0.0, True),
    ("squares vanish", [tf.fill([4], 1e-30)], 2e-30, True),
    ("squares are almost too small", [tf.fill([4], 1e-22)], 2e-22, True),
    ("squares overflow", [tf.fill([2], 1e20), tf.fill([2], 1e20)], 2e20, True),
    ("a huge and a tiny one", [tf.constant([1e30]), tf.constant([1e-30])], 1e30, True),
    ("a scalar and an empty tensor, huge", [tf.constant(1e30), tf.zeros((0,))], 1e30, True),
    ("the norm leaves float32, no gradient does", [tf.fill([4], 3e38)], INF, True),
    ("inf", [tf.ones(3), tf.constant([1.0, -INF])], NAN, False),
    ("NaN", [tf.ones(3), tf.constant([NAN, 1e30])], NAN, False),
    ("float64", [tf.fill([4], tf.constant(1e30, tf.float64)), tf.ones(2, tf.float64)], 2e30, True),
    ("three dtypes", [tf.cast([1e30, 0], d) for d in (tf.float64, tf.float32, tf.bfloat16)], math.sqrt(3) * 1e30, True),
    ("16 bit", [tf.ones(9, tf.float16), tf.ones(16, tf.bfloat16)], 5.0, True),
    (
        "slices",
        [tf.IndexedSlices(tf.constant([[3e30]]), tf.constant([1]), tf.constant([4, 1])), tf.fill([1], 4e30)],
        5e30,
        True,
    ),
]
WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda function: function,
    "graph": lambda function: tf.function(function, autograph=False),
    "AutoGraph": tf.function,
    "XLA": lambda function: tf.function(function, jit_compile=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("gradients", "norm", "finite"), [row[1:] for row in EDGES], ids=[row[0] for row in EDGES])
def test_s10_norm_and_flag_at_the_edges(gradients: list[Any], norm: float, finite: bool, way: str) -> None:
    found = WAYS[way](lambda: global_norm_and_finite(gradients))()
    wide = tf.float64 if any(gradient.dtype == tf.float64 for gradient in gradients) else tf.float32  # S1
    assert [(value.dtype, value.shape) for value in found] == [(wide, ()), (tf.bool, ())]
    assert bool(found[1]) is finite
    if finite:
        assert float(found[0]) == pytest.approx(norm, rel=2e-3 if gradients[-1].dtype == tf.bfloat16 else 1e-6, abs=0.0)
    else:
        assert not math.isfinite(found[0])


@pytest.mark.parametrize("shape", [None, [None]])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_s10_shapes_that_the_graph_does_not_know(shape: Any, size: float) -> None:
    traced = tf.function(
        lambda gradient: global_norm_and_finite([gradient]), input_signature=[tf.TensorSpec(shape, tf.float32)]
    )
    norm, finite = traced(tf.fill([4], size))
    assert (float(norm), bool(finite)) == (pytest.approx(2 * size), True)


@pytest.mark.parametrize("graph", [False, True])
def test_s10_each_replica_has_its_own(two_cpus: Any, graph: bool) -> None:
    def own() -> Any:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return global_norm_and_finite([tf.fill([4], tf.constant([1.0, 1e30, NAN])[tf.cast(index, tf.int32) + 1])])

    def run() -> Any:
        return [two_cpus.experimental_local_results(value) for value in two_cpus.run(own)]

    norms, flags = (tf.function(run, autograph=False) if graph else run)()
    assert float(norms[0]) == pytest.approx(2e30)
    assert math.isnan(norms[1])
    assert [bool(flag) for flag in flags] == [True, False]


def traced(gradients: Sequence[Any]) -> Any:
    return tf.function(lambda: global_norm_and_finite(gradients), autograph=False).get_concrete_function()


def test_s10_no_gradient_goes_through_a_switch() -> None:
    branching = [node for node in traced([tf.ones(3)] * 9).graph.as_graph_def().node if node.op.endswith("If")]
    assert len(branching) == 1
    assert not branching[0].attr["_lower_using_switch_merge"].b


def test_s10_a_traced_norm_goes_with_its_program(caplog: pytest.LogCaptureFixture) -> None:
    program = traced([tf.ones(3), tf.ones((2, 2))])
    graph = weakref.ref(program.graph)
    del program
    gc.collect()
    assert graph() is None
    assert not caplog.records
