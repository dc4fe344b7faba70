"""One forward and backward pass, with what every module gave and the gradients by it. Called by `observer`.

The pass is `value_and_grad`'s own. Forward hooks see outputs as calls end and hang a hook on each, which sees its
gradient in the backward pass; both are gone when the pass is over, and random streams are where they were.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp.parity.observing import See, Watched
from polyamp.results import LossFunction
from polyamp.rules import refusals
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import inside_of_compiled
from polyamp_torch.observe.seen import array_of, tensor_of
from polyamp_torch.porting.walk import short_paths, wrapped
from polyamp_torch.step.bystanders import Graphs
from polyamp_torch.step.differentiate import value_and_grad
from polyamp_torch.step.state import TorchState


def watch(state: TorchState, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
    """`Observer.watch`."""
    scale = float(state.scale_state.scale) if state.scaler.scales else 1.0
    watcher = _Watcher(see, scale)
    graphs, state.graphs = state.graphs, Graphs()  # they know the state's own loss function
    try:
        with _same_random_numbers(state), watcher.on(state.model):
            _, (found,) = value_and_grad(watcher.between(loss_fn), [state], batch)
    finally:
        state.graphs = graphs
    gradients = {name: None if value is None else array_of(value) for name, value in found.values.items()}
    return Watched(watcher.loss, gradients, unseen=_unseen(state.model))


class _Watcher:
    """What sees one pass."""

    def __init__(self, see: See, scale: float) -> None:
        self.see = see
        self.scale = scale
        self.forward = True
        self.loss = float("nan")
        self.calls: dict[str, int] = {}
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A block in which the modules of a model are seen."""
        try:
            for path, module in seen_modules(model):
                self.handles.append(module.register_forward_hook(self._after(path)))
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def between(self, loss_fn: LossFunction) -> LossFunction:
        """The loss function, behind which the backward pass begins."""

        def told(model: Any, batch: Any) -> Any:
            result = loss_fn(model, batch)
            self.forward = False
            loss, _ = refusals.split_result(result)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self.loss = loss.detach().double().item()
            return result

        return told

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = tensor_of(module, output)
            if not self.forward or tensor is None:
                return
            self.calls[path] = number = self.calls.get(path, 0) + 1
            place = path if number == 1 else f"{path}#{number}"
            self.see(place, "output", array_of(tensor), dtype_name(tensor.dtype))
            if tensor.requires_grad:
                self.handles.append(tensor.register_hook(self._behind(place)))  # type: ignore[no-untyped-call]  # torch's

        return hook

    def _behind(self, place: str) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if not self.forward:
                values = array_of(gradient)
                self.see(place, "cotangent", values / values.dtype.type(self.scale), dtype_name(gradient.dtype))

        return hook


def seen_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of what shows its output: of a wrapper and what it wraps the wrapper; nothing that is inside of
    what `torch.compile` made, which a hook would have it compile otherwise."""
    short = short_paths(model)
    hidden: list[str] = []
    around: set[str] = set()
    for place, module in model.named_modules():
        if any(f"{place}.".startswith(prefix) for prefix in hidden):
            continue
        if place not in around:
            yield short[place], module
        attribute = wrapped(module)
        if attribute is not None:
            inner = f"{place}.{attribute}".lstrip(".")
            around.add(inner)
            if inside_of_compiled(module) is not module:
                hidden.append(f"{inner}.")


def _unseen(model: nn.Module) -> str:
    short = short_paths(model)
    found = [short[place] for place, module in model.named_modules() if inside_of_compiled(module) is not module]
    if not found:
        return ""
    named = ", ".join(repr(path) if path else "the model" for path in found[:4])
    return f"torch.compile made one function of {named}, whose inner modules do not run one by one"


@contextlib.contextmanager
def _same_random_numbers(state: TorchState) -> Iterator[None]:
    """A block behind which the random streams of torch, NumPy and Python are where they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the stream that a program may use
    devices = [state.device] if state.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
