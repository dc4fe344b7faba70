"""What a step tells the modules that `fully_shard` was called on. Called by `engines`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from polyamp.errors import ModelError, UnsupportedError
from polyamp_torch.compat import gathered_by_fsdp2, local_of, version_of
from polyamp_torch.distributed.compat import forget_gathered, gathered_by, send
from polyamp_torch.distributed.engine import Engine, Slots

_STATISTICS = "running_mean"


class FullySharded(Engine):
    """`FSDPModule`s that hold all trainable parameters of a model, over a mesh of one or two dimensions.

    A forward pass gathers parameters from all processes, so each runs as many.
    """

    def __init__(self, name: str, group: Any, data: Any, count: int, rank: int, modules: Sequence[Any]) -> None:
        super().__init__(name, group, data, count, rank, modules)
        self.alike = True
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
        before = {id(p): version_of(p) for p in self.leaves()}
        try:
            yield
            self._check_unwritten(before)
        except BaseException:
            for module in self._outermost:
                if hasattr(module, "reset_iter_state"):  # torch 2.13
                    module.reset_iter_state()
            for module in self.modules:
                module.reshard()
                forget_gathered(module)
            raise

    def _check_unwritten(self, before: Mapping[int, int]) -> None:
        """Refuse a forward pass that writes to a parameter: what is gathered for the pass is dropped with it (S12)."""
        if all(version_of(p) == before.get(id(p), 0) for p in self.leaves()):
            return
        for each in gathered_by_fsdp2():
            if each.whole is not None and version_of(each.whole) != before.get(id(each.whole), 0):
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
        return [p for module in self.modules for p in gathered_by(module)]

    def written(self, slots: Slots) -> list[tuple[Any, int]]:
        return [(b, version_of(b)) for own in slots for b in own.values() if b is not None]

    def send_running(self, slots: Slots, before: list[tuple[Any, int]] | None) -> None:
        """Of the modules that the forward pass wrote to all buffers; of all modules where that is not known.

        A batch normalisation's kernel moves no version counter of the statistics that it writes: where some stand by
        torch's name for them, they are sent. Which are sent must not depend on values, which are each rank's own.
        """
        same = {id(b) for b, version in before or () if version_of(b) == version}
        now: dict[int, torch.Tensor] = {}
        for own in slots:
            held = {id(b): b for b in own.values() if b is not None}
            if _STATISTICS in own or not held.keys() <= same:
                now |= held
        if now and self.count > 1:
            send(self.data, [local_of(b) for b in now.values()])
