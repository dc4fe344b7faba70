"""Activation checkpointing: opens polyamp's contexts of the forward pass again when backward recomputes it.

For the second run, `torch.utils.checkpoint` restores autocast's state, but no `TorchFunctionMode` and no other state of
polyamp. Its hook for that (`context_fn`) exists for one of its two kinds only, and is an argument of the call inside
the model. So `carry_into_checkpoint` attaches the contexts to each running checkpoint. Only this module reads torch's
private frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import CHECKPOINT_HOOK_PREFIX, REENTRANT_CODE, checkpoint_record, top_saved_tensor_hooks

ContextFactory = Callable[[], AbstractContextManager[Any]]


class RecomputedFunction:
    """Function that a checkpoint recomputes in backward, in the contexts of its first run."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.contexts: dict[Any, ContextFactory] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for open_context in self.contexts.values():
                stack.enter_context(open_context())
            return self.function(*args, **kwargs)


def carry_into_checkpoint(key: Any, open_context: ContextFactory, *, everywhere: bool = False) -> None:
    """Open the context `open_context()` in backward too, if a checkpoint is being recorded in this thread.

    Args:
        key: identifies the context, opened once however often it is requested.
        open_context: makes the context.
        everywhere: search the whole stack for checkpoints with `use_reentrant=True` too; `carry_into_reentrant` is
            cheaper.

    Raises:
        UnsupportedError: this version of torch stores its checkpoints in another way.
    """
    if top_saved_tensor_hooks is None or (everywhere and not torch.is_grad_enabled()):
        _attach_all(key, open_context)
        return
    hooks = top_saved_tensor_hooks(True)
    if hooks is None or not hooks[0].__qualname__.startswith(CHECKPOINT_HOOK_PREFIX):
        return
    known = hooks[0].__dict__.setdefault("polyamp_carried", set())
    if key in known:
        return
    if not _attach_all(key, open_context):
        raise UnsupportedError(
            f"polyamp cannot follow torch.utils.checkpoint in torch {torch.__version__}: its second run, in backward, "
            "would compute other numbers. Wrap the function: checkpoint(polyamp_torch.carried(function), ...)."
        )
    known.add(key)


def carry_into_reentrant(key: Any, open_context: ContextFactory) -> None:
    """Open the context in backward too, for a checkpoint with `use_reentrant=True` that is turning gradients off."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):  # the mode's frames, and torch.no_grad's own
        frame = frame and frame.f_back
        if frame is not None and frame.f_code is REENTRANT_CODE:
            _attach(frame.f_locals["ctx"], "run_function", key, open_context)
            return


def _attach_all(key: Any, open_context: ContextFactory) -> bool:
    """Attach the context to every checkpoint on the stack; return False if none is found."""
    found = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is REENTRANT_CODE:
            _attach(frame.f_locals["ctx"], "run_function", key, open_context)
        elif (record := checkpoint_record(frame)) is not None:
            _attach(record, "recompute_fn", key, open_context)
            found = True
        frame = frame.f_back
    return found


def _attach(owner: Any, name: str, key: Any, open_context: ContextFactory) -> None:
    function = getattr(owner, name)
    if not isinstance(function, RecomputedFunction):
        function = RecomputedFunction(function)
        setattr(owner, name, function)
    function.contexts.setdefault(key, open_context)
