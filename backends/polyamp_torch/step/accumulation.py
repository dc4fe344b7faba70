"""Gradient accumulation (S8): the loop over the micro-batches of a step, and float32 sums for 16-bit parameters.

The weights of the micro-batches are in `loss_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyamp.errors import BatchError
from polyamp.results import LossFunction
from polyamp.rules.accumulation import is_concatenated
from polyamp.trees import map_tree
from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import NULL_CONTEXT
from polyamp_torch.step.forward_backward import PassSnapshot, densify_gradients, scaled_backward
from polyamp_torch.step.loss_weights import weighted_loss_sum
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads
from polyamp_torch.step.torch_only.parameter_write_broadcast import has_unannounced_writes
from polyamp_torch.step.torch_only.product_figures import PassWatch
from polyamp_torch.step.update import StepReduction


class GradAccumulator:
    """Float32 sums of the gradients of 16-bit parameters.

    Their own `.grad` would lose precision or overflow: in bfloat16 256 + 1 is 256, and in float16 40,000 + 40,000 is
    infinite.

    Args:
        parameters: 16-bit parameters. A micro-batch may leave some without a gradient.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of the last backward pass, and set the parameters' `.grad` to None."""
        for index, p in enumerate(self._parameters):
            if p.grad is not None:
                total = self._sums[index]
                self._sums[index] = p.grad.float() if total is None else total.add_(p.grad)
                p.grad = None

    @torch.no_grad()
    def write_back(self, by: torch.Tensor) -> None:
        """Write the sums, divided by a scalar and rounded once, to the parameters' `.grad`."""
        for p, total in zip(self._parameters, self._sums, strict=True):
            if total is not None:
                p.grad = torch.empty_like(p).copy_(total.div_(by.to(total.device, torch.float32)))


def accumulate_gradients(
    loss_fn: LossFunction,
    state: TorchState,
    parts: list[Any],
    snapshot: PassSnapshot,
    reduction: StepReduction,
    foreign: ForeignGrads,
    interrupts: DeferInterrupts,
    figures: PassWatch | None = None,
) -> tuple[torch.Tensor, Any]:
    """Run the passes of the micro-batches; return the weighted sum of their losses, and the stacked aux.

    The gradients of the scaled losses are then in the parameters' `.grad`. `figures` records what a monitor selects."""
    replicas, count, weighting = state.replicas, state.recipe.accumulate_steps, reduction.weighting
    parameters = list(state.parameters.values())
    accumulator = GradAccumulator(parameters) if count > 1 and parameters[0].dtype in HALF_TENSOR_DTYPES else None
    passes = replicas.passes(parts, count, narrow=accumulator is not None)
    if len(passes) > 1:
        weighting.rest = [(one.part, one.counts) for one in passes[1:]]
    losses: list[torch.Tensor] = []
    auxes = []

    def start_reduction(loss: torch.Tensor) -> None:
        """Start the reduction before the last backward pass, so that it precedes that pass's own on every rank."""
        written = snapshot.parameters.written_so_far(state.bound.written())
        reduction.start(state, [*losses, loss], announced=has_unannounced_writes(state, written))

    with replicas.engine.window():
        for number, one in enumerate(passes, 1):
            own = snapshot if one.counts else PassSnapshot(state, loss_fn)
            between = start_reduction if replicas.several and number == len(passes) else None
            watch = figures.installed() if figures is not None and one.counts else NULL_CONTEXT
            with replicas.engine.one_pass(last=one.last), watch:
                loss, aux = scaled_backward(
                    loss_fn,
                    [state],
                    one.part,
                    foreign,
                    interrupts,
                    weighting,
                    between,
                    [own.parameters],
                    counts=one.counts,
                )
            losses.append(loss)
            if one.counts:
                auxes.append(aux)
            else:
                own.parameters.compare()
                own.undo()
            if accumulator is not None:
                replicas.fit_gradients(state.parameters)
                densify_gradients(state.parameters.items(), needed=False)
                accumulator.add()
        if accumulator is None:
            replicas.fit_gradients(state.parameters)
    if len(passes) > 1:  # loss_fn may have changed the model between passes
        state.check_unchanged()
    if accumulator is not None:
        accumulator.write_back(reduction.divide(state, count))
    aux = auxes[0] if count == 1 else stack_aux(auxes, stack=True)
    return weighted_loss_sum(losses, weighting.factors), aux


def stack_aux(auxes: list[Any], *, stack: bool) -> Any:
    """Return the aux of all micro-batches, with a new leading axis (S8).

    Args:
        auxes: the aux of each micro-batch.
        stack: whether the recipe accumulates; a single micro-batch is then stacked too.
    """
    if not stack or auxes[0] is None:
        return auxes[0]
    return map_tree(_stack_leaves, *auxes)


def _stack_leaves(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    try:
        tensors = [torch.as_tensor(leaf) for leaf in leaves]
    except (RuntimeError, TypeError) as error:
        raise BatchError("aux must be tensors or numbers, to be stacked over the micro-batches.") from error
    return torch.cat(tensors) if is_concatenated([tuple(tensor.shape) for tensor in tensors]) else torch.stack(tensors)
