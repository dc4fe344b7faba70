"""Activation checkpointing: what was installed in the forward pass is installed again where backward repeats it.

`torch.utils.checkpoint` brings autocast's own state back for the second run, but no `TorchFunctionMode` and nothing
else that polyamp does. Its hooks for that (`context_fn`) exist for one of its two kinds only, and have to be given at
the call, inside the model. So `carry` gives each checkpoint that is under way the contexts to open again. It reads
torch's private frames, here and nowhere else. Called by `islands` and `bound`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import CHECKPOINT_PACKS, REENTRANT, record_of_checkpoint, top_hooks_of_saved

Open = Callable[[], AbstractContextManager[Any]]


class Carried:
    """A function that a checkpoint runs again in backward, with the contexts it ran in at first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.contexts: dict[Any, Open] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for opened in self.contexts.values():
                stack.enter_context(opened())
            return self.function(*args, **kwargs)


def carry(key: Any, opened: Open, *, everywhere: bool = False) -> None:
    """Open the context `opened()` in backward too, if a checkpoint is being recorded in this thread.

    Args:
        key: names the context, which is opened once however often it is asked for.
        opened: makes the context.
        everywhere: look for checkpoints with `use_reentrant=True` too, on the whole stack; see below for a cheaper way.

    Raises:
        UnsupportedError: this version of torch keeps its checkpoints in another way.
    """
    if everywhere and not torch.is_grad_enabled():
        _attach_all(key, opened)
        return
    if top_hooks_of_saved is None:
        _attach_all(key, opened)
        return
    hooks = top_hooks_of_saved(True)
    if hooks is None or not hooks[0].__qualname__.startswith(CHECKPOINT_PACKS):
        return
    known = hooks[0].__dict__.setdefault("polyamp_carried", set())
    if key in known:
        return
    if not _attach_all(key, opened):
        raise UnsupportedError(
            f"polyamp cannot follow torch.utils.checkpoint in torch {torch.__version__}: its second run, in backward, "
            "would compute other numbers. Wrap the function: checkpoint(polyamp_torch.carried(function), ...)."
        )
    known.add(key)


def carry_into_reentrant(key: Any, opened: Open) -> None:
    """The same for a checkpoint with `use_reentrant=True`, at the moment in which it turns gradients off."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):  # the mode's frames, and torch.no_grad's own
        frame = frame and frame.f_back
        if frame is not None and frame.f_code is REENTRANT:
            _attach(frame.f_locals["ctx"], "run_function", key, opened)
            return


def _attach_all(key: Any, opened: Open) -> bool:
    """Attach to every checkpoint on the stack; False if none is found."""
    found = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is REENTRANT:
            _attach(frame.f_locals["ctx"], "run_function", key, opened)
        elif (record := record_of_checkpoint(frame)) is not None:
            _attach(record, "recompute_fn", key, opened)
            found = True
        frame = frame.f_back
    return found


def _attach(owner: Any, name: str, key: Any, opened: Open) -> None:
    function = getattr(owner, name)
    if not isinstance(function, Carried):
        function = Carried(function)
        setattr(owner, name, function)
    function.contexts.setdefault(key, opened)
