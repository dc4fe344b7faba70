"""`model_copy`: private copies of models for a comparison, in float64 on request.

JAX arrays are immutable, and only nnx models are mutable objects: these are cloned. The float64 copy converts a
model's arrays and the `dtype` settings of flax layers, which would otherwise cast back to fewer bits. haiku, equinox
and plain functions compute in the dtype of their inputs. Casts in the user's own program remain. A Keras model is run
itself, and has its values back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.libraries import adapt
from polyamp_jax.observe.jax_only.library_observer import loaded_observers, observer_of


@contextlib.contextmanager
def model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Return the context manager of `Observer.model_copy`. With `wide`, x64 is on for this thread inside the block."""
    adapt(model)  # raises if it is not a model
    with contextlib.ExitStack() as stack:
        if wide:
            stack.enter_context(compat.enable_float64())
            for observer in loaded_observers():
                observer.use_float64(stack)
        yield observer_of(model).open_copy(model, stack, wide=wide, inference=inference)
