"""An optimizer's parameters and slots as the plain tensors that this process holds of them.

Multi-tensor kernels, fused ones and polyamp's formulas know no sharded tensors (torch has no strategy for
`_fused_sgd_` and `_foreach_copy_` over them), and an update needs none: element by element, a shard is a tensor.
Between steps the optimizer holds sharded tensors, as torch's own code expects them. Called by the state and the step.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import local_of

_END: Final = object()


class Shards:
    """What one process holds of an optimizer made from a spec, whose slots are all there."""

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []
        self._state: Any = defaultdict(dict)
        self._of: list[Any] = [None]

    def plain(self, tensor: Any) -> Any:
        """The plain tensor that stands for one of the optimizer's in the block; the same object each time."""
        return local_of(tensor)

    @contextlib.contextmanager
    def inside(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor] = (),
        grads: Sequence[torch.Tensor] = (),
    ) -> Iterator[None]:
        """A block in which the optimizer holds plain tensors.

        Args:
            optimizer: the state's.
            parameters: those that have gradients.
            grads: this process's part of each, which the plain tensors have for `.grad`.
        """
        if self._changed(optimizer):
            self._look(optimizer)
        groups, state = optimizer.param_groups, optimizer.state
        whole = [group["params"] for group in groups]
        given = []
        try:
            for p, grad in zip(parameters, grads, strict=True):
                local = self.plain(p)
                local.grad = grad
                given.append((p, local))
            for group, part in zip(groups, self._lists, strict=True):
                group["params"] = part
            optimizer.state = self._state
            yield
        finally:
            optimizer.state = state
            for group, part in zip(groups, whole, strict=True):
                group["params"] = part
            for p, local in given:
                if local is not p:
                    local.grad = None

    def _changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds other tensors than at the last look."""
        return not all(map(operator.is_, _contents(optimizer), self._of))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        if len(self._lists) != len(groups):
            self._lists = [[] for _ in groups]
        for part, group in zip(self._lists, groups, strict=True):  # the same lists: kernels hold them
            part[:] = map(self.plain, group["params"])
        self._state.clear()
        for p, slots in optimizer.state.items():
            self._state[self.plain(p)] = {slot: self.plain(value) for slot, value in slots.items()}
        self._of = list(_contents(optimizer))


def check_native(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what torch's own optimizers cannot do over sharded parameters, which it finds out in the first update.

    Raises:
        UnsupportedError: names the optimizer.
    """
    kind = type(optimizer)
    whole = (torch.optim.Rprop, torch.optim.Adafactor)
    fused = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)) and any(
        group.get("fused") for group in optimizer.param_groups
    )
    if fused or isinstance(optimizer, whole):
        instead = "Use fused=False" if fused else "Use another optimizer"
        raise UnsupportedError(
            f"torch.optim.{kind.__name__}{'(fused=True)' if fused else ''} cannot update sharded parameters: torch has "
            f"no such operation over them. {instead}, or one of polyamp's specs, which run on each rank's own part."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    spread = [local_of(p) is not p for p in parameters]
    if any(spread) and not all(spread):
        for group in optimizer.param_groups:
            kinds = {local_of(p) is not p for p in group["params"]}
            if len(kinds) > 1 and not (group.get("foreach") is False and not group.get("fused")):
                raise UnsupportedError(
                    f"torch.optim.{kind.__name__}: one of its parameter groups holds sharded parameters and whole "
                    "ones, which torch's multi-tensor kernels do not take together. Put them into two groups, use "
                    "foreach=False, or one of polyamp's specs."
                )


def _contents(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Every tensor that the optimizer holds and what lies here of it, and a mark of the end: see `Kernels`."""
    parameters = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    slots = list(itertools.chain.from_iterable(map(dict.values, optimizer.state.values())))
    return itertools.chain(parameters, map(local_of, parameters), slots, map(local_of, slots), (_END,))
