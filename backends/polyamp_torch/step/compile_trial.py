"""One eager pass before a step is compiled, and before it is compiled again: what may be compiled, and what it trains.

Called by `compiled`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from polyamp.errors import PolyampError, UnsupportedError
from polyamp.results import LossFunction
from polyamp.rules.window import Window
from polyamp_torch.compat import constant_when_compiled, tree_leaves
from polyamp_torch.precision.attention import Attention
from polyamp_torch.precision.autocast import opened
from polyamp_torch.step import running as buffers
from polyamp_torch.step.bystanders import Bystanders
from polyamp_torch.step.differentiate import scaled_backward, set_aside
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.python_state import PythonState, described, put_back
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.weighing import weighing_of


class Tried(NamedTuple):
    """What one eager pass tells.

    Attributes:
        used: the parameters that the loss depends on.
        attends: whether it calls attention that `Attention` must help.
        written: the parameters that the forward pass writes to.
        changing: Python state that every pass changes, in words.
    """

    used: list[str]
    attends: bool
    written: list[str]
    changing: list[str]


def tried(loss_fn: LossFunction, state: TorchState, part: Any) -> Tried:
    """One eager pass, after which parameters, gradients, buffers and random numbers are as they were, and Python state
    that every pass changes. What only the first one changes, such as a cache, stays: a second pass tells them apart.

    Raises:
        PolyampError: what the eager step raises.
        UnsupportedError: a buffer is added, deleted, replaced or resized by the forward pass, which a graph cannot
            follow.
    """
    state.check_unchanged()
    saved = buffers.snapshot(state.buffer_owners)
    before = state.writes.before_trial()
    python = PythonState(loss_fn, state.model)
    changing: list[str] = []
    try:
        parameters = list(state.parameters.values())
        with (
            _streams(state.device),
            Undisturbed() as quiet,
            set_aside(parameters),
            Bystanders(parameters, state.graphs) as others,
            Attention(state.device.type, acting=False) as attention,
        ):
            weighing = weighing_of(None, [part], Window((1,)), state.replicas, state.device)
            weighing.omits = False
            _, aux = scaled_backward(loss_fn, [state], part, others, quiet, weighing, writes=[before])
            used = [name for name, p in state.parameters.items() if p.grad is not None]
            changing = _again(loss_fn, state, part, python, quiet)
        changed = saved.changed()
        before.compare()
    finally:
        buffers.taken_back(saved)
        before.settle(torch.zeros((), dtype=torch.bool))
    for name, verb in changed.items():
        raise UnsupportedError(
            f"train_step(compile=...): the forward pass {verb} the buffer {name!r}, which a compiled graph cannot "
            "follow. Write into it (buffer.copy_(value)), or use compile=False. If only the first pass does it: call "
            "the model once on a batch before polyamp.init."
        )
    if weighing.sums_means:
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
    return Tried(used, attention.seen, before.found, changing)


def _again(loss_fn: LossFunction, state: TorchState, part: Any, python: PythonState, quiet: Undisturbed) -> list[str]:
    """Put back what the pass has changed and another one changes again: its names."""
    first = python.changed()
    if not first:
        return []
    between = PythonState(loss_fn, state.model)
    with torch.no_grad(), state.bound.installed(), opened(state.plan, state.device.type), quiet.disturbed:
        loss_fn(state.bound, part)
    again = between.changed()
    paths = {id(module): f"model.{path}" if path else "model" for path, module in state.model.named_modules()}
    found = []
    for item, held in first.items():
        if item in again:
            found.append(described(held, item[1], lambda owner: paths.get(id(owner))))
            put_back(held, item[1])
    return found


@contextlib.contextmanager
def _streams(device: torch.device) -> Iterator[None]:
    """A block after which random numbers go on as before it, Python's and NumPy's too."""
    own, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002  # the one that programs draw from
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numbers)  # noqa: NPY002  # the same stream


class Watch:
    """Looks again which parameters the loss depends on when a graph is traced anew: a branch may have turned.

    Args:
        first: what the first try found.

    Attributes:
        given: the state and the micro-batch of the step under way.
        quiet: lets interrupts through while a compiler traces, which may take minutes.
        changing: Python state that every pass changes, in words.
        refusal: what to raise, since a compiler changes what is raised while it traces.
    """

    def __init__(self, loss_fn: LossFunction, first: Tried) -> None:
        self._loss_fn = loss_fn
        self._first = first
        self._is_first = True
        self.changing = first.changing
        self.given: tuple[TorchState, Any] | None = None
        self.quiet: Undisturbed | None = None
        self.refusal: PolyampError | None = None

    def look(self) -> None:
        """Called once a trace.

        Raises:
            UnsupportedError: the graph would train other parameters than the eager step.
        """
        if self.quiet is not None:
            self.quiet.let_through()
        if self._is_first or self.given is None:
            self._is_first = False
            return
        try:
            again, first = tried(self._loss_fn, *self.given), self._first
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


@constant_when_compiled
def traced_again(watch: Watch) -> None:
    """Called by the function that is compiled; runs when it is traced, and only then."""
    watch.look()
