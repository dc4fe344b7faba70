"""S4: each family of `polyamp.rules.float32_op_families`, in functional models and in a `Lambda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp import Policy
from polyamp.errors import PolicyError
from polyamp.rules.float32_op_families import OP_FAMILIES
from polyamp_keras.precision import op_list
from polyamp_tensorflow import apply_policy

ops: Final = keras.ops
X: Final = np.linspace(0.1, 2.0, 32, dtype=np.float32).reshape(2, 4, 4) + 4 * np.eye(4, dtype=np.float32)
OPERATIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "exponentials": lambda x: ops.exp(x) + ops.sinh(x) + ops.cosh(x) + ops.softplus(x),
    "logarithms": lambda x: ops.log(x) + ops.log1p(x),
    "powers": lambda x: ops.power(x, 3.0) * ops.rsqrt(x),
    "sums": lambda x: ops.sum(x, axis=-1) + ops.var(x, axis=-1),
    "sums by segment": lambda x: ops.segment_sum(x[0], np.array([0, 0, 1, 1]), num_segments=2),
    "cumulative sums": lambda x: ops.cumsum(x, axis=-1),
    "softmax": lambda x: ops.softmax(x) + ops.log_softmax(x),
    "normalisation": lambda x: ops.layer_normalization(x, epsilon=1e-5) + ops.normalize(x),
    "losses": lambda x: ops.binary_crossentropy(ops.ones_like(x), x / 16),
    "linear algebra": lambda x: ops.inv(x) + ops.cholesky(x),
    "determinants": lambda x: ops.det(x) + ops.slogdet(x)[1],
    "FFT": lambda x: ops.rfft(x)[0],
}
FUNCTIONS: Final[dict[str, tuple[Callable[[Any], Any], ...]]] = {
    "exponentials": (tf.math.cosh, ops.exp2),
    "logarithms": (tf.math.log1p, ops.log10),
    "powers": (tf.math.rsqrt,),
    "sums": (tf.reduce_mean, tf.math.reduce_std),
    "cumulative sums": (tf.math.cumulative_logsumexp,),
    "softmax": (ops.logsumexp, tf.nn.softmax, tf.nn.log_softmax),
    "normalisation": (ops.normalize, tf.math.l2_normalize, tf.norm),
    "losses": (tf.nn.l2_loss,),
    "linear algebra": (tf.linalg.inv, ops.det, tf.linalg.svd, tf.linalg.slogdet),
    "FFT": (tf.signal.rfft,),
}


def _agrees_with_float32(model: Any) -> bool:
    """Compare under a mixed policy with float32, on numbers that 16 bits represent exactly."""
    narrow = tf.cast(X, tf.bfloat16)
    want = keras.tree.flatten(model(tf.cast(narrow, tf.float32)))
    with apply_policy(model, Policy("mixed_bfloat16"), heads=False):
        got = keras.tree.flatten(model(narrow))
    return all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))


def _functional(function: Callable[[Any], Any]) -> Any:
    inputs = keras.Input((4, 4), batch_size=2)
    return keras.Model(inputs, function(keras.layers.Identity()(inputs)))


def test_s04_the_op_list_has_every_family() -> None:
    assert OP_FAMILIES.keys() - op_list.SENSITIVE.keys() == set()
    assert OP_FAMILIES.keys() - OPERATIONS.keys() == set()


@pytest.mark.parametrize("family", OPERATIONS)
def test_s04_operations_of_a_functional_model_run_in_float32(family: str) -> None:
    assert _agrees_with_float32(_functional(OPERATIONS[family]))


@pytest.mark.parametrize(
    "function", [pytest.param(f, id=f"{family}-{f.__name__}") for family, each in FUNCTIONS.items() for f in each]
)
def test_s04_a_lambda_around_a_function_of_a_family_runs_in_float32(function: Callable[[Any], Any]) -> None:
    assert _agrees_with_float32(_functional(keras.layers.Lambda(function)))


def test_the_operations_of_the_list_are_kerass() -> None:
    def every(kind: Any) -> Iterator[str]:
        yield kind.__name__
        for inner in kind.__subclasses__():
            yield from every(inner)

    assert (
        op_list.split_names(" ".join(f.operations for f in op_list.SENSITIVE.values())) - set(every(keras.Operation))
        == set()
    )


def test_s04_tensorflows_softmax_is_one_as_an_activation_too() -> None:
    """TensorFlow names it "softmax_v2"."""
    named = [keras.layers.Dense(4, activation=tf.nn.softmax, name=name) for name in ("inside", "last")]
    model = keras.Sequential([keras.Input((4,)), named[0], keras.layers.Dense(4, name="between"), named[1]])
    with apply_policy(model, Policy("mixed_bfloat16"), heads=False) as applied:
        dtypes = [applied.choices[path] for path in ("inside", "between", "last")]
    assert dtypes == [("float32", "sensitive"), ("bfloat16", "compute"), ("float32", "sensitive")]
    with pytest.raises(PolicyError, match="'last' gives probabilities"):
        apply_policy(model, Policy("mixed_bfloat16", overrides={"last": "bfloat16"}))


@pytest.mark.parametrize("activation", ["softmax", "log_softmax", "sparsemax", "sigmoid", "log_sigmoid"])
def test_s04_a_head_that_gives_probabilities_takes_no_override_to_16_bits(activation: str) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation=activation, name="last")])
    with pytest.raises(PolicyError, match="'last' gives probabilities"):
        apply_policy(model, Policy("mixed_bfloat16", overrides={"last": "bfloat16"}))
