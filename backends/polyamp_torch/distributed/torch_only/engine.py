"""Base class of the parallel engines: the interface that a step uses, with defaults that do nothing (S9).

They serve one device, and tensor parallelism, where all processes have one batch and torch reduces within the
operations. The engines that divide a batch are in `ddp_engine` and `fully_shard_engine`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from polyamp_torch.compat import NULL_CONTEXT

ModuleSlots = Sequence[dict[str, Any]]
"""The buffer dicts of all modules."""


class ParallelEngine:
    """The processes that train one model together; by default one process.

    Attributes:
        name: "ddp", "fsdp2", "tensor_parallel", or "fsdp2+tensor_parallel"; None on one device.
        group: all the processes of the model, whether replicated or sharded; None on one device.
        data: the processes whose batches differ; None if all have the same batch.
        count: the number of replicas.
        rank: the index of this process's replica.
        modules: the modules that the engine wraps or shards, outermost first.
        needs_equal_passes: whether every process must run as many passes, because a pass waits for the others'.
        reuses_gradient_memory: whether gradients share memory that the next backward pass overwrites.
        has_equal_gradients: whether, after the last pass, every process has the same unsharded gradients, bit for bit.
    """

    def __init__(
        self,
        name: str | None = None,
        group: Any = None,
        data: Any = None,
        count: int = 1,
        rank: int = 0,
        modules: Sequence[Any] = (),
    ) -> None:
        self.name: Final = name
        self.group: Final = group
        self.data: Final = data
        self.count: Final = count
        self.rank: Final = rank
        self.modules: Final = tuple(modules)
        self.needs_equal_passes = False
        self.reuses_gradient_memory = False
        self.has_equal_gradients = False

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

    def window(self) -> contextlib.AbstractContextManager[None]:
        """Return the context around all passes of a step; it resets the engine after an error."""
        return NULL_CONTEXT

    def one_pass(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context around one forward and backward pass; gradients are reduced in the last pass."""
        return NULL_CONTEXT

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

    def buffer_versions(self, slots: ModuleSlots) -> Any:
        """Return the record, made before the passes, that `broadcast_buffers` compares."""

    def broadcast_buffers(self, slots: ModuleSlots, before: Any) -> None:
        """Broadcast the first replica's buffers to all replicas."""
