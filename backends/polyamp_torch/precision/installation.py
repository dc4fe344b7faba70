"""`Installation`: what a model under a policy puts into its module, and the block in which it is there (S3, S5).

Overrides stand in the place of methods, casts of mode "cast" in the place of parameters. Called by `bound`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyamp.rules.plan import Plan
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import constant_when_compiled, in_backward
from polyamp_torch.precision import recomputation
from polyamp_torch.precision.autocast import carried, is_open, region
from polyamp_torch.precision.cast_mode import Casts
from polyamp_torch.precision.regions import OPENED, Block, Kept, nesting, repair

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the method that stands in a module's method's place."""


class Installation:
    """What a bound module puts into its module: put in by the first thread that comes, taken out by the last to go.

    Attributes:
        called: paths of the overridden modules that ran.
        ends: ids of the overridden modules around which autocast does not act, so that what they give is cast.
    """

    def __init__(self, module: nn.Module, plan: Plan, device_type: str, overrides: dict[str, str]) -> None:
        self.module = module
        self.plan = plan
        self.device_type = device_type
        self.called: set[str] = set()
        self.own_casts = Casts(module, overrides, plan) if plan.cast and plan.policy.is_mixed else None
        self.casts = self.own_casts
        self.ends = {id(self._part(path)) for path in overrides if self._is_followed_by_another(path, overrides)}
        self.replaced = [(self._part(path), "forward", self._overridden(path, overrides)) for path in overrides]
        self.replaced.reverse()  # of a module's several names the last one wins, which is put nearest to it
        self.replaced += [
            (part, "parallel_apply", _carrying) for part in module.modules() if isinstance(part, nn.DataParallel)
        ]
        self.made: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self.lock = threading.RLock()  # not Lock: an interrupt's handler may come while this thread holds it
        self.holders: list[Any] = []
        self.placed: list[tuple[nn.Module, str, Any]] = []
        self.hooks: list[Any] = []

    def is_overruled(self, part: nn.Module | None = None) -> bool:
        """Whether the program has written something else further in, which then decides for what runs there (S3): a
        region that sets what the plan does not, or, around `part`, a second policy.

        A region counts if it was opened behind the installation: none is open in a backward pass, whose hooks may call
        the model, and there a checkpoint opens what was open in the forward pass.
        """
        compiling = torch.compiler.is_compiling()
        own = None if compiling else next((block for block in reversed(OPENED.installed) if self.is_in(block)), None)
        if part is not None and self._is_under_another(own, part):
            return True
        dtype = next((dtype for owner, dtype in reversed(OPENED.overrides) if owner is self), None)
        if is_open(self.plan.root if dtype is None else self.plan.place(dtype), self.device_type):
            return False
        if (
            not compiling and dtype is None and part is not None and in_backward()
        ):  # a checkpoint inside an overridden module
            places = map(self.plan.place, set(self.plan.overridden.values()))
            if any(is_open(place, self.device_type) for place in places):
                return False
        return _region_is_open(self)

    def is_in(self, block: Block) -> bool:
        """Whether it is what this block has installed."""
        return isinstance(block, Installed) and block.installation is self

    def _is_under_another(self, own: Any, part: nn.Module) -> bool:
        """Whether a policy that was put around the module inside of this one's region covers `part`."""
        if torch.compiler.is_compiling():
            last = OPENED.placed[-1] if OPENED.placed else self
            return last is not self and any(part is inner for inner in last.module.modules())
        if own is None or len(OPENED.installed) == 1:
            return False
        further_in = [block.installation.module for block in OPENED.installed if block.depth > own.depth]
        return any(part is inner for module in further_in for inner in module.modules())

    @property
    def masters(self) -> dict[int, torch.Tensor]:
        """The id of each cast that stands in a parameter's place now -> the parameter."""
        return {} if self.casts is None else {id(place.copy): place.master for place in self.casts.places}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which everything is in its place."""
        if self.own_casts is None and torch.compiler.is_compiling():
            with self._traced():
                yield
            return
        token = object()
        try:
            self.hold(token)
            yield
        finally:
            self.release(token)

    def hold(self, holder: Any) -> None:
        """Have everything in its place until `holder` is released."""
        outer = self._outer_masters()
        if self.own_casts is None and not self.replaced and not outer:
            return
        with self.lock:
            if not self.holders:
                self._take_out()  # what an interrupt may have left
                self._put_in(outer)
            elif self.casts is not None:
                self.casts.refresh()
            self.holders = [*self.holders, holder]

    def release(self, holder: Any) -> None:
        """Let go; a second time, or of what never held, changes nothing."""
        with self.lock:
            self.holders = [other for other in self.holders if other is not holder]
            if not self.holders:
                self._take_out()

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """The same for a compiler, which knows no locks: it sees what is put in and taken out, and leaves no trace."""
        placed = []
        for part, name, replace in self.replaced:
            before = part.__dict__.get(name, part)
            part.__dict__[name] = replace(getattr(part, name))
            placed.append((part, name, before))
        try:
            yield
        finally:
            for part, name, before in reversed(placed):
                if before is part:
                    del part.__dict__[name]
                else:
                    part.__dict__[name] = before

    def _outer_masters(self) -> dict[int, torch.Tensor]:
        """The masters of the casts that policies further out have put in the place of parameters."""
        found: dict[int, torch.Tensor] = {}
        for block in OPENED.installed:
            if block.installation is not self:
                found |= block.installation.masters
        return found

    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Casts.commit`."""
        if self.casts is None:
            return []
        with self.lock:
            return self.casts.commit()

    def discard(self) -> None:
        """See `Casts.discard`."""
        if self.casts is not None:
            with self.lock:
                self.casts.discard()

    def written(self) -> list[torch.Tensor]:
        """See `Casts.written`."""
        if self.casts is None:
            return []
        with self.lock:
            return self.casts.written()

    def _put_in(self, outer: dict[int, torch.Tensor]) -> None:
        self.casts = self.own_casts
        if self.casts is None and outer:
            self.casts = Casts(self.module, {}, self.plan)
        if self.casts is not None:
            self.casts.outer = outer
        for number, (part, name, replace) in enumerate(self.replaced):
            value = self._replacement(number, getattr(part, name), replace)
            self.placed.append((part, name, part.__dict__.get(name, part)))
            part.__dict__[name] = value
            if name == "forward" and (self.casts is not None or id(part) in self.ends):  # behind the user's own hooks
                self.hooks.append(part.register_forward_hook(self._cast_back))
        if self.casts is not None:
            self.casts.__enter__()

    def _take_out(self) -> None:
        if self.casts is not None and self.casts.places:
            self.casts.__exit__()
        for part, name, before in reversed(self.placed):
            if before is part:
                part.__dict__.pop(name, None)
            else:
                part.__dict__[name] = before
        for hook in self.hooks:
            hook.remove()
        self.placed, self.hooks = [], []

    def _replacement(self, number: int, method: Callable[..., Any], replace: Replace) -> Callable[..., Any]:
        """The same object each time, or torch.compile would compile again."""
        known = self.made.get(number)
        if known is None or known[0] != method:
            known = self.made[number] = (method, replace(method))
        return known[1]

    def _cast_back(self, part: nn.Module, args: Any, output: Any) -> Any:
        """What follows an overridden module computes in the dtype around it again; where autocast acts, operations cast
        what they get."""
        return None if self.is_overruled(part) else self._for_what_follows(output)

    def _for_what_follows(self, output: Any) -> Any:
        around = next((dtype for owner, dtype in reversed(OPENED.overrides) if owner is self), self.plan.compute)
        mixes = self.casts is None and self.plan.place(around).mixes
        return output if mixes else cast_tree(output, around, float64=self.plan.float64)

    def _is_followed_by_another(self, path: str, overrides: dict[str, str]) -> bool:
        """Whether what is around a module computes in another dtype, and not by autocast."""
        outer = path.rpartition("/")[0]
        while outer and outer not in overrides:
            outer = outer.rpartition("/")[0]
        around = self.plan.place(overrides[outer]) if outer else self.plan.root
        return not around.mixes and around.dtype != overrides[path]

    def _part(self, path: str) -> nn.Module:
        return self.module.get_submodule(path.replace("/", "."))

    def _overridden(self, path: str, overrides: dict[str, str]) -> Replace:
        """Makes, of a submodule's `forward`, one that runs in the submodule's own dtype (S5)."""
        dtype, double = overrides[path], self.plan.float64
        place, part = self.plan.place(dtype), self._part(path)
        ends = id(part) in self.ends

        def replace(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def call(*args: Any, **kwargs: Any) -> Any:
                self._note(path)
                if self.is_overruled(part):
                    return forward(*args, **kwargs)
                OPENED.overrides.append((self, dtype))
                try:
                    with region(place, self.device_type):
                        kwargs = {name: cast_tree(value, dtype, float64=double) for name, value in kwargs.items()}
                        output = forward(*cast_tree(args, dtype, float64=double), **kwargs)
                finally:
                    OPENED.overrides.pop()
                return self._for_what_follows(output) if ends and torch.compiler.is_compiling() else output

            call.polyamp_rebound = lambda part: replace(type(part).forward.__get__(part))  # type: ignore[attr-defined]  # for _carrying
            return call

        return replace

    def _note(self, path: str) -> None:
        _noted(self.called, path)
        if not torch.compiler.is_compiling():
            recomputation.carry(id(self), self.held, everywhere=True)


@constant_when_compiled
def _region_is_open(installation: Installation) -> bool:
    """Whether a region was opened behind the innermost installation; where a function is traced, as it is traced, which
    opens the regions that are met."""
    own = next((block for block in reversed(OPENED.installed) if installation.is_in(block)), None)
    return nesting() > (0 if own is None else own.depth)


@constant_when_compiled
def _noted(called: set[str], path: str) -> None:
    """Note that a module ran; in a compiled function while it is traced, or the note would be a reason to recompile."""
    called.add(path)


class Installed(Block):
    """The block in which a bound model is installed: see `BoundModule.installed`.

    Args:
        model: the bound model.
        installation: what it puts in its module.
        islands_on: the device type whose islands are kept open, or None.

    Attributes:
        depth: how deep torch's regions are nested around it.
    """

    depth = 0

    def __init__(self, model: Any, installation: Installation, islands_on: str | None) -> None:
        self.model = model
        self.installation = installation
        self.region = None if islands_on is None else Kept(islands_on)

    def open(self) -> None:
        repair()
        self.depths = len(OPENED.regions), len(OPENED.overrides)
        self.depth = nesting()
        OPENED.installed.append(self)
        self.installation.hold(self)
        if self.region is not None:
            self.region.open()
        OPENED.bound.append(self.model)

    def close(self, *, interrupted: bool) -> None:
        if self not in OPENED.installed:
            return
        regions, overrides = self.depths
        if interrupted:
            while len(OPENED.regions) > regions:
                OPENED.regions[-1].close(interrupted=True)
            del OPENED.overrides[overrides:]
        if self.region is not None:
            self.region.close()
        self.installation.release(self)
        left = [block for block in OPENED.installed if block is not self]
        while sum(model is self.model for model in OPENED.bound) > sum(
            isinstance(block, Installed) and block.model is self.model for block in left
        ):
            OPENED.bound.remove(self.model)  # not pop(): a training library closes what it opened in any order
        OPENED.installed.remove(self)
        self.frame = None


def _carrying(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """`DataParallel.parallel_apply` with the region carried into its worker threads, which get `enabled` only."""

    def call(replicas: list[nn.Module], *args: Any) -> Any:
        for part in (part for replica in replicas for part in replica.modules()):
            rebound = getattr(part.__dict__.get("forward"), "polyamp_rebound", None)
            if rebound is not None:  # replicate() copied the attribute, which runs the original's parameters
                part.__dict__["forward"] = rebound(part)
        return parallel_apply([carried(replica) for replica in replicas], *args)

    return call
