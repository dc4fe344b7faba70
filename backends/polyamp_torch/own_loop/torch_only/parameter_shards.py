"""`ParameterShards`: what part of a loop's parameters this process has, and sums over the processes that have the rest.

It is what the figures of a monitor need of sharded parameters, where no training state knows their engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import is_flattened_by_fsdp1, local_tensor_of
from polyamp_torch.own_loop.torch_only.sharded_gradients import RankAgreement, reduce_partial_gradients


class ParameterShards:
    """Parameters of `fully_shard` and of tensor-parallel plans; whole ones are their own only part.

    Args:
        parameters: path -> parameter.

    Raises:
        UnsupportedError: flat parameters of FSDP1; or no process group has exactly the ranks of their meshes.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        if is_flattened_by_fsdp1(parameters.values()):
            raise UnsupportedError(
                "a monitor of a loop reads the parameters of each module. Received: FullyShardedDataParallel (FSDP1), "
                "which joins them to flat ones. Use torch's fully_shard (FSDP2), or leave out the monitor."
            )
        self._parameters = list(parameters.values())
        self._sharded = any(local_tensor_of(p) is not p for p in self._parameters)
        self._group = RankAgreement(None).group(self._parameters) if self._sharded else None
        self._parts: dict[str, float] = {}
        if self._group is not None:
            from polyamp_torch.distributed.torch_only.sharded_tensors import replication_factor

            self._parts = {name: 1.0 / replication_factor(p, self._group) for name, p in parameters.items()}

    def parts_by_name(self, named: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return what part of a parameter's local elements this process counts (1/n if n processes have them); empty if
        it has all parameters."""
        return {name: self._parts[name] for name in named} if self._parts else {}

    def complete_gradients(self) -> None:
        """Reduce gradients of which each process has a summand."""
        if self._sharded:
            reduce_partial_gradients(self._parameters)

    def plain(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return this process's part of each tensor."""
        if not self._sharded:
            return tensors
        from polyamp_torch.distributed.torch_only.sharded_tensors import local_tensors

        return local_tensors(tensors)

    def all_reduce_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of a vector over the processes; unchanged if this one has all parameters."""
        if self._group is None:
            return vector
        total = vector.cuda() if dist.get_backend(self._group) == "nccl" else vector
        dist.all_reduce(total, group=self._group)
        return total.to(vector.device)
