"""`BoundModule`: the model that `loss_fn` sees, with the policy's casts and overrides installed (S1, S3, S5).

What is installed stays for the backward pass too, because activation checkpointing runs the forward pass again there.
Called by the state, the step and the backend. The casts themselves are in `cast_mode`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.rules.plan import Plan
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import NOTHING, constant_when_compiled
from polyamp_torch.precision import recomputation
from polyamp_torch.precision.autocast import carried, opened, region
from polyamp_torch.precision.cast_mode import Casts
from polyamp_torch.precision.islands import islands
from polyamp_torch.precision.paths import inner_paths, path_of
from polyamp_torch.precision.regions import OPENED, Block, Kept, repair

Replace = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the method that stands in a module's method's place."""


class BoundModule:
    """A module under a policy: call it, and the methods that its class defines, like the module's; all else is the
    module's own.

    Inside the step the casts are installed around the whole of `loss_fn`, so that calling a part of the model
    (`model.encoder(x)`) is covered too; elsewhere each call installs them for itself. Several threads may call it at
    once. While one does, the module itself is under the casts and overrides for every thread.
    """

    _module: nn.Module
    _plan: Plan
    _device: torch.device
    _overrides: dict[str, str]
    _installation: _Installation
    _given: list[dict[str, torch.Tensor]]
    _frozen: frozenset[str]
    _path: Callable[[str], str]

    def __init__(self, module: nn.Module, plan: Plan, device: torch.device) -> None:
        paths = inner_paths(module) if plan.overridden else {}
        overrides = {paths[path]: dtype for path, dtype in plan.overridden.items()}
        own: dict[str, Any] = {
            "_module": module,
            "_plan": plan,
            "_device": device,
            "_overrides": {paths[path]: path for path in plan.overridden},
            "_installation": _Installation(module, plan, device.type, overrides),
            "_given": [],
            "_path": path_of(module),
            "_frozen": frozenset(name for name, p in module.named_parameters() if not p.requires_grad),
        }
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self._module, name)
        own = isinstance(value, types.MethodType) and value.__self__ is self._module
        if own and (name == "forward" or not hasattr(nn.Module, name)):
            return functools.partial(self._called, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._module[key]  # type: ignore[index]  # nn.Sequential and its like

    def __bool__(self) -> bool:
        return bool(self._module)  # not by __len__, which most modules do not have

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]  # nn.Sequential and its like

    def __iter__(self) -> Iterator[Any]:
        return iter(self._module)  # type: ignore[call-overload, no-any-return]  # nn.Sequential and its like

    def __repr__(self) -> str:
        return f"BoundModule({self._module!r}, {self._plan.policy!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundModule, (self._module, self._plan, self._device)  # copies and pickles hold no lock

    def parameters(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The module's parameters: the masters, also while casts of them stand in their places (S29)."""
        return iter([parameter for _, parameter in self.named_parameters(recurse=recurse)])

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The same with their names."""
        given, masters = self._given[-1] if self._given else {}, self._installation.masters
        named = self._module.named_parameters("", *args, **kwargs)
        before = f"{prefix}." if prefix else ""
        return iter([(before + name, given[name] if name in given else masters.get(id(p), p)) for name, p in named])

    def trainable(self) -> dict[str, torch.Tensor]:
        """The master weights that are trained, by `/`-separated path."""
        named, path = self.named_parameters(), self._path
        if not torch.compiler.is_compiling():  # where it is, they are tensors of a trace, and need no gradient
            return {path(name): p for name, p in named if p.requires_grad}
        return {path(name): p for name, p in named if name not in self._frozen}

    @contextlib.contextmanager
    def around(self, masters: dict[str, torch.Tensor]) -> Iterator[None]:
        """A block in which the module's own tensors are functions of these masters, in a compiled step."""
        self._given.append(masters)
        try:
            yield
        finally:
            self._given.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output with floating tensors in the policy's output dtype."""
        return self._called(self._module, *args, **kwargs)

    def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The output of the module, or of a method that it defines (S29), in the policy's output dtype."""
        plan, double = self._plan, self._plan.float64
        inside = any(model is self for model in OPENED.bound)
        installed = NOTHING if inside else self.installed()
        around = opened(plan, self._device.type)
        try:
            with installed, around:
                if plan.cast or plan.param == plan.compute != "float32":
                    args = cast_tree(args, plan.compute, float64=double)
                    kwargs = {name: cast_tree(value, plan.compute, float64=double) for name, value in kwargs.items()}
                return cast_tree(function(*args, **kwargs), plan.output, float64=double)
        except BaseException:
            _closed(around, installed)
            raise

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Overrides and, in cast mode, cast parameters in the module's place of its own, for the time of a block.

        The float32 islands are kept open as well: they act wherever autocast is on, in a repeated forward pass too.
        """
        kept = self._plan.mixes and self._plan.kept
        if torch.compiler.is_compiling():
            return self._traced(kept=kept)
        return _Installed(self, self._installation, self._device.type if kept else None)

    @contextlib.contextmanager
    def _traced(self, *, kept: bool) -> Iterator[None]:
        """The same for a compiler."""
        with self._installation.held(), islands(self._device.type) if kept else contextlib.nullcontext():
            bound = OPENED.bound
            bound.append(self)
            try:
                yield
            finally:
                bound.remove(self)

    def check_overrides_ran(self) -> None:
        """Refuse overrides of modules that own parameters but are never called as modules.

        Raises:
            UnsupportedError: names the first one.
        """
        for place, path in self._overrides.items():
            owner = self._module.get_submodule(place.replace("/", "."))
            if place not in self._installation.called and any(p.requires_grad for p in owner.parameters(recurse=False)):
                raise UnsupportedError(
                    f"overrides: the module {path!r} is never called as a module, so its dtype cannot be changed; the "
                    f"module around it uses its parameters directly. Override {path.rpartition('/')[0]!r} instead."
                )


def inside(bound: BoundModule) -> nn.Module:
    """The module that a bound model stands for."""
    return bound._module


class _Installation:
    """What a bound module puts into its module: put in by the first thread that comes, taken out by the last to go.

    Attributes:
        called: paths of the overridden modules that ran.
    """

    def __init__(self, module: nn.Module, plan: Plan, device_type: str, overrides: dict[str, str]) -> None:
        self.module = module
        self.plan = plan
        self.device_type = device_type
        self.called: set[str] = set()
        self.casts = Casts(module, overrides, plan) if plan.cast and plan.policy.is_mixed else None
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

    @property
    def masters(self) -> dict[int, torch.Tensor]:
        """The id of each cast that stands in a parameter's place now -> the parameter."""
        return {} if self.casts is None else {id(place.copy): place.master for place in self.casts.places}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which everything is in its place."""
        if self.casts is None and not self.replaced:
            yield
            return
        if self.casts is None and torch.compiler.is_compiling():
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
        if self.casts is None and not self.replaced:
            return
        with self.lock:
            if not self.holders:
                self._take_out()  # what an interrupt may have left
                self._put_in()
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

    def _put_in(self) -> None:
        for number, (part, name, replace) in enumerate(self.replaced):
            value = self._replacement(number, getattr(part, name), replace)
            self.placed.append((part, name, part.__dict__.get(name, part)))
            part.__dict__[name] = value
            if self.casts is not None and name == "forward":
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
        """In cast mode, what follows an overridden module computes in the dtype around it again."""
        around = next((dtype for owner, dtype in reversed(OPENED.overrides) if owner is self), self.plan.compute)
        return cast_tree(output, around, float64=self.plan.float64)

    def _part(self, path: str) -> nn.Module:
        return self.module.get_submodule(path.replace("/", "."))

    def _overridden(self, path: str, overrides: dict[str, str]) -> Replace:
        """Makes, of a submodule's `forward`, one that runs in the submodule's own dtype (S5)."""
        dtype, double = overrides[path], self.plan.float64
        place = self.plan.place(dtype)

        def replace(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def call(*args: Any, **kwargs: Any) -> Any:
                self._note(path)
                OPENED.overrides.append((self, dtype))
                try:
                    with region(place, self.device_type):
                        kwargs = {name: cast_tree(value, dtype, float64=double) for name, value in kwargs.items()}
                        return forward(*cast_tree(args, dtype, float64=double), **kwargs)
                finally:
                    OPENED.overrides.pop()

            call.polyamp_rebound = lambda part: replace(type(part).forward.__get__(part))  # type: ignore[attr-defined]  # for _carrying
            return call

        return replace

    def _note(self, path: str) -> None:
        _noted(self.called, path)
        if not torch.compiler.is_compiling():
            recomputation.carry(id(self), self.held, everywhere=True)


@constant_when_compiled
def _noted(called: set[str], path: str) -> None:
    """Note that a module ran; in a compiled function while it is traced, or the note would be a reason to recompile."""
    called.add(path)


class _Installed(Block):
    """The block in which a bound model is installed: see `BoundModule.installed`.

    Args:
        model: the bound model.
        installation: what it puts in its module.
        islands_on: the device type whose islands are kept open, or None.
    """

    def __init__(self, model: BoundModule, installation: _Installation, islands_on: str | None) -> None:
        self.model = model
        self.installation = installation
        self.region = None if islands_on is None else Kept(islands_on)

    def open(self) -> None:
        repair()
        self.depths = len(OPENED.regions), len(OPENED.overrides)
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
            isinstance(block, _Installed) and block.model is self.model for block in left
        ):
            OPENED.bound.remove(self.model)  # not pop(): a training library closes what it opened in any order
        OPENED.installed.remove(self)
        self.frame = None


def _closed(*blocks: contextlib.AbstractContextManager[None]) -> None:
    """An exception is on its way: close what an interrupt kept from closing itself."""
    for block in blocks:
        if isinstance(block, Block):
            block.close(interrupted=True)


def _carrying(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """`DataParallel.parallel_apply` with the region carried into its worker threads, which get `enabled` only."""

    def call(replicas: list[nn.Module], *args: Any) -> Any:
        for part in (part for replica in replicas for part in replica.modules()):
            rebound = getattr(part.__dict__.get("forward"), "polyamp_rebound", None)
            if rebound is not None:  # replicate() copied the attribute, which runs the original's parameters
                part.__dict__["forward"] = rebound(part)
        return parallel_apply([carried(replica) for replica in replicas], *args)

    return call


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the others may lie on other devices of its type.

    Raises:
        UnsupportedError: they are on devices of several types, or on `meta`.
    """
    devices = list(dict.fromkeys(parameter.device for parameter in module.parameters())) or [torch.device("cpu")]
    if len({device.type for device in devices}) > 1 or devices[0].type == "meta":
        listed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"model must have its parameters on devices of one type that hold data. Received: {listed}. Move it with "
            "model.to(device) first (from meta: model.to_empty(device=...) and load weights)."
        )
    return devices[0]
