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
from polyamp_torch.step.window import NARROW, produced_by, stacked


class NativeGraph(Graph):
    """The compiled first half of a state's step, and the eager second."""

    def step(self, state: TorchState, batches: list[Any], window: Window, quiet: Undisturbed) -> StepResult:
        """One step; parameters, buffers and the optimizer's state are written in place."""
        used = [state.parameters[name] for name in self._used]
        parameters = {name.replace("/", "."): p.detach() for name, p in zip(self._used, used, strict=True)}
        running = buffers.writable(state.buffer_owners) | self._more_running
        fixed = self._fixed(set(map(id, [*used, *running.values()])))
        narrow = len(batches) > 1 and used[0].dtype in NARROW  # divided in float32, rounded once (S8)
        loss, auxes, values, now, whole, weight = self._called(
            state,
            batches,
            quiet,
            parameters,
            fixed,
            running,
            state.scale_state.scale,
            batches,
            shares_of(window, state.device),
            narrow,
        )
        aux = stacked(auxes, stack=self._recipe.accumulate_steps > 1)
        scale = produced_by(state.scale_state.scale if state.scaler.scales else None, whole, state.device)
        with set_aside(list(state.parameters.values()), used_up=True):
            grads = _placed(used, values)
            new = {PREFIX + name: now[name.replace("/", ".")] for name in self._used if name.replace("/", ".") in now}
            settle = functools.partial(_settle, running, now, Written(state.writes.named, new))
            ready = Scaled(grads, None if narrow else scale, settle, weight=weight)
            (result,) = applied([state], [ready], "all")
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
        narrow: bool,
    ) -> Any:
        """`narrow`: the sums are divided here, since the parameters are stored in 16 bits."""
        traced_again(self._watch)
        loss, auxes, total, now, whole, weight = self._summed(parameters, fixed, running, scale, batches, shares)
        by = produced_by(scale if self._scaler.scales else None, whole, scale.device) if narrow else None
        if by is not None:
            divisor = by.float()
            total = [(value / divisor).to(p.dtype) for value, p in zip(total, parameters.values(), strict=True)]
        return loss, auxes, total, now, whole, weight


def _placed(parameters: Sequence[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in the parameters' `.grad`, laid out like them and in memory of their own, as kernels that write
    them want it: of a graph two results may be one tensor."""
    placed: list[torch.Tensor] = []
    seen: set[int] = set()
    for p, value in zip(parameters, values, strict=True):
        pointer = value.untyped_storage().data_ptr()
        if value.stride() != p.stride() or pointer in seen or value.dtype != p.dtype or value.is_conj():
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
