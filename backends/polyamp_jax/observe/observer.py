"""`JaxObserver`: the `polyamp.parity.trace.observer.Observer` protocol for JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from polyamp.parity.trace.observer import CaptureCallback, PassRecord, UniformSource
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.observe.capture import PassCapture, PassTraceInfo
from polyamp_jax.observe.dropout import disable_dropout
from polyamp_jax.observe.jax_only.named_gradients import LeafGradients, host_array
from polyamp_jax.observe.model_copy import model_copy
from polyamp_jax.step.error_hints import explain_error


class JaxObserver:
    """Recorder of JAX training passes; implements `Observer`."""

    def __init__(self) -> None:
        self._captures: dict[int, PassCapture] = {}

    @contextlib.contextmanager
    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> Iterator[Any]:
        with model_copy(model, wide=wide, inference=inference) as made:
            try:
                yield made
            finally:
                self._captures.clear()

    def disable_dropout(self, model: Any, draws: UniformSource | None) -> contextlib.AbstractContextManager[None]:
        return disable_dropout(draws)

    def capture_pass(self, state: Any, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        watching = self._captures.setdefault(id(loss_fn), PassCapture(loss_fn))
        try:
            with compat.separate_trace_cache("watch", strictly=False):
                passed = watching(state, batch)
        except Exception as error:
            said = explain_error(error, batch)
            if said is None:
                raise
            raise said from error
        found: PassTraceInfo = passed.found.value
        dtypes = [str(array.dtype) for array in passed.arrays]
        arrays, cotangents = passed.arrays, passed.cotangents
        for number, (path, what) in enumerate(found.shown):
            on_capture(path, what, host_array(arrays[number]), dtypes[number])
            arrays[number] = None  # free each array once it is reported
        for number in reversed(range(len(found.shown))):
            if cotangents[number] is not None:
                on_capture(found.shown[number][0], "cotangent", host_array(cotangents[number]), dtypes[number])
                cotangents[number] = None
        return PassRecord(
            float(passed.loss), LeafGradients(state, passed.gradients), found.operations, found.hidden_reason
        )


OBSERVER: Final = JaxObserver()
