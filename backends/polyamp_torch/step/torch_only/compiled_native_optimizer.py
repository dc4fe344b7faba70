"""Compiled step with a torch optimizer: the first half is a graph, the update is eager.

The graph returns the sum of the scaled gradients, and the buffers after the forward passes. The finite flag,
unscaling, clipping, the optimizer's `step()` and the scale update are those of the eager step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from polyamp.results import StepResult
from polyamp.rules.accumulation import Accumulation
from polyamp.trees import map_tree
from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.step.accumulation import stack_aux, total_scale
from polyamp_torch.step.forward_backward import stash_grads
from polyamp_torch.step.grad_stats import can_read_without_sync
from polyamp_torch.step.parameter_writes import WRITE_PREFIX, GradientWrites
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.compiled_graph import CompiledGraph, NamedTensors, micro_batch_weights
from polyamp_torch.step.torch_only.eager_dry_run import check_retrace
from polyamp_torch.step.torch_only.interrupts import DeferInterrupts
from polyamp_torch.step.update import UpdateGradients, update_states


class CompiledNativeGraph(CompiledGraph):
    """Compiled first half of a state's step, with the eager second half."""

    def step(
        self, state: TorchState, batches: list[Any], window: Accumulation, interrupts: DeferInterrupts
    ) -> StepResult:
        """Run one step; parameters, buffers and the optimizer's state are updated in place."""
        used = [state.parameters[name] for name in self._used]
        parameters = {name.replace("/", "."): p.detach() for name, p in zip(self._used, used, strict=True)}
        running = buffers.writable_buffers(state.buffer_owners) | self._more_running
        fixed = self._fixed(set(map(id, [*used, *running.values()])))
        narrow = len(batches) > 1 and used[0].dtype in HALF_TENSOR_DTYPES  # divided in float32, rounded once (S8)
        loss, auxes, values, now, whole, weight = self._called(
            state,
            batches,
            interrupts,
            parameters,
            fixed,
            running,
            state.scale_state.scale,
            batches,
            micro_batch_weights(window, state.device),
            narrow,
        )
        aux = stack_aux(auxes, stack=self._recipe.accumulate_steps > 1)
        scale = total_scale(state.scale_state.scale if state.scaler.scales else None, whole, state.device)
        with stash_grads(list(state.parameters.values()), used_up=True):
            grads = _place_gradients(used, values)
            new = {
                WRITE_PREFIX + name: now[name.replace("/", ".")] for name in self._used if name.replace("/", ".") in now
            }
            settle = functools.partial(_commit_or_rollback, running, now, GradientWrites(state.writes.named, new))
            ready = UpdateGradients(grads, None if narrow else scale, settle, weight=weight)
            (result,) = update_states([state], [ready], "all")
        return result._replace(loss=loss, aux=map_tree(_detach_leaf, aux))

    def _traced(self, *arguments: Any) -> Any:
        """Run the first half; this function is compiled."""
        return self._first_half(*arguments)

    def _first_half(
        self,
        parameters: NamedTensors,
        fixed: NamedTensors,
        running: NamedTensors,
        scale: torch.Tensor,
        batches: list[Any],
        shares: torch.Tensor | None,
        narrow: bool,
    ) -> Any:
        """Return loss, auxes, gradient sums, buffers, divisor and weight; `narrow` divides 16-bit sums here."""
        check_retrace(self._watch)
        loss, auxes, total, now, whole, weight = self._summed(parameters, fixed, running, scale, batches, shares)
        by = total_scale(scale if self._scaler.scales else None, whole, scale.device) if narrow else None
        if by is not None:
            divisor = by.float()
            total = [(value / divisor).to(p.dtype) for value, p in zip(total, parameters.values(), strict=True)]
        return loss, auxes, total, now, whole, weight


def _place_gradients(parameters: Sequence[torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the parameters' `.grad`, with the same strides and separate memory, as in-place kernels require.

    Two results of a graph may be one tensor."""
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


def _commit_or_rollback(
    running: NamedTensors, now: NamedTensors, written: GradientWrites, finite: torch.Tensor | None
) -> None:
    """Keep the forward pass's changes if `finite` is true or None; otherwise undo them."""
    written.settle(finite)
    if finite is not None and can_read_without_sync(finite.device):
        if not bool(finite):
            return
        finite = None
    for name, old in running.items():
        old.copy_(now[name] if finite is None else torch.where(finite.to(old.device), now[name], old))


def _detach_leaf(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
