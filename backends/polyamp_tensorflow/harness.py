"""`TensorFlowHarness`: Keras models on TensorFlow, for the conformance suite, the demo and parity runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import polyamp
from polyamp.contract.harness import DenseWeights
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp_keras.harness import KerasHarness
from polyamp_tensorflow.arrays import Array, to_numpy


class TensorFlowHarness(KerasHarness):
    """`Harness` for Keras. If created before TensorFlow starts, it configures two logical CPUs, which replicas need."""

    to_numpy = staticmethod(to_numpy)

    def __init__(self) -> None:
        (cpu, *_) = tf.config.list_physical_devices("CPU")
        with contextlib.suppress(RuntimeError):  # TensorFlow is already initialised; `replicate` then raises
            if not tf.config.get_logical_device_configuration(cpu):
                two = [tf.config.LogicalDeviceConfiguration()] * 2
                tf.config.set_logical_device_configuration(cpu, two)

    def array(self, value: Array) -> Any:
        return tf.convert_to_tensor(value)

    def matmul(self, left: Any, right: Any) -> Any:
        return tf.matmul(left, right)

    def selected(self, values: Any, mask: Any) -> Any:
        return tf.boolean_mask(values, mask)

    def unusable(self, kind: str) -> Any:
        if kind in ("integer", "complex"):
            return _LinearModule(np.ones((2, 2), {"integer": np.int32, "complex": np.complex64}[kind]))
        return super().unusable(kind)

    def complex_dense(self, kernel: Array) -> Any:
        raise UnsupportedError("the TensorFlow backend trains no complex parameters.")

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        devices = [device.name for device in tf.config.list_logical_devices("CPU")][: len(batches)]
        if len(devices) < len(batches):
            raise UnsupportedError(
                f"{len(batches)} replicas need as many logical CPUs, set before TensorFlow starts. Received: "
                f"{len(devices)}."
            )
        strategy = tf.distribute.MirroredStrategy(devices)
        with strategy.scope():
            state = polyamp.init(self.mlp(layers), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        for parts in zip(*batches, strict=True):
            whole = keras.tree.map_structure(lambda *members: np.concatenate(members), *parts)
            _, result = step(state, whole)
        return [(_ReplicaModel(state.model, strategy, number), result) for number in range(len(batches))]

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        if kind == "halving":
            halving = keras.optimizers.schedules.ExponentialDecay(learning_rate, 1, 0.5, staircase=True)
            return keras.optimizers.SGD(halving)
        if kind == "adamw":
            return keras.optimizers.AdamW(learning_rate, weight_decay=0.1, epsilon=1e-8)
        return keras.optimizers.SGD(learning_rate)


class _ReplicaModel:
    """One replica's copy of a model, limited to what `TensorFlowHarness.weights` reads."""

    def __init__(self, model: Any, strategy: Any, number: int) -> None:
        self.model = self
        self.layers = [
            _ReplicaDense(*(strategy.experimental_local_results(weight.value)[number] for weight in layer.weights))
            for layer in model.layers
            if isinstance(layer, keras.layers.Dense)
        ]


class _ReplicaDense(NamedTuple):
    """A dense layer's weights on one replica."""

    kernel: Any
    bias: Any


class _LinearModule(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """`tf.Module` with `trainable_variables`; not a Keras layer."""

    def __init__(self, kernel: Array) -> None:
        super().__init__()
        self.kernel = tf.Variable(kernel, name="kernel")

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.kernel)
