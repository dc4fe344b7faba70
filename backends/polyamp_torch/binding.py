"""`BoundModule`: the model that `loss_fn` sees, with the policy's casts and overrides installed (S1, S3, S5).

What is installed stays for the backward pass too, because activation checkpointing runs the forward pass again there.
Called by the state, the step and the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from polyamp.errors import PolicyError, UnsupportedError
from polyamp.policy import Policy
from polyamp_torch.arrays import DTYPES, cast_tree, dtype_name, is_castable
from polyamp_torch.autocast import autocast, region

_BATCH_NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""In cast mode these keep float32 parameters and statistics: torch's kernels take 16-bit inputs beside them."""


class BoundModule:
    """A module under a policy: call it like the module; everything else is the module's own.

    Inside the step the casts are installed around the whole of `loss_fn`, so that calling a part of the model
    (`model.encoder(x)`) is covered too; elsewhere each call installs them for itself.
    """

    _module: nn.Module
    _policy: Policy

    def __init__(self, module: nn.Module, policy: Policy, device: torch.device) -> None:
        own: dict[str, Any] = {
            "_module": module,
            "_policy": policy,
            "_device": device,
            "_overrides": policy.resolve_overrides(module_paths(module)) if policy.overrides else {},
            "_called": set(),
            "_installed": False,
        }
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._module[key]  # type: ignore[index]  # nn.Sequential and its like

    def __len__(self) -> int:
        return len(self._module)  # type: ignore[arg-type]  # nn.Sequential and its like

    def __iter__(self) -> Iterator[Any]:
        return iter(self._module)  # type: ignore[call-overload, no-any-return]  # nn.Sequential and its like

    def __repr__(self) -> str:
        return f"BoundModule({self._module!r}, {self._policy!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output with floating tensors in the policy's output dtype."""
        policy, double = self._policy, self._policy.casts_float64
        ready = contextlib.nullcontext() if self._installed else self.installed()
        with ready, autocast(policy, self._device.type):
            if policy.mode == "cast" or policy.param == policy.compute != "float32":
                args, kwargs = cast_tree((args, kwargs), policy.compute, float64=double)
            return cast_tree(self._module(*args, **kwargs), policy.output, float64=double)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Overrides and, in cast mode, cast parameters in the module's place of its own, for the time of a block."""
        self.__dict__["_installed"] = True
        try:
            with (
                _hooked(self._module, self._overrides, self._policy, self._device.type, self._called),
                _cast_in_place(self._module, self._overrides, self._policy),
            ):
                yield
        finally:
            self.__dict__["_installed"] = False

    def check_overrides_ran(self) -> None:
        """Refuse overrides of modules that own parameters but are never called as modules.

        Raises:
            UnsupportedError: names the first one.
        """
        for path in self._overrides:
            owner = self._module.get_submodule(path.replace("/", "."))
            if path not in self._called and any(p.requires_grad for p in owner.parameters(recurse=False)):
                raise UnsupportedError(
                    f"overrides: the module {path!r} is never called as a module, so its dtype cannot be changed; the "
                    f"module around it uses its parameters directly. Override {path.rpartition('/')[0]!r} instead."
                )


def module_paths(module: nn.Module) -> list[str]:
    """Paths of all submodules, `/`-separated; a shared one under each of its names."""
    return [name.replace(".", "/") for name, _ in module.named_modules(remove_duplicate=False) if name]


@contextlib.contextmanager
def _hooked(
    module: nn.Module, overrides: dict[str, str], policy: Policy, device_type: str, called: set[str]
) -> Iterator[None]:
    """Run every overridden submodule in its own dtype while the block lasts; `called` collects those that ran."""
    open_regions: list[Any] = []
    handles = []
    for path, dtype in overrides.items():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path, dtype: str = dtype) -> Any:
            called.add(path)
            open_regions.append(region(dtype, policy, device_type))
            open_regions[-1].__enter__()
            return cast_tree((args, kwargs), dtype, float64=policy.casts_float64)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            open_regions.pop().__exit__(None, None, None)
            if policy.mode == "cast" and not open_regions:  # what follows computes in the policy's dtype again
                return cast_tree(output, policy.compute, float64=policy.casts_float64)
            return None

        part = module.get_submodule(path.replace("/", "."))
        handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(part.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _cast_in_place(module: nn.Module, overrides: dict[str, str], policy: Policy) -> Iterator[None]:
    """In cast mode: cast copies stand where the parameters and floating buffers were; gradients flow to the masters.

    A buffer that the forward pass changed in its cast form is written back to the float32 one.
    """
    if policy.mode != "cast" or policy.param == policy.compute:
        yield
        return
    copies: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = []
    for path, part in module.named_modules():
        dtype = overrides.get(path.replace(".", "/"), policy.compute)
        if isinstance(part, _BATCH_NORMS):
            continue
        for slots in (part._parameters, part._buffers):
            for name, master in slots.items():
                if master is None or not is_castable(master, float64=policy.casts_float64):
                    continue
                copy = copies.setdefault(id(master), master.to(DTYPES[dtype]))
                if copy.dtype != DTYPES[dtype]:
                    raise PolicyError(
                        f"overrides give the tensor {path}.{name} the dtype {dtype}, and {dtype_name(copy.dtype)} "
                        "where else the model uses it. A shared tensor has one dtype in mode='cast'."
                    )
                places.append((slots, name, master, copy, copy._version))
    try:
        for slots, name, _, copy, _ in places:
            slots[name] = copy
        yield
    finally:
        for slots, name, master, copy, version in places:
            now = slots[name]
            slots[name] = master
            if isinstance(master, nn.Parameter) or now is None:
                continue
            if now is not copy:
                slots[name] = now.to(master.dtype)
            elif copy is not master and copy._version != version:
                with torch.no_grad():
                    master.copy_(copy)


def device_of(module: nn.Module) -> torch.device:
    """The one device that holds all of a module's parameters.

    Raises:
        UnsupportedError: they are on several devices, or on `meta`.
    """
    devices = {parameter.device for parameter in module.parameters()} or {torch.device("cpu")}
    if len(devices) > 1 or next(iter(devices)).type == "meta":
        listed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"model must have all parameters on one device that holds data. Received: {listed}. Move it with "
            "model.to(device) first (from meta: model.to_empty(device=...) and load weights)."
        )
    return next(iter(devices))
