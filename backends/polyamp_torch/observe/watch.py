"""One forward and backward pass, with what every module gave and the gradients by it. Called by `observer`.

The pass is `value_and_grad`'s own. Forward hooks see outputs as calls end and hang a hook on each, which sees its
gradient in the backward pass; both are gone when the pass is over, and random streams are where they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from polyamp.parity.observing import See, Watched
from polyamp.results import LossFunction
from polyamp.rules import refusals
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import NOTHING, children_in, compiled_in_place, followed_in_place, is_compiled
from polyamp_torch.observe.compiled import compiled_parts, unseen
from polyamp_torch.observe.kept import same_attributes, same_random_numbers
from polyamp_torch.observe.operations import Operations
from polyamp_torch.observe.seen import array_of, digest, tensor_of
from polyamp_torch.porting.walk import short_paths, wrapped
from polyamp_torch.step.bystanders import Graphs
from polyamp_torch.step.differentiate import value_and_grad
from polyamp_torch.step.state import TorchState


def watch(state: TorchState, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
    """`Observer.watch`. Operations are told of a state that no step has updated."""
    why = unseen(state.model, loss_fn)
    operations = None if why or int(state.step) else Operations()
    watcher = _Watcher(see, float(state.scale_state.scale) if state.scaler.scales else 1.0, operations)
    modules = [] if is_compiled(loss_fn) else seen_modules(state.model)
    graphs, state.graphs = state.graphs, Graphs()  # they know the state's own loss function
    try:
        with (
            same_random_numbers(state.model, state.device),
            same_attributes(state.model),
            watcher.on(modules),
            operations or NOTHING,
        ):
            _, (found,) = value_and_grad(watcher.between(loss_fn), [state], batch)
    finally:
        state.graphs = graphs
    gradients = {name: None if value is None else array_of(value, copy=False) for name, value in found.values.items()}
    return Watched(watcher.loss, gradients, operations.rows if operations else (), why)


class _Watcher:
    """What sees one pass.

    Args:
        see: gets what is seen.
        scale: the loss scale, which cotangents are divided by.
        operations: is told which module runs.
    """

    def __init__(self, see: See, scale: float, operations: Operations | None) -> None:
        self.see = see
        self.scale = scale
        self.operations = operations
        self.running = False
        self.backward = False
        self.loss = float("nan")
        self.calls: dict[str, int] = {}
        self.pending: dict[str, list[tuple[str, bytes]]] = {}
        self.handles: list[Any] = []

    @contextlib.contextmanager
    def on(self, modules: list[tuple[str, nn.Module]]) -> Iterator[None]:
        """A block in which modules are seen."""
        try:
            for path, module in modules:
                if compiled_in_place(module) is not None:  # its hooks are in what is compiled
                    self.handles.append(followed_in_place(module, partial(self._after(path), module, ())))
                    continue
                if self.operations is not None:
                    self.handles.append(module.register_forward_pre_hook(self._before(path)))
                self.handles.append(module.register_forward_hook(self._after(path), always_call=True))
            yield
        finally:
            for handle in self.handles:
                handle.remove()

    def between(self, loss_fn: LossFunction) -> LossFunction:
        """The loss function, behind which the backward pass begins."""

        def told(model: Any, batch: Any) -> Any:
            self._run(on=True)
            try:
                result = loss_fn(model, batch)
            finally:
                self._run(on=False)
            self.backward = True
            loss, _ = refusals.split_result(result)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self.loss = loss.detach().double().item()
            return result

        return told

    def _run(self, *, on: bool) -> None:
        self.running = on
        if self.operations is not None:
            self.operations.active = on

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.running and self.operations is not None:
                self.operations.modules.append(path)

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling():  # in a function that is compiled inside of the model
                return
            if self.running and self.operations is not None and self.operations.modules:
                self.operations.modules.pop()
            tensor = None if output is None else tensor_of(module, output)
            if tensor is not None and self.running:
                self._seen(path, tensor, None if children_in(module) else _input(args, tensor))
            elif tensor is not None and self.backward and path in self.pending:
                self._seen_again(path, tensor)

        return hook

    def _seen(self, path: str, tensor: torch.Tensor, given: torch.Tensor | None) -> None:
        self.calls[path] = number = self.calls.get(path, 0) + 1
        place = path if number == 1 else f"{path}#{number}"
        if given is not None:
            self.see(place, "input", array_of(given), dtype_name(given.dtype))
        values = array_of(tensor)
        self.see(place, "output", values, dtype_name(tensor.dtype))
        if tensor.requires_grad:
            self._follow(place, tensor)
        elif not torch.is_grad_enabled():  # a reentrant checkpoint, which runs it again with gradients, or nobody does
            self.pending.setdefault(path, []).append((place, digest(values)))

    def _seen_again(self, path: str, tensor: torch.Tensor) -> None:
        """What a checkpoint runs again in the backward pass is the call that it was."""
        if not tensor.requires_grad:
            return
        waiting = self.pending[path]
        known = digest(array_of(tensor)) if len(waiting) > 1 else None
        number = next((n for n, (_, each) in enumerate(waiting) if each == known), len(waiting) - 1)
        if waiting:
            self._follow(waiting.pop(number)[0], tensor)

    def _follow(self, place: str, tensor: torch.Tensor) -> None:
        """See the gradient by a tensor, when it is there."""

        def hook(gradient: torch.Tensor) -> None:
            if self.backward:  # and not in one that the loss function runs itself
                values = array_of(gradient)
                values /= values.dtype.type(self.scale)
                self.see(place, "cotangent", values, dtype_name(gradient.dtype))

        self.handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's


def _input(args: Any, output: torch.Tensor) -> torch.Tensor | None:
    """The first floating tensor that a module was given, by position; None where what it gave has its memory: then the
    module may have written to it."""
    given = next((each for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()), None)
    if given is None or not given.numel() or given.layout != torch.strided or output.layout != torch.strided:
        return None
    same = given.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return None if same else given


def seen_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of what shows its output: of a wrapper and what it wraps the wrapper; nothing that is inside of
    what is compiled."""
    short = short_paths(model)
    hidden = [(part.place, part.inside) for part in compiled_parts(model) if part.inside is not None]
    around: set[str] = set()
    found = []
    for place, module in model.named_modules():
        attribute = wrapped(module)
        if attribute is not None:
            around.add(f"{place}.{attribute}".lstrip("."))
        if place not in around and not any(place != own and place.startswith(inside) for own, inside in hidden):
            found.append((short[place], module))
    return found
