"""Observer of the reference backend, which records training passes of an `MLP`: the shortest example of `Observer`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from polyamp.errors import ModelError, UnsupportedError, describe_value
from polyamp.parity.trace.observer import CaptureCallback, CaptureKind, DropoutCount, PassRecord, UniformSource
from polyamp.reference.arrays import Array, dtype_name
from polyamp.reference.models import MLP
from polyamp.reference.tensor import Tensor
from polyamp.results import LossFunction


class ReferenceObserver:
    """`polyamp.parity.trace.observer.Observer` for `MLP`.

    Example:
        >>> import polyamp
        >>> model, seen = MLP.random([4, 3, 1], seed=0), []
        >>> state = polyamp.init(model, polyamp.Recipe())
        >>> see = lambda path, what, array, dtype: seen.append((path, what, array.shape))
        >>> loss_fn = lambda m, x: polyamp.losses.mean_squared_error(m(x), 0 * m(x))
        >>> watched = ReferenceObserver().capture_pass(state, loss_fn, np.ones((2, 4), np.float32), see)
        >>> seen[0], seen[-1]
        (('dense0', 'input', (2, 4)), ('dense0', 'cotangent', (2, 3)))
        >>> sorted(watched.gradients)
        ['dense0/bias', 'dense0/kernel', 'dense1/bias', 'dense1/kernel']
    """

    def device(self, model: Any) -> str:
        """Return "cpu"."""
        return "cpu"

    @contextmanager
    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> Iterator[Any]:
        """Yield a copy of the model."""
        if not isinstance(model, MLP):
            raise ModelError(f"the reference backend watches models of class MLP. Received: {describe_value(model)}.")
        if wide:
            raise UnsupportedError("the reference backend trains in float32, and has no float64 to judge it by.")
        copies = [{name: np.array(array) for name, array in held.items()} for held in (model.parameters, model.running)]
        yield model.with_arrays(*copies)

    @contextmanager
    def disable_dropout(self, model: Any, draws: UniformSource | None) -> Iterator[DropoutCount]:
        """Do nothing: an `MLP` draws no random numbers."""
        yield DropoutCount()

    def capture_pass(self, state: Any, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        """Run one pass; hooks of the layers record outputs and cotangents."""
        scale = float(state.scale_state.scale) if state.recipe.loss_scaler.scales else 1.0
        calls: Counter[str] = Counter()

        def tell(path: str, what: CaptureKind, array: Array, by: float) -> None:
            on_capture(path, what, _unscaled_copy(array, by), dtype_name(array.dtype))

        def shown(path: str, output: Tensor, given: Tensor | None) -> Tensor:
            calls[path] += 1
            named = path if calls[path] == 1 else f"{path}#{calls[path]}"
            if given is not None:
                tell(named, "input", given.data, 1.0)
            tell(named, "output", output.data, 1.0)

            def back(cotangent: Array) -> Array:
                tell(named, "cotangent", cotangent, scale)
                return cotangent

            return Tensor(output.data, [(output, back)])

        model = state.model.with_arrays(state.model.parameters, state.model.running)
        model.shown = shown
        result, (grads,) = state.backend.value_and_grad(loss_fn)([msgspec.structs.replace(state, model=model)], batch)
        loss = result[0] if isinstance(result, tuple) else result
        gradients = {
            name: None if value is None else _unscaled_copy(value, 1.0) for name, value in grads.values.items()
        }
        return PassRecord(float(loss), gradients)


def _unscaled_copy(array: Array, by: float) -> Array:
    """Return a copy in float32 or float64, divided by the loss scale."""
    wide = array.astype(np.promote_types(array.dtype, np.float32) if array.dtype.kind == "f" else np.float32)
    return np.asarray(wide if by == 1.0 else wide / wide.dtype.type(by))
