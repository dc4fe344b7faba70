"""Models whose outputs are given numbers, for tests of losses, and gradients by central differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import polyamp
from polyamp.conformance.problems import Array
from polyamp.contract.harness import DenseWeights, Harness

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend


def logits_state(harness: Harness, logits: Array, made: polyamp.Recipe) -> Any:
    """A model whose only kernel is `logits`, so that its output for the rows of the identity is."""
    return polyamp.init(harness.mlp([DenseWeights(logits, np.zeros(logits.shape[1], np.float32))]), made)


def numeric_gradient(function: Any, at: Array) -> Array:
    """The gradient of a function of one array, by central differences."""
    found = np.zeros(at.shape)
    for index in np.ndindex(*at.shape):
        step = np.zeros(at.shape)
        step[index] = 1e-5
        found[index] = (function(at + step) - function(at - step)) / 2e-5
    return found


def logits_gradient(backend: Backend, gradients: polyamp.Gradients, shape: tuple[int, ...]) -> Array:
    """The gradient of the kernel of `logits_state`."""
    found = [backend.to_numpy(gradient) for _, gradient in backend.named_gradients(gradients)]
    kernel = next(value for value in found if value.ndim == 2)
    return kernel if kernel.shape == shape else kernel.T  # torch keeps (out, in)
