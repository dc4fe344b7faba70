"""Parameters that a forward pass writes to, such as a max-norm constraint: the write takes effect with the step (S12).

A skipped step, one that raises, and `value_and_grad` take it back, for which the value before the pass is needed. All
values are kept in the first pass of a loss function, on the host, and afterwards those of parameters that were written
to. Version counters tell when others are. Called by the step; in mode "cast" `Casts.commit` brings the writes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import local_of, version_of
from polyamp_torch.step import running as buffers
from polyamp_torch.step.measure import looks

PREFIX: Final = "parameter/"
"""Of the names under which `Gradients.running` has what was written to parameters."""


class ParameterWrites:
    """What is known of the forward passes of one state. Copies and pickles know nothing.

    Args:
        named: path -> parameter, frozen ones included.

    Attributes:
        names: the paths.
        known: those that passes were seen to write to.
        looked: the loss functions whose first pass was looked at, in training and in evaluation.
        agreed: those whose values rank 0 sends with every step, the same on all ranks.
    """

    __slots__ = ("_whole", "agreed", "known", "looked", "named", "names")

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.named = named
        self.names = list(named)
        whole = list(named.values())
        self._whole = whole if all(local_of(p) is p for p in whole) else None
        self.known: set[str] = set()
        self.looked: set[Any] = set()
        self.agreed: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterWrites, (self.named,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters in the order of `names`; of sharded ones what this process holds now."""
        return self._whole or list(map(local_of, self.named.values()))

    def before(self, loss_fn: Any, *, training: bool) -> BeforePass:
        """What is kept of the parameters before a pass, or the passes of a window."""
        key = (getattr(loss_fn, "__code__", type(loss_fn)), training)
        return BeforePass(self, looks_first=key if key not in self.looked else None)

    def before_trial(self) -> BeforePass:
        """All of the parameters before a pass that is not to leave anything behind."""
        return BeforePass(self, looks_first=object())


class BeforePass:
    """The parameters before a forward pass.

    Args:
        writes: what is known of the state, to which what is found is added.
        looks_first: the loss function, if all values are kept and compared; None if it is known.
    """

    __slots__ = ("_late", "_looks", "_names", "_saved", "_tensors", "_versions", "_writes")

    def __init__(self, writes: ParameterWrites, *, looks_first: Any) -> None:
        known = writes.known
        self._names = writes.names
        self._tensors = writes.tensors
        self._writes = writes
        self._looks = looks_first
        self._late: list[str] = []
        self._saved: dict[str, torch.Tensor] = {}
        kept: Sequence[str] = [*known] if looks_first is None else self._names
        if kept:
            held = dict(zip(self._names, self._tensors, strict=True))
            self._saved = {name: _kept(held[name], spare=name not in known) for name in kept}
        self._versions = _versions(self._tensors)

    def note(self, changed: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Parameters that mode "cast" has written to, each with its value before."""
        for p, old in changed:
            place = next((n for n, tensor in enumerate(self._tensors) if tensor is local_of(p)), None)
            if place is not None:
                self._saved.setdefault(self._names[place], local_of(old))
                self._writes.known.add(self._names[place])

    @torch.no_grad()
    def so_far(self, masters: Sequence[torch.Tensor]) -> set[str]:
        """Between a forward pass and its backward pass: what was written to, as far as that is known before `compare`;
        what passes were seen to write to is among it.

        Args:
            masters: parameters to whose casts the pass wrote.
        """
        of_casts = {id(local_of(p)) for p in masters}
        found, now = set(self._writes.known), _versions(self._tensors)
        if now == self._versions and self._looks is None and not of_casts:
            return found
        for name, p, before, after in zip(self._names, self._tensors, self._versions, now, strict=True):
            if after != before or id(p) in of_casts:
                found.add(name)
            elif self._looks is not None:
                old = self._saved[name]
                if not torch.equal(old, p.to(old.device)):
                    found.add(name)
        return found

    def compare(self) -> None:
        """Behind the passes: see what they wrote to, and let go of the rest."""
        now = _versions(self._tensors)
        if now != self._versions or self._looks is not None:
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
        if self._looks is not None:
            self._writes.looked.add(self._looks)
        self._saved, self._looks = found, None

    @property
    def found(self) -> list[str]:
        """Behind `compare`: what was written to."""
        return [*self._saved, *self._late]

    def keep(self, names: Collection[str]) -> None:
        """Keep the values of others, to which another rank's may be given, for a step that is skipped."""
        for name, p in zip(self._names, self._tensors, strict=True):
            if name in names and name not in self._late:
                self._saved.setdefault(name, p.detach().clone())

    def settle(self, finite: torch.Tensor | None) -> None:
        """Let what was written stand where `finite` says so, and take back the rest; None lets it stand.

        Raises:
            UnsupportedError: a write that came for the first time in a step that is skipped.
        """
        if finite is None:
            return
        if self._saved:
            self._put_back(finite)
        if self._late and not bool(finite):
            raise UnsupportedError(_too_late(self._late[0]))

    @torch.no_grad()
    def _put_back(self, finite: torch.Tensor) -> None:
        for name, p in zip(self._names, self._tensors, strict=True):
            old = self._saved.get(name)
            if old is not None and not looks(p.device):
                p.copy_(torch.where(finite.to(p.device), p, old.to(p.device)))
            elif old is not None and not bool(finite):
                p.copy_(old)

    @torch.no_grad()
    def take_back(self) -> dict[str, torch.Tensor]:
        """What was written, by `PREFIX` and path; the parameters themselves are again as they were.

        Raises:
            UnsupportedError: a write that came for the first time.
        """
        written = {}
        for name, p in zip(self._names, self._tensors, strict=True) if self._saved else ():
            if name in self._saved:
                written[PREFIX + name] = p.detach().clone()
                p.copy_(self._saved[name])
        if self._late:
            raise UnsupportedError(_too_late(self._late[0]))
        return written


class Written:
    """What a pass of `value_and_grad` wrote to parameters, put there for an update.

    Args:
        named: path -> parameter.
        running: of the `Gradients`; `name in written` says which of its names are of parameters.
    """

    __slots__ = ("_named", "_names", "_saved")

    @torch.no_grad()
    def __init__(self, named: Mapping[str, torch.Tensor], running: Mapping[str, Any]) -> None:
        self._named = named
        self._names = {name for name in running if name.startswith(PREFIX)}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in self._names:
            p = local_of(named[name.removeprefix(PREFIX)])
            self._saved.append((p, p.detach().clone()))
            p.copy_(running[name])

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def found(self) -> list[str]:
        """The paths of the parameters."""
        return [name.removeprefix(PREFIX) for name in self._names]

    def keep(self, names: Collection[str]) -> None:
        """Keep the values of others, to which another rank's may be given, for a step that is skipped."""
        for name in names:
            if PREFIX + name not in self._names:
                p = local_of(self._named[name])
                self._saved.append((p, p.detach().clone()))

    @torch.no_grad()
    def settle(self, finite: torch.Tensor | None) -> None:
        """Take it back where `finite` says so."""
        if finite is None:
            return
        for p, old in self._saved:
            if not looks(p.device):
                p.copy_(torch.where(finite.to(p.device), p, old))
            elif not bool(finite):
                p.copy_(old)


def settle(saved: buffers.Snapshot, before: BeforePass, finite: torch.Tensor | None) -> None:
    """What a forward pass left behind in buffers and parameters, by the flag."""
    buffers.settle(saved, finite)
    before.settle(finite)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(version_of, tensors))


def _kept(p: torch.Tensor, *, spare: bool) -> torch.Tensor:
    """A copy; on the host if it is one of all, of which most are only compared."""
    return p.detach().to("cpu", copy=True) if spare else p.detach().clone()


def _too_late(name: str) -> str:
    return (
        f"the forward pass wrote to the parameter {name!r} for the first time since this loss function is in use, and "
        "the write cannot be taken back, as a skipped step and value_and_grad do (S12): the value before is gone. From "
        "the next pass on it is kept. Write to it in the first pass as well, even if that changes nothing."
    )
