"""torch's `Observer`: a copy to train, without random numbers if asked, and what its modules give. The door of this
room; `TorchBackend.observer` imports it when somebody compares."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from polyamp.contract.backend import State
from polyamp.parity.observing import Draws, Observer, See, Watched
from polyamp.results import LossFunction
from polyamp_torch.observe import still, watch, working


class TorchObserver:
    """`Observer` over PyTorch. A model is an `nn.Module`, in wrappers or not."""

    def working(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        return working.working(model, wide=wide, inference=inference)

    def still(self, model: Any, draws: Draws | None) -> AbstractContextManager[None]:
        return still.still(model, draws)

    def watch(self, state: State, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
        return watch.watch(state, loss_fn, batch, see)  # type: ignore[arg-type]  # a state of this backend


OBSERVER: Final[Observer] = TorchObserver()
