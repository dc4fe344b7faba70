"""`JaxObserver`: `polyamp.parity.observing.Observer` over JAX. Called by `JaxBackend.observer`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from polyamp.parity.observing import Draws, See, Watched
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.observe.named import Gradients, host
from polyamp_jax.observe.stillness import still
from polyamp_jax.observe.watching import Found, Watching
from polyamp_jax.observe.working import working
from polyamp_jax.step.failures import explained


class JaxObserver:
    """`Observer` over JAX."""

    def __init__(self) -> None:
        self._watching: dict[int, Watching] = {}

    @contextlib.contextmanager
    def working(self, model: Any, *, wide: bool = False, inference: bool = False) -> Iterator[Any]:
        with working(model, wide=wide, inference=inference) as made:
            try:
                yield made
            finally:
                self._watching.clear()

    def still(self, model: Any, draws: Draws | None) -> contextlib.AbstractContextManager[None]:
        return still(draws)

    def watch(self, state: Any, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
        watching = self._watching.setdefault(id(loss_fn), Watching(loss_fn))
        try:
            with compat.apart("watch", strictly=False):
                passed = watching(state, batch)
        except Exception as error:
            said = explained(error, batch)
            if said is None:
                raise
            raise said from error
        found: Found = passed.found.value
        dtypes = [str(array.dtype) for array in passed.arrays]
        arrays, cotangents = passed.arrays, passed.cotangents
        for number, (path, what) in enumerate(found.shown):
            see(path, what, host(arrays[number]), dtypes[number])
            arrays[number] = None  # one after the other is let go
        for number in reversed(range(len(found.shown))):
            if cotangents[number] is not None:
                see(found.shown[number][0], "cotangent", host(cotangents[number]), dtypes[number])
                cotangents[number] = None
        return Watched(float(passed.loss), Gradients(state, passed.gradients), found.operations, found.unseen)


OBSERVER: Final = JaxObserver()
