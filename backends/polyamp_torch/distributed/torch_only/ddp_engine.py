"""Engine adapter for `DistributedDataParallel`, with checks of the options under which replicas would diverge.

Inside a step, DDP's broadcast of the buffers before the forward pass is off. The step broadcasts them once at its end,
so that running statistics are the same on all ranks after every step and not only before the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import LossError, ModelError, UnsupportedError
from polyamp_torch.distributed.torch_only.compat import (
    broadcast_module_buffers,
    check_reduced,
    has_delayed_reduction,
    has_run_forward,
    is_join_enabled,
    reducer_parameters,
    reset_reducer,
    set_buffer_broadcast,
)
from polyamp_torch.distributed.torch_only.engine import ModuleSlots, ParallelEngine
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters


class DDPEngine(ParallelEngine):
    """One or several `DistributedDataParallel` that contain all trainable parameters of a model.

    With `static_graph=True` torch learns the graph in the first backward passes that it reduces, and fails if
    `no_sync` comes first. So every pass of the first step is reduced. Gradients that are already the mean over the
    replicas are unchanged by a further reduction.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        group = modules[0].process_group
        super().__init__("ddp", group, group, dist.get_world_size(group), dist.get_rank(group), modules)
        self.needs_equal_passes = any(part.static_graph for part in modules)
        self.reuses_gradient_memory = any(part.gradient_as_bucket_view for part in modules)
        self.has_equal_gradients = True

    def check(self, named: Mapping[str, torch.Tensor]) -> None:
        for part in self.modules:
            _check_options(part, self.group)
        _check_all_reduced(self.modules, named)

    def prepare(self) -> None:
        if any(is_join_enabled(part) for part in self.modules):
            raise UnsupportedError(
                "DistributedDataParallel.join(): ranks that are through would wait in the step's own reduction for "
                "ever. Give every rank the same number of batches: torch.utils.data.DistributedSampler does, with "
                "drop_last=True or by repeating rows."
            )

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        sent = [set_buffer_broadcast(part, now=False) for part in self.modules]
        try:
            yield
            self.needs_equal_passes = False
        except BaseException:
            for part in self.modules:
                reset_reducer(part)
            raise
        finally:
            for part, send in zip(self.modules, sent, strict=True):
                set_buffer_broadcast(part, now=send)
                has_run_forward(part, before=True)  # as after a forward pass outside a step

    @contextlib.contextmanager
    def one_pass(self, *, last: bool) -> Iterator[None]:
        for part in self.modules:
            has_run_forward(part, before=False)
        if last or self.needs_equal_passes:
            yield
            return
        with contextlib.ExitStack() as stack:
            for part in self.modules:
                stack.enter_context(part.no_sync())
            yield

    def check_reduced(self, named: Mapping[str, torch.Tensor]) -> None:
        for part in self.modules:
            if not has_run_forward(part):
                self._check_unused(part, named)
            try:
                check_reduced(part)
            except RuntimeError as error:
                unused = [name for name, p in _wrapped_parameters(part, named) if p.grad is None]
                raise LossError(
                    f"DistributedDataParallel waits for gradients that did not come: loss_fn does not depend on "
                    f"{', '.join(map(repr, unused[:3])) or 'all that it computed'}. Make it "
                    "DistributedDataParallel(model, find_unused_parameters=True)."
                ) from error

    def _check_unused(self, part: Any, named: Mapping[str, torch.Tensor]) -> None:
        used = next((name for name, p in _wrapped_parameters(part, named) if p.grad is not None), None)
        if used is not None:
            raise LossError(
                f"loss_fn computed with the parameter {used!r} and did not call the DistributedDataParallel around "
                "it, which reduces gradients only in backward passes that follow its own forward pass. Call the "
                "model itself, model(...); what else is to run belongs into its forward()."
            )

    def broadcast_buffers(self, slots: ModuleSlots, before: Any) -> None:
        if any(slots):
            for part in self.modules:
                if part.broadcast_buffers and any(True for _ in part.buffers()):
                    broadcast_module_buffers(part)


def _wrapped_parameters(part: Any, named: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return the trainable parameters inside a `DistributedDataParallel`."""
    held = {id(p) for _, p in tree_parameters(part)}
    return [(name, p) for name, p in named.items() if id(p) in held]


def _check_options(part: DistributedDataParallel, group: Any) -> None:
    if part.process_group != group:
        raise UnsupportedError(
            "model: it holds several DistributedDataParallel over different process groups. Make one around the whole "
            "model, or give all of them one process_group."
        )
    if part.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) casts what the recipe's policy casts too. Leave it out; the "
            "policy decides."
        )
    if has_delayed_reduction(part):
        raise UnsupportedError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces those gradients by a hook that the "
            "step does not see. Leave it out."
        )


def _check_all_reduced(modules: Sequence[DistributedDataParallel], named: Mapping[str, torch.Tensor]) -> None:
    known: set[int] = set()
    for part in modules:
        parameters, reduced = reducer_parameters(part)
        now = {id(p) for _, p in tree_parameters(part)} & set(map(id, parameters))
        trained = {id(p) for p in parameters if p.requires_grad and id(p) in now}
        if len(trained) != reduced:
            raise ModelError(
                f"model: DistributedDataParallel was made when {reduced} of its parameters were trained. Received: "
                f"{len(trained)}. Freeze, thaw and replace first; then wrap the module again: "
                "DistributedDataParallel(model.module)."
            )
        known |= trained
    for name, p in named.items():
        if id(p) not in known:
            raise ModelError(
                f"parameter {name!r} is in no DistributedDataParallel, so its gradients stay each rank's own and the "
                "replicas would part. Wrap the whole model: DistributedDataParallel(model)."
            )
