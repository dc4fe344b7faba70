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
from polyamp_jax.observe.watching import Watching
from polyamp_jax.observe.working import working


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
        with compat.apart("watch"):
            passed = watching(state, batch)
        found = passed.found.value
        dtypes = [str(output.dtype) for output in passed.outputs]
        outputs, cotangents = passed.outputs, passed.cotangents
        for number, path in enumerate(found.paths):
            see(path, "output", host(outputs[number]), dtypes[number])
            outputs[number] = None
        for number in reversed(range(len(found.paths))):
            if cotangents[number] is not None:
                see(found.paths[number], "cotangent", host(cotangents[number]), dtypes[number])
                cotangents[number] = None
        return Watched(float(passed.loss), Gradients(state, passed.gradients), found.operations, found.unseen)


OBSERVER: Final = JaxObserver()
