"""Parameter writes of a forward pass, such as a max-norm constraint: they take effect only with the step (S12).

A skipped step, a step that raises, and `value_and_grad` undo the writes, which needs the values before the pass. In
the first pass of a loss function all values are copied to the host; later only those of parameters that were written
to before. Version counters detect writes to other parameters. In mode "cast" the policy module's `commit` copies the
writes to the parameters first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.compat import local_tensor_of, tensor_version

WRITE_PREFIX: Final = "parameter/"
"""Prefix of the names of parameter writes in `Gradients.running`."""


class ParameterWriteTracker:
    """Record of the parameters that one state's forward passes write to. Copies and pickles start empty.

    Args:
        named: path -> parameter, frozen ones included.

    Attributes:
        names: the paths.
        known: paths that earlier passes wrote to.
        checked: the loss functions whose first pass was checked, in training and in evaluation mode.
        agreed: paths whose values rank 0 broadcasts in every step, the same on all ranks.
        whole: the parameters in the order of `names`; None if some are sharded.
    """

    __slots__ = ("agreed", "checked", "known", "named", "names", "whole")

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.named = named
        self.names = list(named)
        whole = list(named.values())
        self.whole = whole if all(local_tensor_of(p) is p for p in whole) else None
        self.known: set[str] = set()
        self.checked: set[Any] = set()
        self.agreed: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterWriteTracker, (self.named,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters in the order of `names`; the current local shard of sharded ones."""
        return self.whole or list(map(local_tensor_of, self.named.values()))


class ParameterSnapshot:
    """Snapshot of the parameters before a forward pass.

    Args:
        writes: the state's record, to which new writes are added.
        first_key: the loss function, if all values are copied and compared; None if it was checked before.
    """

    __slots__ = ("_first_key", "_late", "_names", "_saved", "_tensors", "_versions", "_writes")

    def __init__(self, writes: ParameterWriteTracker, *, first_key: Any) -> None:
        known = writes.known
        self._names = writes.names
        self._tensors = writes.whole or writes.tensors
        self._writes = writes
        self._first_key = first_key
        self._late: list[str] = []
        self._saved: dict[str, torch.Tensor] = {}
        kept: Sequence[str] = [*known] if first_key is None else self._names
        if kept:
            held = dict(zip(self._names, self._tensors, strict=True))
            self._saved = {name: _snapshot_copy(held[name], spare=name not in known) for name in kept}
        self._versions = list(map(tensor_version, self._tensors))

    def note(self, changed: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record the parameters that mode "cast" has written to, each with its previous value."""
        for p, old in changed:
            place = next((n for n, tensor in enumerate(self._tensors) if tensor is local_tensor_of(p)), None)
            if place is not None:
                self._saved.setdefault(self._names[place], local_tensor_of(old))
                self._writes.known.add(self._names[place])

    @torch.no_grad()
    def written_so_far(self, masters: Sequence[torch.Tensor]) -> set[str]:
        """Return the paths known to be written to, between a forward pass and its backward pass, before `compare`.

        Paths that earlier passes wrote to are included.

        Args:
            masters: parameters to whose casts the pass wrote.
        """
        of_casts = {id(local_tensor_of(p)) for p in masters}
        found, now = set(self._writes.known), list(map(tensor_version, self._tensors))
        if now == self._versions and self._first_key is None and not of_casts:
            return found
        for name, p, before, after in zip(self._names, self._tensors, self._versions, now, strict=True):
            if after != before or id(p) in of_casts:
                found.add(name)
            elif self._first_key is not None:
                old = self._saved[name]
                if not torch.equal(old, p.to(old.device)):
                    found.add(name)
        return found

    def compare(self) -> None:
        """Detect the writes after the passes, and release the other copies."""
        now = list(map(tensor_version, self._tensors))
        if now != self._versions or self._first_key is not None:
            self._compare(now)

    @torch.no_grad()
    def _compare(self, now: list[int]) -> None:
        found = {}
        for name, p, before, after in zip(self._names, self._tensors, self._versions, now, strict=True):
            old = self._saved.get(name)
            if old is None and after != before:
                self._late.append(name)
            elif old is not None and (after != before or not torch.equal(old, p.to(old.device))):
                found[name] = old
        self._writes.known.update(found, self._late)
        if self._first_key is not None:
            self._writes.checked.add(self._first_key)
        self._saved, self._first_key = found, None

    @property
    def found(self) -> list[str]:
        """The paths written to, after `compare`."""
        return [*self._saved, *self._late]

    def keep(self, names: Collection[str]) -> None:
        """Save the values of further parameters, which another rank may overwrite, in case the step is skipped."""
        for name, p in zip(self._names, self._tensors, strict=True):
            if name in names and name not in self._late:
                self._saved.setdefault(name, p.detach().clone())

    def settle(self, finite: torch.Tensor | None) -> None:
        """Keep the writes if `finite` is true or None; otherwise undo them.

        Raises:
            UnsupportedError: a first write to a parameter is in a skipped step, so its old value is lost.
        """
        if finite is None:
            return
        if self._saved:
            self._restore(finite)
        if self._late and not bool(finite):
            raise UnsupportedError(_late_write_message(self._late[0]))

    @torch.no_grad()
    def _restore(self, finite: torch.Tensor) -> None:
        for name, p in zip(self._names, self._tensors, strict=True):
            old = self._saved.get(name)
            if old is not None and not can_read_without_sync(p.device):
                p.copy_(torch.where(finite.to(p.device), p, old.to(p.device)))
            elif old is not None and not bool(finite):
                p.copy_(old)

    @torch.no_grad()
    def revert(self) -> dict[str, torch.Tensor]:
        """Undo the writes, and return the written values by `WRITE_PREFIX` and path.

        Raises:
            UnsupportedError: a first write to a parameter, whose old value is lost.
        """
        written = {}
        for name, p in zip(self._names, self._tensors, strict=True) if self._saved else ():
            if name in self._saved:
                written[WRITE_PREFIX + name] = p.detach().clone()
                p.copy_(self._saved[name])
        if self._late:
            raise UnsupportedError(_late_write_message(self._late[0]))
        return written


class GradientWrites:
    """Parameter writes of a `value_and_grad` pass, applied again for an update.

    Args:
        named: path -> parameter.
        running: `Gradients.running`; `name in written` tells which of its names are parameter writes.
    """

    __slots__ = ("_named", "_names", "_saved")

    @torch.no_grad()
    def __init__(self, named: Mapping[str, torch.Tensor], running: Mapping[str, Any]) -> None:
        self._named = named
        self._names = {name for name in running if name.startswith(WRITE_PREFIX)}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in self._names:
            p = local_tensor_of(named[name.removeprefix(WRITE_PREFIX)])
            self._saved.append((p, p.detach().clone()))
            p.copy_(running[name])

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def found(self) -> list[str]:
        """The paths of the parameters."""
        return [name.removeprefix(WRITE_PREFIX) for name in self._names]

    def keep(self, names: Collection[str]) -> None:
        """Save the values of further parameters, which another rank may overwrite, in case the step is skipped."""
        for name in names:
            if WRITE_PREFIX + name not in self._names:
                p = local_tensor_of(self._named[name])
                self._saved.append((p, p.detach().clone()))

    @torch.no_grad()
    def settle(self, finite: torch.Tensor | None) -> None:
        """Undo the writes if `finite` is false."""
        if finite is None:
            return
        for p, old in self._saved:
            if not can_read_without_sync(p.device):
                p.copy_(torch.where(finite.to(p.device), p, old))
            elif not bool(finite):
                p.copy_(old)


ParameterWrites = ParameterSnapshot | GradientWrites
"""Parameter writes of one rank's passes, not yet undone."""


def _snapshot_copy(p: torch.Tensor, *, spare: bool) -> torch.Tensor:
    """Copy a parameter; to the host if `spare`, because most of those copies are only compared."""
    return p.detach().to("cpu", copy=True) if spare else p.detach().clone()


def _late_write_message(name: str) -> str:
    return (
        f"the forward pass wrote to the parameter {name!r} for the first time since this loss function is in use, and "
        "the write cannot be taken back, as a skipped step and value_and_grad do (S12): the value before is gone. From "
        "the next pass on it is kept. Write to it in the first pass as well, even if that changes nothing."
    )
