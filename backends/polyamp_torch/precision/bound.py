"""`BoundModule`: the model that `loss_fn` sees, with the policy's casts and overrides installed (S1, S3, S5).

What is installed stays for the backward pass too, because activation checkpointing runs the forward pass again there.
Called by the state, the step and the backend. The casts themselves are in `cast_mode`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import NOTHING
from polyamp_torch.precision.autocast import opened
from polyamp_torch.precision.installation import Installation, Installed
from polyamp_torch.precision.islands import islands
from polyamp_torch.precision.parameter_listing import is_own, tree_parameters, with_each
from polyamp_torch.precision.paths import inner_paths, path_of, plan_for
from polyamp_torch.precision.regions import OPENED, Block


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
    _installation: Installation
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
            "_installation": Installation(module, plan, device.type, overrides),
            "_given": [],
            "_path": path_of(module),
            "_frozen": frozenset(name for name, p in tree_parameters(module) if not p.requires_grad),
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

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The module's parameters, as its class lists them: the masters, also while casts of them stand in their
        places (S29)."""
        if is_own(self._module, "parameters") or is_own(self._module, "named_parameters"):
            return self._with_masters(self._module.parameters(*args, **kwargs))
        return iter([parameter for _, parameter in self._tree("", *args, **kwargs)])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The same with their names."""
        if is_own(self._module, "named_parameters"):
            return self._with_masters(self._module.named_parameters(*args, **kwargs))
        return self._tree(*args, **kwargs)

    def _with_masters(self, listed: Any) -> Any:
        """What the module's own method lists; masters in the place of what stands in the module."""
        masters = dict(self._installation.masters)
        if self._given:
            given = self._given[-1]
            masters |= {id(p): given[name] for name, p in tree_parameters(self._module) if name in given}
        return with_each(lambda p: masters.get(id(p), p), listed) if masters else listed

    def _tree(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters that the modules hold, by torch's names."""
        given, masters = self._given[-1] if self._given else {}, self._installation.masters
        named = nn.Module.named_parameters(self._module, "", *args, **kwargs)
        before = f"{prefix}." if prefix else ""
        return iter([(before + name, given[name] if name in given else masters.get(id(p), p)) for name, p in named])

    def trainable(self) -> dict[str, torch.Tensor]:
        """The master weights that are trained, by `/`-separated path."""
        named, path = self._tree(), self._path
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
        if inside and OPENED.functions and (policy := self._function_policy()) is not None:
            second = BoundModule(self._module, plan_for(self._module, policy), self._device)
            return second._called(function, *args, **kwargs)
        installed = NOTHING if inside else self.installed()
        around = NOTHING if inside and self._installation.is_overruled() else opened(plan, self._device.type)
        try:
            with installed, around:
                if plan.cast or plan.param == plan.compute != "float32":
                    args = cast_tree(args, plan.compute, float64=double)
                    kwargs = {name: cast_tree(value, plan.compute, float64=double) for name, value in kwargs.items()}
                result = cast_tree(function(*args, **kwargs), plan.output, float64=double)
                if installed is not NOTHING and plan.cast:
                    self.commit()
                return result
        except BaseException:
            _closed(around, installed)
            raise

    def _function_policy(self) -> Policy | None:
        """The policy of the function in `loss_fn` that is calling the model, if a region cannot do for it: one of the
        two policies casts weights."""
        policy, outside = OPENED.functions[-1]
        later = not any(model is self for model in OPENED.bound[outside:])
        found: Policy | None = policy if later and (self._plan.cast or policy.mode == "cast") else None
        return found

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Overrides and, in cast mode, cast parameters in the module's place of its own, for the time of a block.

        The float32 islands are kept open as well: they act wherever autocast is on, in a repeated forward pass too.
        """
        kept = self._plan.mixes and self._plan.kept
        if torch.compiler.is_compiling():
            return self._traced(kept=kept)
        return Installed(self, self._installation, self._device.type if kept else None)

    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """In mode "cast", behind a forward pass: what it wrote to casts of parameters goes to the parameters.

        Returns:
            Each that was written to, with its value before.
        """
        return self._installation.commit()

    def discard(self) -> None:
        """In mode "cast", behind a forward pass that is to leave nothing: what it wrote to casts is forgotten."""
        self._installation.discard()

    def written(self) -> list[torch.Tensor]:
        """In mode "cast", behind a forward pass: the parameters to which `commit` will bring what it wrote."""
        return self._installation.written()

    @contextlib.contextmanager
    def _traced(self, *, kept: bool) -> Iterator[None]:
        """The same for a compiler."""
        with self._installation.held(), islands(self._device.type) if kept else contextlib.nullcontext():
            bound, placed = OPENED.bound, OPENED.placed
            bound.append(self)
            placed.append(self._installation)
            try:
                yield
            finally:
                bound.remove(self)
                placed.pop()

    def check_overrides_ran(self) -> None:
        """Refuse overrides of modules that own parameters but are never called as modules.

        Raises:
            UnsupportedError: names the first one.
        """
        for place, path in self._overrides.items():
            owner = self._module.get_submodule(place.replace("/", "."))
            own = (p for _, p in tree_parameters(owner, recurse=False))
            if place not in self._installation.called and any(p.requires_grad for p in own):
                raise UnsupportedError(
                    f"overrides: the module {path!r} is never called as a module, so its dtype cannot be changed; the "
                    f"module around it uses its parameters directly. Override {path.rpartition('/')[0]!r} instead."
                )


def inside(bound: BoundModule) -> nn.Module:
    """The module that a bound model stands for."""
    return bound._module


def _closed(*blocks: contextlib.AbstractContextManager[None]) -> None:
    """An exception is on its way: close what an interrupt kept from closing itself."""
    for block in blocks:
        if isinstance(block, Block):
            block.close(interrupted=True)


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the others may lie on other devices of its type.

    Raises:
        UnsupportedError: they are on devices of several types, or on `meta`.
    """
    devices = list(dict.fromkeys(parameter.device for _, parameter in tree_parameters(module))) or [torch.device("cpu")]
    if len({device.type for device in devices}) > 1 or devices[0].type == "meta":
        listed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"model must have its parameters on devices of one type that hold data. Received: {listed}. Move it with "
            "model.to(device) first (from meta: model.to_empty(device=...) and load weights)."
        )
    return devices[0]
