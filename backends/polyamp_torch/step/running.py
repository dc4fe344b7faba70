"""A module's buffers before and after a forward pass: what it changes comes true only if the step is applied.

Called by the step (S12). Buffers may be written, resized, replaced, set to None, added or deleted by the forward pass.
The whole step calls `snapshot` and `settle`; where the forward pass and the update are two calls, it is `snapshot`,
`taken_back`, `commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp_torch.compat import buffers_in, left_out_of_checkpoints
from polyamp_torch.step.measure import looks


class Resized(NamedTuple):
    """A buffer that the forward pass gave another shape or dtype in place.

    Attributes:
        value: after the pass.
    """

    value: torch.Tensor


class Deleted(NamedTuple):
    """A buffer that the forward pass deleted."""


_DELETED: Final = Deleted()

Running = dict[str, torch.Tensor | Resized | Deleted | None]
"""Buffer path, `.`-separated as torch names it -> what the forward pass left there."""


class Owner(NamedTuple):
    """A module that has buffers, or may be given some.

    Attributes:
        path: of the module, as torch names it.
        slots: the dict that holds its buffers.
        unsaved: the names of those that its `state_dict` leaves out.
    """

    path: str
    slots: dict[str, Any]
    unsaved: set[str]

    def place(self, name: str) -> str:
        """The path of a buffer."""
        return f"{self.path}.{name}" if self.path else name


class Owners(tuple[Owner, ...]):
    """The modules of a model.

    Attributes:
        slots: of each.
        unsaved: of each.
    """

    slots: list[dict[str, Any]]
    unsaved: list[set[str]]

    def __new__(cls, owners: Iterable[Owner]) -> Owners:
        made = super().__new__(cls, owners)
        made.slots = [owner.slots for owner in made]
        made.unsaved = [owner.unsaved for owner in made]
        return made

    @property
    def names(self) -> tuple[list[Any], list[Any]]:
        """Of each the names of its buffers, and of those that its `state_dict` leaves out. Called in every step."""
        return (
            list(map(tuple, self.slots)) if any(self.slots) else [],
            list(map(frozenset, self.unsaved)) if any(self.unsaved) else [],
        )


class Saved(NamedTuple):
    """One buffer as it was.

    Attributes:
        owner: whose it is.
        name: its name there.
        buffer: the buffer itself, or None.
        memory: a second tensor over its memory, with the shape, strides and dtype that it had.
        copy: its value, or None where it cannot be written in place.
    """

    owner: Owner
    name: str
    buffer: torch.Tensor | None
    memory: torch.Tensor | None
    copy: torch.Tensor | None

    @property
    def now(self) -> Any:
        """What stands in its place."""
        return self.owner.slots.get(self.name, _DELETED)

    def is_reshaped(self) -> bool:
        """Whether the buffer itself has another shape, dtype or layout than it had, wherever it is now."""
        return self.buffer is not None and self.memory is not None and not _same_form(self.buffer, self.memory)

    def reshape(self) -> None:
        """Have the buffer lie where it lay, in its old shape; the value comes later."""
        if self.buffer is not None and self.memory is not None and self.is_reshaped():
            self.buffer.data = self.memory

    def put_back(self) -> None:
        """The buffer in its place as it was."""
        self.owner.slots[self.name] = self.buffer
        self.reshape()
        if self.buffer is not None and self.copy is not None:
            self.buffer.copy_(self.copy)


class Snapshot(dict[str, Saved]):
    """The buffers of a module by path, as they were.

    Args:
        owners: its modules.
    """

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners
        self._names = owners.names

    def added(self) -> list[tuple[Owner, str]]:
        """The buffers that came since, with their owners."""
        return [(each, name) for each in self.owners for name in each.slots if each.place(name) not in self]

    def changed(self) -> dict[str, str]:
        """Path -> verb, of the buffers that are not the same tensors of the same shape."""
        found = {each.place(name): "adds" for each, name in self.added()}
        for path, saved in self.items():
            if saved.now is not saved.buffer:
                found[path] = "deletes" if isinstance(saved.now, Deleted) else "replaces"
            elif saved.is_reshaped():
                found[path] = "changes the shape of"
        return found

    def has_other_names(self) -> bool:
        """Whether buffers were added, deleted or registered anew."""
        return self.owners.names != self._names

    def put_names_back(self) -> None:
        """The buffers that there were, in their order, and no others."""
        every, left_out = ([*names, *[()] * (len(self.owners) - len(names))] for names in self._names)
        for owner, names, unsaved in zip(self.owners, every, left_out, strict=True):
            if tuple(owner.slots) != names:
                owner.slots.clear()
                owner.slots.update((name, self[owner.place(name)].buffer) for name in names)
            if owner.unsaved != set(unsaved):
                owner.unsaved.clear()
                owner.unsaved.update(unsaved)


def owners(module: nn.Module) -> Owners:
    """What `snapshot` looks at, for callers that look at it every step and need not search the module each time."""
    return Owners(Owner(path, buffers_in(part), left_out_of_checkpoints(part)) for path, part in module.named_modules())


def writable(owners: Owners) -> dict[str, torch.Tensor]:
    """The buffers that a forward pass can write into, by torch's names; a shared one once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for owner in owners:
        for name, buffer in owner.slots.items():
            if buffer is not None and _writable(buffer):
                found.setdefault(id(buffer), (owner.place(name), buffer))
    return dict(found.values())


def snapshot(module: nn.Module | Owners) -> Snapshot:
    """Every buffer of the module with a copy of its value."""
    found = Snapshot(owners(module) if isinstance(module, nn.Module) else module)
    if any(found.owners.slots):
        _copy(found)
    return found


@torch.no_grad()
def _copy(found: Snapshot) -> None:
    for owner in found.owners:
        for name, buffer in owner.slots.items():
            memory = None if buffer is None else buffer.detach()
            copy = buffer.clone() if buffer is not None and _writable(buffer) else None
            found[owner.place(name)] = Saved(owner, name, buffer, memory, copy)


def settle(saved: Snapshot, finite: torch.Tensor | None) -> None:
    """Let what the forward pass left behind stand where `finite` says so, and restore the rest; None lets it stand.

    On the CPU the flag is read, and elsewhere where buffers were resized in place, replaced by something unlike, added
    or deleted. A buffer that was replaced by one like it is written instead, so that it stays the same tensor.
    """
    if saved:
        _settle(saved, finite)
    if finite is not None and saved.has_other_names() and not bool(finite):
        saved.put_names_back()


@torch.no_grad()
def _settle(saved: Snapshot, finite: torch.Tensor | None) -> None:
    for item in saved.values():
        buffer, copy, now = item.buffer, item.copy, item.now
        replaced = now is not buffer
        same = _alike(item.memory, now) if replaced else not item.is_reshaped()
        if same and buffer is not None and copy is not None:
            if replaced:
                item.reshape()
            if finite is not None and not looks(now.device):
                buffer.copy_(torch.where(finite.to(now.device), now, copy))
            elif finite is not None and not bool(finite):
                buffer.copy_(copy)
            elif replaced:
                buffer.copy_(now)
            item.owner.slots[item.name] = buffer
        elif (replaced or not same) and finite is not None and not bool(finite):
            item.put_back()


@torch.no_grad()
def taken_back(saved: Snapshot) -> Running:
    """What the forward pass left behind; the buffers themselves are again as they were."""
    running: Running = {}
    for path, item in saved.items():
        if item.now is not item.buffer:
            running[path] = item.now
        elif item.buffer is not None and item.is_reshaped():
            running[path] = Resized(item.buffer.clone())
        elif item.buffer is not None and item.copy is not None:
            running[path] = item.buffer.clone()
    other = saved.has_other_names()
    added = saved.added() if other else []
    running.update((owner.place(name), owner.slots[name]) for owner, name in added)
    unsaved = [(owner, name) for owner, name in added if name in owner.unsaved]
    for item in saved.values():  # not before: a buffer may have several places
        item.put_back()
    if other:
        saved.put_names_back()
    for owner, name in unsaved:  # means nothing until `commit` puts the buffer there
        owner.unsaved.add(name)
    return running


@torch.no_grad()
def commit(module: nn.Module, running: Running, finite: torch.Tensor | None) -> None:
    """Give the buffers the values of `running` where `finite` says so; None says so without looking."""
    for path, value in running.items():
        owner, _, name = path.rpartition(".")
        part = module.get_submodule(owner)
        slots = buffers_in(part)
        old = slots.get(name)
        new: Any = value.value if isinstance(value, Resized) else value
        if old is not None and _alike(old, new):
            old.copy_(new if finite is None else torch.where(finite.to(old.device), new, old))
        elif finite is not None and not bool(finite):
            continue
        elif isinstance(value, Resized) and old is not None:
            old.data = value.value.clone()
        elif isinstance(new, Deleted):
            slots.pop(name, None)
            left_out_of_checkpoints(part).discard(name)
        else:
            slots[name] = new


def _alike(old: Any, new: Any) -> bool:
    """Whether both are tensors, and what is in the new one can be written into the old one."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or not _writable(old):
        return False
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _same_form(buffer: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether a buffer has the shape, dtype, device and layout that it had."""
    if buffer.shape != memory.shape or buffer.dtype != memory.dtype or buffer.device != memory.device:
        return False
    if buffer.layout != memory.layout:
        return False
    return buffer.layout != torch.strided or buffer.stride() == memory.stride()


def _writable(buffer: torch.Tensor) -> bool:
    """False for sparse and for expanded buffers, which no forward pass changes in place."""
    if buffer.layout != torch.strided:
        return False
    if buffer.is_contiguous():
        return True
    return not any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
