"""A module's buffers before and after a forward pass: what it changes comes true only if the step is applied.

Called by the step (S12). Buffers may be made, replaced or set to None by the forward pass. The whole step calls
`snapshot` and `settle`; where the forward pass and the update are two calls, it is `snapshot`, `taken_back`, `commit`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp_torch.compat import buffers_in
from polyamp_torch.step.measure import looks

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


Owners = list[tuple[str, dict[str, Any]]]
"""Path of every module with the dict that holds its buffers."""


def owners(module: nn.Module) -> Owners:
    """What `snapshot` looks at, for callers that look at it every step and need not search the module each time."""
    return [(path, buffers_in(part)) for path, part in module.named_modules()]


def writable(owners: Owners) -> dict[str, torch.Tensor]:
    """The buffers that a forward pass can write into, by torch's names; a shared one once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, slots in owners:
        for name, buffer in slots.items():
            if buffer is not None and _writable(buffer):
                found.setdefault(id(buffer), (f"{path}.{name}" if path else name, buffer))
    return dict(found.values())


@torch.no_grad()
def snapshot(module: nn.Module | Owners) -> dict[str, Saved]:
    """Every buffer of the module with a copy of its value."""
    found = {}
    for path, slots in owners(module) if isinstance(module, nn.Module) else module:
        if not slots:
            continue
        for name, buffer in slots.items():
            copy = buffer.clone() if buffer is not None and _writable(buffer) else None
            found[f"{path}.{name}" if path else name] = Saved(slots, name, buffer, copy)
    return found


@torch.no_grad()
def settle(saved: dict[str, Saved], finite: torch.Tensor | None) -> None:
    """Let what the forward pass left behind stand where `finite` says so, and restore the rest; None lets it stand.

    On the CPU, and for buffers that were made or replaced by something unlike, the flag is read. A buffer that was
    replaced by one like it is written instead, so that it stays the same tensor.
    """
    for slots, name, buffer, copy in saved.values():
        now = slots.get(name)
        replaced = now is not buffer
        if buffer is not None and copy is not None and _alike(buffer, now):
            assert now is not None
            if finite is not None and not looks(now.device):
                buffer.copy_(torch.where(finite.to(now.device), now, copy))
            elif finite is not None and not bool(finite):
                buffer.copy_(copy)
            elif replaced:
                buffer.copy_(now)
            slots[name] = buffer
        elif replaced and finite is not None and not bool(finite):
            slots[name] = buffer
            if buffer is not None and copy is not None:
                buffer.copy_(copy)


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
        slots = buffers_in(module.get_submodule(owner))
        old = slots.get(name)
        if _alike(old, value):
            assert old is not None
            assert value is not None
            old.copy_(value if finite is None else torch.where(finite.to(old.device), value, old))
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
