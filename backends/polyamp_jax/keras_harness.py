"""`KerasJaxHarness`: Keras models on JAX, for the conformance suite. Imported only for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from polyamp.errors import UnsupportedError
from polyamp_jax.arrays import to_numpy
from polyamp_jax.harness import JaxHarness
from polyamp_keras.backend_choice import backend_name
from polyamp_keras.harness import KerasHarness


class KerasJaxHarness(KerasHarness, JaxHarness):
    """`Harness` for Keras on JAX. Arrays, products, replicas and native optimizers are those of `JaxHarness`.

    Raises:
        UnsupportedError: Keras runs on another backend in this process.
    """

    to_numpy = staticmethod(to_numpy)
    float64 = JaxHarness.float64

    def __init__(self) -> None:
        if backend_name() != "jax":
            raise UnsupportedError(
                "models of Keras on JAX need Keras to run on JAX. Received: Keras on its "
                f"{backend_name()!r} backend. Set KERAS_BACKEND=jax before Keras is imported."
            )
        super().__init__()

    def unusable(self, kind: str) -> Any:
        return super().unusable(kind) if kind in ("empty", "float16") else JaxHarness.unusable(self, kind)

    def with_frozen(self, state: Any, numbers: Collection[int]) -> Any:
        super().with_frozen(state, numbers)
        return state.model
