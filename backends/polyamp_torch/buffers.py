"""A module's buffers before and after a forward pass: what it changes comes true only if the step is applied.

Called by the step (S12). Buffers may be made, replaced or set to None by the forward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

Running = dict[str, torch.Tensor | None]
"""Buffer path, `.`-separated as torch names it -> value after the forward pass."""


class Saved(NamedTuple):
    """One buffer as it was.

    Attributes:
        slots: the `_buffers` dict of the module that owns it.
        name: its name there.
        buffer: the buffer itself, or None.
        copy: its value, or None where it cannot be written in place.
    """

    slots: dict[str, Any]
    name: str
    buffer: torch.Tensor | None
    copy: torch.Tensor | None


@torch.no_grad()
def snapshot(module: nn.Module) -> dict[str, Saved]:
    """Every buffer of the module with a copy of its value."""
    found = {}
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            copy = buffer.clone() if buffer is not None and _writable(buffer) else None
            found[f"{path}.{name}" if path else name] = Saved(part._buffers, name, buffer, copy)
    return found


@torch.no_grad()
def taken_back(saved: dict[str, Saved]) -> Running:
    """The values that the forward pass left behind; the buffers themselves are again as they were."""
    running: Running = {}
    for path, (slots, name, buffer, copy) in saved.items():
        now = slots.get(name)
        if now is not buffer:
            running[path] = now
            slots[name] = buffer
        elif buffer is not None and copy is not None:
            running[path] = buffer.clone()
        if buffer is not None and copy is not None:
            buffer.copy_(copy)
    return running


@torch.no_grad()
def commit(module: nn.Module, running: Running, finite: torch.Tensor | None) -> None:
    """Give the buffers the values of `running` where `finite` says so; None says so without looking."""
    for path, value in running.items():
        owner, _, name = path.rpartition(".")
        slots = module.get_submodule(owner)._buffers
        old = slots.get(name)
        if _alike(old, value):
            assert old is not None
            assert value is not None
            old.copy_(value if finite is None else torch.where(finite, value, old))
        elif finite is None or bool(finite):
            slots[name] = value


def _alike(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    if old is None or new is None or not _writable(old):
        return False
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _writable(buffer: torch.Tensor) -> bool:
    """False for sparse and for expanded buffers, which no forward pass changes in place."""
    overlapping = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)) \
        if buffer.layout == torch.strided else True  # fmt: skip
    return not overlapping
