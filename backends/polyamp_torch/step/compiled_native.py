"""`train_step(compile=True)` with an optimizer of torch's own: the graph is the first half, the update is eager.

The graph gives the sum of the scaled gradients and the buffers after the forward passes; flag, unscaling, clip, the
optimizer's own `step()` over its parameter groups and the scale adjustment are those of the eager step. Called by
`compiled_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from polyamp.results import StepResult
from polyamp.rules.window import Window
from polyamp.trees import map_tree
from polyamp_torch.step import running as buffers
from polyamp_torch.step.compile_trial import traced_again
from polyamp_torch.step.compiled import Graph, Tensors, shares_of
from polyamp_torch.step.differentiate import set_aside
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import looks
from polyamp_torch.step.parameter_writes import PREFIX, Written
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.update import Scaled, applied
from polyamp_torch.step.window import NARROW, mean_and_stack, produced_by


class NativeGraph(Graph):
    """The compiled first half of a state's step, and the eager second."""

    def step(self, state: TorchState, batches: list[Any], window: Window, quiet: Undisturbed) -> StepResult:
        """One step; parameters, buffers and the optimizer's state are written in place."""
        used = [state.parameters[name] for name in self._used]
        parameters = {name.replace("/", "."): p.detach() for name, p in zip(self._used, used, strict=True)}
        running = buffers.writable(state.buffer_owners) | self._more_running
        fixed = self._fixed(set(map(id, [*used, *running.values()])))
        scale = produced_by(state.scale_state.scale if state.scaler.scales else None, window.total, state.device)
        narrow = len(batches) > 1 and used[0].dtype in NARROW  # divided in float32, rounded once (S8)
        losses, auxes, values, now = self._called(
            state,
            batches,
            quiet,
            parameters,
            fixed,
            running,
            state.scale_state.scale,
            batches,
            shares_of(window, state.device),
            scale if narrow else None,
        )
        loss, aux = mean_and_stack(losses, auxes, window, stack=self._recipe.accumulate_steps > 1)
        with set_aside(list(state.parameters.values()), used_up=True):
            grads = _placed(used, values)
            new = {PREFIX + name: now[name.replace("/", ".")] for name in self._used if name.replace("/", ".") in now}
            settle = functools.partial(_settle, running, now, Written(state.writes.named, new))
            (result,) = applied([state], [Scaled(grads, None if narrow else scale, settle)], "all")
        return result._replace(loss=loss, aux=map_tree(_detached, aux))

    def _traced(self, *arguments: Any) -> Any:
        """The first half; what a compiler sees."""
        return self._first_half(*arguments)

    def _first_half(
        self,
        parameters: Tensors,
        fixed: Tensors,
        running: Tensors,
        scale: torch.Tensor,
        batches: list[Any],
        shares: torch.Tensor | None,
        by: torch.Tensor | None,
    ) -> Any:
        """`by` divides the sums here, of parameters that are stored in 16 bits."""
        traced_again(self._watch)
        losses, auxes, total, now = self._summed(parameters, fixed, running, scale, batches, shares)
        if by is not None:
            divisor = by.float()
            total = [(value / divisor).to(p.dtype) for value, p in zip(total, parameters.values(), strict=True)]
        return losses, auxes, total, now


def _placed(parameters: Sequence[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in the parameters' `.grad`, laid out like them and in memory of their own, as kernels that write
    them want it: of a graph two results may be one tensor."""
    placed: list[torch.Tensor] = []
    seen: set[int] = set()
    for p, value in zip(parameters, values, strict=True):
        pointer = value.untyped_storage().data_ptr()
        if value.stride() != p.stride() or pointer in seen or value.dtype != p.dtype:
            value = torch.empty_like(p).copy_(value)
        seen.add(pointer)
        p.grad = value
        placed.append(value)
    return placed


def _settle(running: Tensors, now: Tensors, written: Written, finite: torch.Tensor | None) -> None:
    """Let what the forward pass left behind stand where `finite` says so; None lets it stand."""
    written.settle(finite)
    if finite is not None and looks(finite.device):
        if not bool(finite):
            return
        finite = None
    for name, old in running.items():
        old.copy_(now[name] if finite is None else torch.where(finite.to(old.device), now[name], old))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
