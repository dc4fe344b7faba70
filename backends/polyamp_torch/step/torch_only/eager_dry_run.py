"""Eager trial pass before a step is compiled or recompiled: checks support, and finds the trained parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.results import LossFunction
from polyamp.rules.accumulation import Accumulation
from polyamp_torch.compat import assume_constant_result, tree_leaves
from polyamp_torch.precision.autocast import root_region
from polyamp_torch.precision.torch_only.compiled_attention import AttentionCastMode
from polyamp_torch.step.forward_backward import PassSnapshot, scaled_backward, stash_grads
from polyamp_torch.step.loss_weights import make_loss_weighting
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only import buffers
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.foreign_grads import ForeignGrads
from polyamp_torch.step.torch_only.python_state_snapshot import PythonState, describe_item, restore_item
from polyamp_torch.step.torch_only.random_state import preserve_random_states


class TrialResult(NamedTuple):
    """Result of an eager trial pass.

    Attributes:
        used: the parameters that the loss depends on.
        attends: whether the pass calls attention functions that need `AttentionCastMode`.
        written: the parameters that the forward pass writes to.
        changing: descriptions of the Python state that every pass changes.
    """

    used: list[str]
    attends: bool
    written: list[str]
    changing: list[str]


def run_trial(loss_fn: LossFunction, state: TorchState, part: Any) -> TrialResult:
    """Run one eager pass, then restore parameters, gradients, buffers, random streams and changing Python state.

    Python state is restored if every pass changes it. State that only the first pass changes, such as a cache, is
    kept. A second pass distinguishes the two.

    Raises:
        PolyampError: the eager step raises it.
        UnsupportedError: the forward pass adds, deletes, replaces or resizes a buffer, which a graph cannot represent.
    """
    state.check_unchanged()
    snapshot = PassSnapshot(state)
    python = PythonState(loss_fn, state.model)
    changing: list[str] = []
    try:
        parameters = list(state.parameters.values())
        with (
            preserve_random_states(state.model, state.device),
            DeferInterrupts() as interrupts,
            stash_grads(parameters),
            ForeignGrads(parameters, state.graphs) as foreign,
            AttentionCastMode(state.device.type, acting=False) as attention,
        ):
            weighting = make_loss_weighting(None, [part], Accumulation((1,)), state.replicas, state.device)
            weighting.omits = False
            writes = [snapshot.parameters]
            _, aux = scaled_backward(loss_fn, [state], part, foreign, interrupts, weighting, writes=writes)
            used = [name for name, p in state.parameters.items() if p.grad is not None]
            changing = _restore_changing_state(loss_fn, state, part, python, interrupts)
        changed = snapshot.buffers.changed()
        snapshot.parameters.compare()
    finally:
        buffers.restore_buffers(snapshot.buffers)
        snapshot.parameters.settle(torch.zeros((), dtype=torch.bool))
    for name, verb in changed.items():
        raise UnsupportedError(
            f"train_step(compile=...): the forward pass {verb} the buffer {name!r}, which a compiled graph cannot "
            "follow. Write into it (buffer.copy_(value)), or use compile=False. If only the first pass does it: call "
            "the model once on a batch before polyamp.init."
        )
    if weighting.sums_means:
        raise UnsupportedError(
            "train_step(compile=...) takes no sum of Means over different counts: over micro-batches, what they are "
            "divided by has to be known first. Use compile=False, or one Mean."
        )
    for leaf in tree_leaves(aux):
        if not isinstance(leaf, torch.Tensor | int | float | str | None):
            raise UnsupportedError(
                "train_step(compile=...): aux must hold tensors, numbers and strings in tuples, lists and dicts. "
                f"Received: {type(leaf).__name__}. Return those, or use compile=False."
            )
    return TrialResult(used, attention.seen, snapshot.parameters.found, changing)


def _restore_changing_state(
    loss_fn: LossFunction, state: TorchState, part: Any, python: PythonState, interrupts: DeferInterrupts
) -> list[str]:
    """Restore Python state that both the pass and another one change; return descriptions of it."""
    first = python.changed()
    if not first:
        return []
    between = PythonState(loss_fn, state.model)
    with torch.no_grad(), state.bound.installed(), root_region(state.plan, state.device.type), interrupts.allowed:
        loss_fn(state.bound, part)
    again = between.changed()
    paths = {id(module): f"model.{path}" if path else "model" for path, module in state.model.named_modules()}
    found = []
    for item, held in first.items():
        if item in again:
            found.append(describe_item(held, item[1], lambda owner: paths.get(id(owner))))
            restore_item(held, item[1])
    return found


class RetraceMonitor:
    """Monitor that repeats the trial when a graph is retraced, because a branch may have changed.

    Args:
        first: the result of the first trial.

    Attributes:
        given: the state and the micro-batch of the current step.
        interrupts: delivers interrupts while a compiler traces, which may take minutes.
        changing: descriptions of the Python state that every pass changes.
        refusal: the error to raise; a compiler changes errors that are raised while it traces.
    """

    def __init__(self, loss_fn: LossFunction, first: TrialResult) -> None:
        self._loss_fn = loss_fn
        self._first = first
        self._is_first = True
        self.changing = first.changing
        self.given: tuple[TorchState, Any] | None = None
        self.interrupts: DeferInterrupts | None = None
        self.refusal: PolyampError | None = None

    def check_trace(self) -> None:
        """Check a new trace; called once per trace.

        Raises:
            UnsupportedError: the graph would train other parameters than the eager step.
        """
        if self.interrupts is not None:
            self.interrupts.allowed.__enter__()
        if self._is_first or self.given is None:
            self._is_first = False
            return
        try:
            again, first = run_trial(self._loss_fn, *self.given), self._first
            self.changing = again.changing
            for these, those, how in (
                (again.used, first.used, "now depends"),
                (first.used, again.used, "no longer depends"),
            ):
                other = next((name for name in these if name not in those), None)
                if other is not None:
                    raise UnsupportedError(
                        f"train_step(compile=...): the loss {how} on the parameter {other!r}, unlike at first. "
                        "A compiled step always trains the same parameters. Use compile=False."
                    )
            new = next((name for name in again.written if name not in first.written), None)
            if new is not None:
                raise UnsupportedError(
                    f"train_step(compile=...): the forward pass now writes to the parameter {new!r}, unlike at first, "
                    "which the graph does not take back. Use compile=False."
                )
        except PolyampError as error:
            self.refusal = type(error)(str(error))
            raise


@assume_constant_result
def check_retrace(watch: RetraceMonitor) -> None:
    """Check for a retrace. The compiled function calls it, but it runs only while that function is traced."""
    watch.check_trace()
