"""Base class of the parallel engines: the interface that a step uses, with the defaults of tensor parallelism (S9).

In tensor parallelism all processes have one batch, and torch reduces within the operations. The engines that divide a
batch are in `ddp_engine` and `fully_shard_engine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from polyamp_torch.compat import local_tensor_of

ModuleSlots = Sequence[dict[str, Any]]
"""The buffer dicts of all modules."""


class ParallelEngine:
    """The processes that train one model together.

    Attributes:
        name: "ddp", "fsdp2", "tensor_parallel", or "fsdp2+tensor_parallel".
        group: all the processes of the model, whether replicated or sharded.
        data: the processes whose batches differ; None if all have the same batch.
        count: the number of replicas.
        rank: the index of this process's replica.
        modules: the modules that the engine wraps or shards, outermost first.
        alike: whether every process must run the same number of passes, because a pass waits for the others'.
        keeps_gradients: whether gradients share memory that the next backward pass overwrites.
        same: whether, after the last pass, every process has the same unsharded gradients, bit for bit.
    """

    def __init__(self, name: str, group: Any, data: Any, count: int, rank: int, modules: Sequence[Any] = ()) -> None:
        self.name: Final = name
        self.group: Final = group
        self.data: Final = data
        self.count: Final = count
        self.rank: Final = rank
        self.modules: Final = tuple(modules)
        self.alike = False
        self.keeps_gradients = False
        self.same = False

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise if the replicas would diverge. Runs after the comparison of the ranks, which reports differences first.

        Args:
            named: the trainable parameters by path.

        Raises:
            ModelError: the engine does not reduce a trainable parameter's gradient.
            UnsupportedError: an engine option is not supported.
        """

    def prepare(self) -> None:
        """Raise if a step cannot run in the engine's current mode."""

    def reshard(self) -> None:
        """Reshard the parameters that a forward pass without a backward pass left unsharded."""

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Context manager around all passes of a step; resets the engine after an error."""
        yield

    @contextlib.contextmanager
    def one_pass(self, *, last: bool) -> Iterator[None]:
        """Context manager around one forward and backward pass; gradients are reduced in the last pass."""
        yield

    def check_reduced(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise if gradients were not reduced, after the last pass.

        Args:
            named: the trainable parameters by path.

        Raises:
            LossError: a gradient was not reduced; the message names the parameter.
        """

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves of the autograd graph that represent the trainable parameters."""
        return []

    def written(self, slots: ModuleSlots) -> Any:
        """Return the record, made before the passes, that `send_running` compares."""

    def send_running(self, slots: ModuleSlots, before: Any) -> None:
        """Broadcast the first replica's buffers to all replicas."""


def redistribute_gradients(named: Mapping[str, torch.Tensor]) -> None:
    """Redistribute gradients to the placements of their parameters.

    Needed for partial sums, for example of a norm layer in a sequence-parallel model."""
    for p in named.values():
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return this process's local part of each tensor."""
    return [_wait_for_collective(local_tensor_of(tensor)) for tensor in tensors]


def _wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that fills a tensor; return the tensor."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def replication_factor(p: torch.Tensor, group: Any) -> int:
    """Return how many processes of a group store each element of a parameter."""
    if not isinstance(p, DTensor):
        return int(group.size())
    different = 1
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        different *= 1 if placement.is_replicate() else size
    return int(group.size()) // different
