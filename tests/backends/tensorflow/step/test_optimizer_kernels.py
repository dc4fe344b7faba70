"""TensorFlow's training kernels in the place of a spec's own formula: the same numbers, one operation a parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp_tensorflow import SpecOptimizer, arrays

SPECS = [
    polyamp.sgd(0.1),
    polyamp.sgd(0.1, weight_decay=0.1),
    polyamp.sgd(0.1, momentum=0.9, weight_decay=0.1),
    polyamp.sgd(0.1, momentum=0.9, nesterov=True),
    polyamp.adam(0.01),
    polyamp.adam(0.01, eps=0.1, weight_decay=0.1),
    polyamp.adam(0.01, betas=(0.0, 0.0)),
    polyamp.adam(0.01, betas=(0.5, 0.5)),
    polyamp.adamw(0.01, eps=1e-3, weight_decay=0.1),
    polyamp.adamw(polyamp.schedules.warmup_cosine(0.1, warmup_steps=3, total_steps=8)),
]
RNG = np.random.default_rng(0)
START = RNG.standard_normal((5, 3))
GRADIENTS = RNG.standard_normal((8, 5, 3)) * 10.0 ** RNG.integers(-6, 3, (8, 5, 3))


def trained(spec: Any, dtype: str) -> tuple[Any, Any]:
    """The parameter after eight updates, and the graph function that made them."""
    variable = keras.Variable(START.astype(dtype), dtype=dtype)
    optimizer = SpecOptimizer(spec)
    optimizer.build([variable])

    @tf.function
    def update(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    for gradient in GRADIENTS:
        update(tf.constant(gradient.astype(dtype)))
    return arrays.to_numpy(variable), update


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_the_kernels_have_the_formula_of_the_spec(spec: Any) -> None:
    """Against the formula in float64, which runs without a kernel; the first updates, where Adam's powers are close to
    1, included."""
    found, _ = trained(spec, "float32")
    wanted, _ = trained(spec, "float64")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("spec", "operation"),
    [
        (polyamp.sgd(), "ResourceApplyGradientDescent"),
        (polyamp.sgd(momentum=0.9), "ResourceApplyMomentum"),
        (polyamp.adam(), "ResourceApplyAdam"),
        (polyamp.adamw(), "ResourceApplyAdam"),
    ],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_one_operation_updates_a_parameter(spec: Any, operation: str) -> None:
    _, update = trained(spec, "float32")
    graph = update.get_concrete_function(tf.TensorSpec(START.shape, tf.float32)).graph
    assert Counter(op.type for op in graph.get_operations())[operation] == 1


def test_float64_and_other_specs_run_their_own_formula() -> None:
    small = polyamp.adam(betas=(0.9, 0.3))  # the kernel would lose digits
    for spec, dtype in ((polyamp.adam(), "float64"), (polyamp.lion(), "float32"), (small, "float32")):
        _, update = trained(spec, dtype)
        graph = update.get_concrete_function(tf.TensorSpec(START.shape, dtype)).graph
        assert not [op.type for op in graph.get_operations() if op.type.startswith("ResourceApply")]


def test_a_parameter_in_16_bits_is_updated_in_float32() -> None:
    variable = keras.Variable(np.ones(3, np.float32), dtype="bfloat16")
    optimizer = SpecOptimizer(polyamp.adam(1.0))
    optimizer.apply([tf.constant([1.0, 2.0, 3.0])], [variable])
    assert [slot.dtype for slot in optimizer.named_slots(["w"]).values()] == ["float32", "float32"]
    np.testing.assert_allclose(arrays.to_numpy(variable).astype(np.float32), np.zeros(3, np.float32), atol=2e-7)
