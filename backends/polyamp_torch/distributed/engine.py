"""`Engine`: what a step asks of the processes that hold a model together, where they need nothing else of it (S9).

That is tensor parallelism: all its processes have one batch, and torch reduces within the operations. The engines that
divide a batch are in `replicated` and `fully_sharded`. Called by `step.replicas` and the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from polyamp_torch.compat import local_of

Slots = Sequence[dict[str, Any]]
"""The dicts that hold the buffers of every module."""


class Engine:
    """The processes that train one model together.

    Attributes:
        name: "ddp", "fsdp2", "tensor_parallel", or "fsdp2+tensor_parallel".
        group: all the processes that hold the model, whole or in parts.
        data: those of them whose batches differ; None where they all have the same.
        count: how many replicas there are.
        rank: which of them this process belongs to.
        modules: what of the model the engine itself put there, outermost first.
        alike: whether every process must run the same number of passes, because a pass waits for the others'.
        keeps_gradients: whether gradients lie in memory that the next backward pass writes to.
        same: whether behind the last pass every process has the same gradients, whole and bit for bit.
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
        """Refuse what would let the replicas part. Where ranks differ, their comparison is to say so first.

        Args:
            named: the trainable parameters by path.

        Raises:
            ModelError: a trainable parameter whose gradient the engine does not reduce.
            UnsupportedError: options of the engine.
        """

    def prepare(self) -> None:
        """Refuse what a step cannot be part of."""

    def reshard(self) -> None:
        """Have the sharded parameters in the model, where a forward pass without a backward pass left whole ones."""

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """A block around all passes of a step; after an error in it the engine can begin anew."""
        yield

    @contextlib.contextmanager
    def one_pass(self, *, last: bool) -> Iterator[None]:
        """A block around one forward and backward pass; gradients are reduced over the replicas in the last."""
        yield

    def check_reduced(self, named: Mapping[str, torch.Tensor]) -> None:
        """Refuse gradients that were not reduced, after the last pass.

        Args:
            named: the trainable parameters by path.

        Raises:
            LossError: names a parameter.
        """

    def leaves(self) -> list[torch.Tensor]:
        """Leaves of the graph that stand for the trainable parameters."""
        return []

    def written(self, slots: Slots) -> Any:
        """What `send_running` compares, taken before the passes."""

    def send_running(self, slots: Slots, before: Any) -> None:
        """Give every replica the first one's buffers."""


def fitted(named: Mapping[str, torch.Tensor]) -> None:
    """Bring gradients that are still to be summed over processes, as those of a norm in a sequence-parallel model are,
    into the form that their parameters have."""
    for p in named.values():
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this process holds of each."""
    return [_arrived(local_of(tensor)) for tensor in tensors]


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a collective is still to fill, filled."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def copies(p: torch.Tensor, group: Any) -> int:
    """In how many processes of a group each number of a parameter lies."""
    if not isinstance(p, DTensor):
        return int(group.size())
    different = 1
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        different *= 1 if placement.is_replicate() else size
    return int(group.size()) // different
