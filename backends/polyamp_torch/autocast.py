"""Running torch code under a policy: the autocast region, the cast mode, and overrides by module path (S1, S3, S5).

`autocast(policy)` is the context manager; `BoundModule` is the model that `loss_fn` sees.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.policy import Policy
from polyamp.trees import leaves
from polyamp_torch.arrays import DTYPES, cast_tree, is_castable


@contextlib.contextmanager
def autocast(policy: Policy, device_type: str = "cpu") -> Iterator[None]:
    """A region in which operations pick their dtype by the policy's compute dtype.

    It is `torch.autocast` where the policy computes in 16 bits under wider parameters, and a region with autocast off
    otherwise. Open it for one forward pass, not around optimizer steps: torch caches the cast weights until the
    outermost region ends.

    Example:
        >>> import torch, polyamp
        >>> with autocast(polyamp.Policy("mixed_bfloat16")):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    with _matmul_precision(policy.float32_matmul), _region(policy.compute, policy, device_type):
        yield


def _region(dtype: str, policy: Policy, device_type: str) -> Any:
    mixed = dtype in ("float16", "bfloat16") and policy.param != dtype and (policy.mode or "autocast") == "autocast"
    if not mixed:
        return torch.autocast(device_type, enabled=False)
    # Overrides nest dtypes on one weight, which torch's weight cache (keyed by the tensor alone) would confuse.
    return torch.autocast(device_type, dtype=DTYPES[dtype], cache_enabled=not policy.overrides)


@contextlib.contextmanager
def _matmul_precision(wanted: str | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class BoundModule:
    """A module under a policy: call it like the module; other attributes are the module's own."""

    def __init__(self, module: nn.Module, policy: Policy, device: torch.device) -> None:
        self._module = module
        self._policy = policy
        self._device = device
        self._overrides = policy.resolve_overrides(module_paths(module)) if policy.overrides else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __repr__(self) -> str:
        return f"BoundModule({self._module!r}, {self._policy!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output with floating tensors in the policy's output dtype."""
        policy, double = self._policy, self._policy.casts_float64
        with autocast(policy, self._device.type), self._overridden():
            if policy.mode == "cast" or policy.param != "float32":
                args, kwargs = cast_tree((args, kwargs), policy.compute, float64=double)
            if policy.mode == "cast" and policy.param != policy.compute:
                parameters = cast_parameters(self._module, policy, self._overrides)
                result = torch.func.functional_call(self._module, parameters, args, kwargs)
            else:
                result = self._module(*args, **kwargs)
        return cast_tree(result, policy.output, float64=double)

    @contextlib.contextmanager
    def _overridden(self) -> Iterator[None]:
        """Hooks that run the overridden modules in their own dtype, for the time of one call."""
        roots = [path for path in self._overrides if path.rpartition("/")[0] not in self._overrides
                 or self._overrides[path.rpartition("/")[0]] != self._overrides[path]]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for path in roots:
                module = self._module.get_submodule(path.replace("/", "."))
                stack.enter_context(_in_dtype(module, self._overrides[path], self._policy, self._device.type))
            yield


@contextlib.contextmanager
def _in_dtype(module: nn.Module, dtype: str, policy: Policy, device_type: str) -> Iterator[None]:
    """Run one submodule in `dtype` while the context is open."""
    open_regions: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        region = _region(dtype, policy, device_type)
        region.__enter__()
        open_regions.append(region)
        return cast_tree((args, kwargs), dtype, float64=policy.casts_float64)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        open_regions.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_paths(module: nn.Module) -> list[str]:
    """Paths of all submodules, `/`-separated."""
    return [name.replace(".", "/") for name, _ in module.named_modules() if name]


def cast_parameters(module: nn.Module, policy: Policy, overrides: dict[str, str]) -> dict[str, torch.Tensor]:
    """The parameters cast for one call in cast mode; gradients flow back to the masters.

    A module that keeps running statistics (batch normalisation) keeps its parameters as they are: torch's kernels
    take 16-bit inputs beside float32 statistics and parameters, but not the mixture.
    """
    cast = {}
    for path, part in module.named_modules():
        if any(is_castable(buffer, float64=False) for buffer in part.buffers(recurse=False)):
            continue
        dtype = DTYPES[overrides.get(path.replace(".", "/"), policy.compute)]
        for name, parameter in part.named_parameters(recurse=False):
            if is_castable(parameter, float64=policy.casts_float64):
                cast[f"{path}.{name}" if path else name] = parameter.to(dtype)
    return cast


def run_under(target: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A plain function as one that runs under the policy, on the device of its first tensor argument."""
    if policy.overrides:
        raise UnsupportedError("overrides name module paths; policy.autocast needs a module for them, not a function.")

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for _, x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)), "cpu")
        with autocast(policy, device):
            if policy.mode == "cast":
                args, kwargs = cast_tree((args, kwargs), policy.compute, float64=policy.casts_float64)
            result = target(*args, **kwargs)
        return cast_tree(result, policy.output, float64=policy.casts_float64)

    return call


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
