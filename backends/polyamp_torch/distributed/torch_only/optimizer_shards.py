"""Local shards of an optimizer's parameters and slots, as plain tensors for the update.

Multi-tensor kernels, fused kernels and polyamp's formulas do not support sharded tensors (torch has no strategy for
`_fused_sgd_` and `_foreach_copy_` over them). An elementwise update runs on the local shards. A formula that needs a
parameter as a whole runs on the sharded tensors, and gathers what it needs.
Between steps the optimizer contains sharded tensors, as torch's own code expects.
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
from polyamp_torch.compat import local_tensor_of

_END_MARK: Final = object()


class OptimizerShards:
    """This process's shards of an optimizer made from a spec, whose slots all exist."""

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []
        self._state: Any = defaultdict(dict)
        self._of: list[Any] = [None]

    def plain(self, tensor: Any) -> Any:
        """Return the local tensor of one of the optimizer's tensors; the same object each time."""
        return local_tensor_of(tensor)

    @contextlib.contextmanager
    def inside(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor] = (),
        grads: Sequence[torch.Tensor] = (),
    ) -> Iterator[None]:
        """Context manager in which the optimizer's tensors are the local shards.

        Args:
            optimizer: the state's optimizer.
            parameters: the parameters that have gradients.
            grads: the local part of each gradient, set as `.grad` of the local tensors.
        """
        given = []
        with self._local_contents(optimizer):  # first: it brings the local tensors up to date
            try:
                for p, grad in zip(parameters, grads, strict=True):
                    given.append(self._set_grad(p, grad))
                yield
            finally:
                for tensor in given:
                    if tensor is not None:
                        tensor.grad = None

    def _set_grad(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """Set a gradient where the update reads it; return the tensor to clear afterwards, None for none."""
        local: torch.Tensor = self.plain(parameter)
        local.grad = grad
        return None if local is parameter else local

    @contextlib.contextmanager
    def _local_contents(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager in which the optimizer's groups and slots are the local ones."""
        if self._changed(optimizer):
            self._update_lists(optimizer)
        groups, state = optimizer.param_groups, optimizer.state
        whole = [group["params"] for group in groups]
        try:
            for group, part in zip(groups, self._lists, strict=True):
                group["params"] = part
            optimizer.state = self._state
            yield
        finally:
            optimizer.state = state
            for group, part in zip(groups, whole, strict=True):
                group["params"] = part

    def _changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's tensors differ from those of the last `_update_lists`."""
        return not all(map(operator.is_, _optimizer_contents(optimizer), self._of))

    def _update_lists(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        if len(self._lists) != len(groups):
            self._lists = [[] for _ in groups]
        for part, group in zip(self._lists, groups, strict=True):  # the same list objects: kernels refer to them
            part[:] = map(self.plain, group["params"])
        self._state.clear()
        for p, slots in optimizer.state.items():
            self._state[self.plain(p)] = {slot: self.plain(value) for slot, value in slots.items()}
        self._of = list(_optimizer_contents(optimizer))


class WholeTensors(OptimizerShards):
    """Sharded tensors of an optimizer whose formula is not elementwise: they stay as they are, and get gradients."""

    def plain(self, tensor: Any) -> Any:
        return tensor

    def _set_grad(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        parameter.grad = _as_shard_of(parameter, grad)
        return parameter

    @contextlib.contextmanager
    def _local_contents(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        yield


def _as_shard_of(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a local tensor as this process's shard of a tensor that is divided as the parameter."""
    if local_tensor_of(parameter) is parameter:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_native_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a torch optimizer cannot update sharded parameters, before its first update would fail.

    Raises:
        UnsupportedError: the optimizer or its groups do not support sharded parameters.
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
    spread = [local_tensor_of(p) is not p for p in parameters]
    if any(spread) and not all(spread):
        for group in optimizer.param_groups:
            kinds = {local_tensor_of(p) is not p for p in group["params"]}
            if len(kinds) > 1 and not (group.get("foreach") is False and not group.get("fused")):
                raise UnsupportedError(
                    f"torch.optim.{kind.__name__}: one of its parameter groups holds sharded parameters and whole "
                    "ones, which torch's multi-tensor kernels do not take together. Put them into two groups, use "
                    "foreach=False, or one of polyamp's specs."
                )


def _optimizer_contents(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield all of the optimizer's tensors, their local parts, and an end mark; see `FusedKernels`."""
    parameters = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    slots = list(itertools.chain.from_iterable(map(dict.values, optimizer.state.values())))
    return itertools.chain(
        parameters, map(local_tensor_of, parameters), slots, map(local_tensor_of, slots), (_END_MARK,)
    )
