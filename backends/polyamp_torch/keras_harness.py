"""`KerasTorchHarness`: Keras models on torch, for the conformance suite. Imported only for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from polyamp.contract.harness import DenseWeights
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp_keras.arrays import native_variable
from polyamp_keras.backend_choice import backend_name
from polyamp_keras.harness import Array, ComplexKernel, KerasHarness
from polyamp_torch.arrays import to_numpy
from polyamp_torch.harness import TorchHarness


class KerasTorchHarness(KerasHarness):
    """`Harness` for Keras on torch.

    Raises:
        UnsupportedError: Keras runs on another backend in this process.
    """

    to_numpy = staticmethod(to_numpy)

    def __init__(self) -> None:
        if backend_name() != "torch":
            raise UnsupportedError(
                "models of Keras on torch need Keras to run on torch. Received: Keras on its "
                f"{backend_name()!r} backend. Set KERAS_BACKEND=torch before Keras is imported."
            )
        self._torch = TorchHarness()

    def array(self, value: Array) -> Any:
        return self._torch.array(value)

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        raise UnsupportedError("on torch Keras computes with 64-bit numbers in 32 bits.")

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        inputs = keras.Input((600,))
        matrices = keras.ops.reshape(keras.layers.Identity()(inputs), (-1, 4, 4))
        linear = {"det": keras.Model(inputs, keras.ops.det(matrices))}  # of dense matrices: of others, torch takes
        families = super().sensitive()  # the transposed or the matrix itself, by its layout, which rounds differently
        return {**families, "linear algebra": {**families["linear algebra"], **linear}}

    def matmul(self, left: Any, right: Any) -> Any:
        return self._torch.matmul(left, right)

    def selected(self, values: Any, mask: Any) -> Any:
        return self._torch.selected(values, mask)

    def unusable(self, kind: str) -> Any:
        return self._torch.unusable(kind) if kind == "integer" else super().unusable(kind)

    def complex_dense(self, kernel: Array) -> Any:
        return ComplexKernel(kernel, lambda x, weight: torch.view_as_real(x.to(weight.dtype) @ weight).square().sum(-1))

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        raise UnsupportedError("Keras models on torch are trained in one process.")

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        if kind == "halving":
            raise UnsupportedError("torch's schedulers are stepped by the user.")
        trained = [native_variable(variable) for variable in model.trainable_variables]
        if kind == "adamw":
            return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.1)
        return torch.optim.SGD(trained, lr=learning_rate)
