"""Snapshot and rollback of module buffers. Changes by the forward pass are kept only if the step is applied (S12).

The forward pass may write, resize, replace, add or delete buffers, or set them to None. A step in one call uses
`snapshot` and `commit_or_rollback`. If the forward pass and the update are two calls, they use `snapshot`,
`restore_buffers` and `commit_buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.compat import module_buffers, non_persistent_buffers


class ResizedBuffer(NamedTuple):
    """Buffer whose shape or dtype the forward pass changed in place.

    Attributes:
        value: the value after the pass.
    """

    value: torch.Tensor


class DeletedBuffer(NamedTuple):
    """Marker of a buffer that the forward pass deleted."""


_DELETED: Final = DeletedBuffer()

BufferChanges = dict[str, torch.Tensor | ResizedBuffer | DeletedBuffer | None]
"""Buffer path, `.`-separated as in torch -> the buffer after the forward pass."""


class BufferOwner(NamedTuple):
    """Module that has buffers, or may get some.

    Attributes:
        path: the module's name in torch.
        slots: the dict of its buffers.
        unsaved: the names of its non-persistent buffers, which its `state_dict` omits.
    """

    path: str
    slots: dict[str, Any]
    unsaved: set[str]

    def place(self, name: str) -> str:
        """Return the path of a buffer."""
        return f"{self.path}.{name}" if self.path else name


class BufferOwners(tuple[BufferOwner, ...]):
    """Buffer owners of all modules of a model.

    Attributes:
        slots: the `slots` of each module.
        unsaved: the `unsaved` of each module.
    """

    slots: list[dict[str, Any]]
    unsaved: list[set[str]]

    def __new__(cls, owners: Iterable[BufferOwner]) -> BufferOwners:
        made = super().__new__(cls, owners)
        made.slots = [owner.slots for owner in made]
        made.unsaved = [owner.unsaved for owner in made]
        return made

    @property
    def names(self) -> tuple[list[Any], list[Any]]:
        """For each module, the names of its buffers and of its non-persistent ones. Evaluated in every step."""
        return (
            list(map(tuple, self.slots)) if any(self.slots) else [],
            list(map(frozenset, self.unsaved)) if any(self.unsaved) else [],
        )


class SavedBuffer(NamedTuple):
    """Saved state of one buffer.

    Attributes:
        owner: its module.
        name: its name in the module.
        buffer: the buffer itself, or None.
        memory: a second tensor over its memory, with its original shape, strides and dtype.
        copy: a copy of its value, or None if it cannot be written in place.
    """

    owner: BufferOwner
    name: str
    buffer: torch.Tensor | None
    memory: torch.Tensor | None
    copy: torch.Tensor | None

    @property
    def now(self) -> Any:
        """The current value of its slot."""
        return self.owner.slots.get(self.name, _DELETED)

    def is_reshaped(self) -> bool:
        """Return whether the shape, dtype or layout of the buffer object has changed, wherever it is now."""
        return self.buffer is not None and self.memory is not None and not _is_same_layout(self.buffer, self.memory)

    def reshape(self) -> None:
        """Restore the memory and shape of the buffer; the value is restored separately."""
        if self.buffer is not None and self.memory is not None and self.is_reshaped():
            self.buffer.data = self.memory

    def restore(self) -> None:
        """Restore the buffer, its slot and its value."""
        self.owner.slots[self.name] = self.buffer
        self.reshape()
        if self.buffer is not None and self.copy is not None:
            self.buffer.copy_(self.copy)


class BufferSnapshot(dict[str, SavedBuffer]):
    """Saved buffers of a module by path.

    Args:
        owners: the buffer owners of the module.
    """

    def __init__(self, owners: BufferOwners) -> None:
        super().__init__()
        self.owners = owners
        self._names = owners.names

    def added(self) -> list[tuple[BufferOwner, str]]:
        """Return the buffers added since, with their owners."""
        return [(each, name) for each in self.owners for name in each.slots if each.place(name) not in self]

    def changed(self) -> dict[str, str]:
        """Return path -> verb of the buffers that are not the same tensors of the same shape."""
        found = {each.place(name): "adds" for each, name in self.added()}
        for path, saved in self.items():
            if saved.now is not saved.buffer:
                found[path] = "deletes" if isinstance(saved.now, DeletedBuffer) else "replaces"
            elif saved.is_reshaped():
                found[path] = "changes the shape of"
        return found

    def has_other_names(self) -> bool:
        """Return whether buffers were added, deleted or registered again."""
        return self.owners.names != self._names

    def restore_names(self) -> None:
        """Restore the original set of buffers in its order."""
        every, left_out = ([*names, *[()] * (len(self.owners) - len(names))] for names in self._names)
        for owner, names, unsaved in zip(self.owners, every, left_out, strict=True):
            if tuple(owner.slots) != names:
                owner.slots.clear()
                owner.slots.update((name, self[owner.place(name)].buffer) for name in names)
            if owner.unsaved != set(unsaved):
                owner.unsaved.clear()
                owner.unsaved.update(unsaved)


def find_buffer_owners(module: nn.Module) -> BufferOwners:
    """Return the buffer owners of a module, so that `snapshot` need not search the module in every step."""
    return BufferOwners(
        BufferOwner(path, module_buffers(part), non_persistent_buffers(part)) for path, part in module.named_modules()
    )


def writable_buffers(owners: BufferOwners) -> dict[str, torch.Tensor]:
    """Return the buffers that a forward pass can write to, by torch's names; a shared one once."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for owner in owners:
        for name, buffer in owner.slots.items():
            if buffer is not None and _is_writable(buffer):
                found.setdefault(id(buffer), (owner.place(name), buffer))
    return dict(found.values())


def snapshot(module: nn.Module | BufferOwners) -> BufferSnapshot:
    """Return a snapshot of every buffer of the module, with a copy of its value."""
    found = BufferSnapshot(find_buffer_owners(module) if isinstance(module, nn.Module) else module)
    if any(found.owners.slots):
        _copy_buffers(found)
    return found


@torch.no_grad()
def _copy_buffers(found: BufferSnapshot) -> None:
    for owner in found.owners:
        for name, buffer in owner.slots.items():
            memory = None if buffer is None else buffer.detach()
            copy = buffer.clone() if buffer is not None and _is_writable(buffer) else None
            found[owner.place(name)] = SavedBuffer(owner, name, buffer, memory, copy)


def commit_or_rollback(saved: BufferSnapshot, finite: torch.Tensor | None) -> None:
    """Keep the forward pass's changes to buffers if `finite` is true or None; otherwise restore the buffers.

    The flag is read on the CPU. On other devices it is read only if buffers were added, deleted, resized in place, or
    replaced by tensors of another form. If a replacement has the same form, its value is copied into the old buffer,
    which remains the same tensor.
    """
    if saved:
        _commit_or_rollback(saved, finite)
    if finite is not None and saved.has_other_names() and not bool(finite):
        saved.restore_names()


@torch.no_grad()
def _commit_or_rollback(saved: BufferSnapshot, finite: torch.Tensor | None) -> None:
    for item in saved.values():
        buffer, copy, now = item.buffer, item.copy, item.now
        replaced = now is not buffer
        same = _can_copy_in_place(item.memory, now) if replaced else not item.is_reshaped()
        if same and buffer is not None and copy is not None:
            if replaced:
                item.reshape()
            if finite is not None and not can_read_without_sync(now.device):
                buffer.copy_(torch.where(finite.to(now.device), now, copy))
            elif finite is not None and not bool(finite):
                buffer.copy_(copy)
            elif replaced:
                buffer.copy_(now)
            item.owner.slots[item.name] = buffer
        elif (replaced or not same) and finite is not None and not bool(finite):
            item.restore()


@torch.no_grad()
def restore_buffers(saved: BufferSnapshot) -> BufferChanges:
    """Restore the buffers, and return the changes of the forward pass."""
    running: BufferChanges = {}
    for path, item in saved.items():
        if item.now is not item.buffer:
            running[path] = item.now
        elif item.buffer is not None and item.is_reshaped():
            running[path] = ResizedBuffer(item.buffer.clone())
        elif item.buffer is not None and item.copy is not None:
            running[path] = item.buffer.clone()
    other = saved.has_other_names()
    added = saved.added() if other else []
    running.update((owner.place(name), owner.slots[name]) for owner, name in added)
    unsaved = [(owner, name) for owner, name in added if name in owner.unsaved]
    for item in saved.values():  # only now: a buffer may be in several slots
        item.restore()
    if other:
        saved.restore_names()
    for owner, name in unsaved:  # without effect until `commit_buffers` adds the buffer
        owner.unsaved.add(name)
    return running


@torch.no_grad()
def commit_buffers(owners: BufferOwners, running: BufferChanges, finite: torch.Tensor | None) -> None:
    """Apply the changes in `running` to the buffers if `finite` is true, or None."""
    known = {each.place(name): (each, name) for each in owners for name in each.slots}
    places = {each.path: each for each in owners}
    for path, value in running.items():
        around, _, added = path.rpartition(".")
        owner, name = known[path] if path in known else (places[around], added)
        slots = owner.slots
        old = slots.get(name)
        new: Any = value.value if isinstance(value, ResizedBuffer) else value
        if old is not None and _can_copy_in_place(old, new):
            old.copy_(new if finite is None else torch.where(finite.to(old.device), new, old))
        elif finite is not None and not bool(finite):
            continue
        elif isinstance(value, ResizedBuffer) and old is not None:
            old.data = value.value.clone()
        elif isinstance(new, DeletedBuffer):
            slots.pop(name, None)
            owner.unsaved.discard(name)
        else:
            slots[name] = new


def _can_copy_in_place(old: Any, new: Any) -> bool:
    """Return whether both are tensors, and the new value can be copied into the old tensor."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or not _is_writable(old):
        return False
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _is_same_layout(buffer: torch.Tensor, memory: torch.Tensor) -> bool:
    """Return whether a buffer still has its original shape, dtype, device and layout."""
    if buffer.shape != memory.shape or buffer.dtype != memory.dtype or buffer.device != memory.device:
        return False
    if buffer.layout != memory.layout:
        return False
    return buffer.layout != torch.strided or buffer.stride() == memory.stride()


def _is_writable(buffer: torch.Tensor) -> bool:
    """Return False for sparse and expanded buffers, which no forward pass changes in place."""
    if buffer.layout != torch.strided:
        return False
    if buffer.is_contiguous():
        return True
    return not any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
