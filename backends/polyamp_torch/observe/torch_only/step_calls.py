"""`record_step_calls`: runs a step of a user's own loop, records its clips, unscaling and updates, and undoes it.

`sys.setprofile` reports the calls, so that functions which a program has imported by name are seen, and nothing is
replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import nn

from polyamp.errors import ArgumentError
from polyamp.linter.setup_figures import StepCall
from polyamp_torch.observe.torch_only.attribute_snapshot import preserve_attributes
from polyamp_torch.porting.inventory import module_tensors
from polyamp_torch.step.torch_only.random_state import preserve_random_states

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
"""Functions of `torch.nn.utils`; the last one is newer than the oldest supported torch."""


def record_step_calls(step: Any, model: nn.Module, optimizer: Any, scaler: Any) -> list[StepCall]:
    """Run `step()` once and return its calls in order; those of a scaler that is off have no effect and are left out.

    Raises:
        ArgumentError: the step uses another scaler than the given one.
    """
    recorder = _CallRecorder(optimizer, scaler)
    with preserve_training(model, optimizer, scaler), recorder.installed():
        step()
    return recorder.calls


class _CallRecorder:
    """Recorder of the calls of one step."""

    def __init__(self, optimizer: Any, scaler: Any) -> None:
        self.calls: list[StepCall] = []
        self._scaler = scaler
        clips = [getattr(nn.utils, name) for name in _CLIPS if hasattr(nn.utils, name)]
        self._clips = {_code(each): each.__name__ for each in clips}
        kinds = {torch.amp.GradScaler, *(type(scaler).__mro__ if scaler is not None else ())}
        self._unscales, self._steps = (
            {_code(vars(kind)[name]) for kind in kinds if name in vars(kind)} for name in ("unscale_", "step")
        )
        self._optimizer_step = _code(type(optimizer).step)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which calls of this thread are recorded."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code in self._clips:
            self._add("clip", self._clips[code], frame)
        elif event == "call" and code in self._unscales:
            self._check_scaler(frame)
            self._add("unscale", code.co_name, frame)
        elif event == "return" and code in self._steps:  # it unscales inside
            self._check_scaler(frame)
            self._add("step", code.co_name, frame)
        elif event == "return" and code is self._optimizer_step:
            self._add("step", code.co_name, frame)

    def _check_scaler(self, frame: FrameType) -> None:
        used = frame.f_locals["self"]
        if used is not self._scaler and used.is_enabled():
            raise ArgumentError(
                "lint: step uses a GradScaler that was not passed. Pass scaler=, which is put back then."
            )

    def _add(self, action: Any, name: str, frame: FrameType) -> None:
        if self._scaler is None or not self._scaler.is_enabled():
            return
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
            if caller.f_code in self._clips:  # one clip is made of another
                return
            caller = caller.f_back
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
        self.calls.append(StepCall(action, name, place))


def _code(function: Any) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code


@contextlib.contextmanager
def preserve_training(model: nn.Module, optimizer: Any, scaler: Any) -> Iterator[None]:
    """Context manager that puts back a model's tensors, gradients and attributes, the state and settings of its
    optimizer and scaler, and the random generators."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {id(each): each for each in (*module_tensors(model), *held)}.values()
    gradients = [(each, each.grad) for each in tensors if each.is_leaf]
    values = [*tensors, *(grad for _, grad in gradients if grad is not None)]
    copies = [(each, each.detach().clone()) for each in values]
    dicts = [*optimizer.param_groups, vars(optimizer), optimizer.state, *optimizer.state.values()]
    dicts += [vars(scaler)] if scaler is not None else []
    contents = [_DictSnapshot(each) for each in dicts]
    try:
        with preserve_attributes(model), preserve_random_states(model):
            yield
    finally:
        for content in contents:
            content.restore()
        with torch.no_grad():
            for each, copy in copies:
                each.detach().copy_(copy)
        for each, grad in gradients:
            each.grad = grad


class _DictSnapshot:
    """The items of a dict: the objects, and the contents of those that are tensors or plain containers."""

    def __init__(self, target: Any) -> None:
        self._target, self._items = target, dict(target)
        self._tensors = [
            (each, each.detach().clone())
            for each in self._items.values()
            if isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter)
        ]
        self._containers: list[tuple[Any, Any]] = [
            (each, each.copy()) for each in self._items.values() if isinstance(each, dict | list) and each is not target
        ]

    def restore(self) -> None:
        """Put the items back."""
        self._target.clear()
        self._target.update(self._items)
        with torch.no_grad():
            for each, copy in self._tensors:
                each.detach().copy_(copy)
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
