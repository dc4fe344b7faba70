"""Engine adapter for the modules that `fully_shard` was called on (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from polyamp.errors import ModelError, UnsupportedError
from polyamp_torch.compat import gathered_fsdp2_parameters, local_tensor_of, tensor_version
from polyamp_torch.distributed.torch_only.compat import (
    broadcast_coalesced,
    drop_unsharded_gradients,
    unsharded_parameters,
)
from polyamp_torch.distributed.torch_only.engine import ModuleSlots, ParallelEngine

_STATISTICS_BUFFER = "running_mean"


class FullyShardEngine(ParallelEngine):
    """`FSDPModule`s that contain all trainable parameters of a model, over a mesh of one or two dimensions.

    A forward pass gathers parameters from all processes, so all must run the same number of passes.
    """

    def __init__(self, name: str, group: Any, data: Any, count: int, rank: int, modules: Sequence[Any]) -> None:
        super().__init__(name, group, data, count, rank, modules)
        self.needs_equal_passes = True
        inner = {id(part) for module in modules for part in module.modules() if part is not module}
        self._outermost = [module for module in modules if id(module) not in inner]
        self.reshard()

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        for name, p in named.items():
            held = set(p.device_mesh.mesh.flatten().tolist()) if isinstance(p, DTensor) else set()
            if self.count > 1 and not set(dist.get_process_group_ranks(self.data)) <= held:
                raise ModelError(
                    f"parameter {name!r} is in no module that fully_shard was called on, so its gradients stay each "
                    "rank's own and the replicas would part. Call fully_shard(model) on the whole model as well, after "
                    "its parts, or freeze the parameter."
                )

    def reshard(self) -> None:
        for module in self.modules:
            module.reshard()

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        before = {id(p): tensor_version(p) for p in self.leaves()}
        try:
            yield
            self._check_unwritten(before)
        except BaseException:
            for module in self._outermost:
                if hasattr(module, "reset_iter_state"):  # torch 2.13
                    module.reset_iter_state()
            for module in self.modules:
                module.reshard()
                drop_unsharded_gradients(module)
            raise

    def _check_unwritten(self, before: Mapping[int, int]) -> None:
        """Raise if a forward pass writes to a gathered parameter, which is dropped after the pass (S12)."""
        if all(tensor_version(p) == before.get(id(p), 0) for p in self.leaves()):
            return
        for each in gathered_fsdp2_parameters():
            if each.whole is not None and tensor_version(each.whole) != before.get(id(each.whole), 0):
                owner, own = each.places[0]
                path = next((n for module in self.modules for n, part in module.named_modules() if part is owner), "")
                raise UnsupportedError(
                    f"the forward pass writes to the parameter {'.'.join(filter(None, (path, own)))!r}, which "
                    "fully_shard gathers for the pass and drops behind it, so that the write is lost. Write to the "
                    "sharded parameter between two steps, or keep its module out of fully_shard (ignored_params=)."
                )

    @contextlib.contextmanager
    def one_pass(self, *, last: bool) -> Iterator[None]:
        if last:
            yield
            return
        self._reduce(now=False)
        try:
            yield
        finally:
            self._reduce(now=True)

    def _reduce(self, *, now: bool) -> None:
        for module in self._outermost:
            module.set_requires_gradient_sync(now)
            module.set_is_last_backward(now)

    def leaves(self) -> list[torch.Tensor]:
        return [p for module in self.modules for p in unsharded_parameters(module)]

    def buffer_versions(self, slots: ModuleSlots) -> list[tuple[Any, int]]:
        return [(b, tensor_version(b)) for own in slots for b in own.values() if b is not None]

    def broadcast_buffers(self, slots: ModuleSlots, before: list[tuple[Any, int]] | None) -> None:
        """Broadcast all buffers of the modules that the forward pass wrote to; of all modules if that is not known.

        A batch normalisation kernel does not increase the version counters of its statistics. So modules with a buffer
        of torch's name for them are always included. The choice must not depend on values, which differ between ranks.
        """
        same = {id(b) for b, version in before or () if tensor_version(b) == version}
        now: dict[int, torch.Tensor] = {}
        for own in slots:
            held = {id(b): b for b in own.values() if b is not None}
            if _STATISTICS_BUFFER in own or not held.keys() <= same:
                now |= held
        if now and self.count > 1:
            broadcast_coalesced(self.data, [local_tensor_of(b) for b in now.values()])
