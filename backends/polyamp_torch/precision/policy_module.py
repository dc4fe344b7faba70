"""`PolicyModule`: the model that `loss_fn` sees, with the policy's casts and overrides installed (S1, S3, S5).

Casts and overrides stay installed in the backward pass, where activation checkpointing runs the forward pass again.
The casts themselves are in `cast_mode`.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.float8 import head_paths
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import NULL_CONTEXT
from polyamp_torch.precision.autocast import is_redundant, region, root_settings
from polyamp_torch.precision.cast_mode import ParameterCasts
from polyamp_torch.precision.torch_only.autocast_region_stack import RegionBlock, RegionSettings
from polyamp_torch.precision.torch_only.compat import uses_kernels
from polyamp_torch.precision.torch_only.float8_products import check_device
from polyamp_torch.precision.torch_only.float32_islands import islands
from polyamp_torch.precision.torch_only.named_parameters import is_overridden, map_listed_parameters, tree_parameters
from polyamp_torch.precision.torch_only.op_rules import check_op_rules, rule_changes, unmet_rules, unmet_text
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS
from polyamp_torch.precision.torch_only.policy_installation import InstallationBlock, PolicyInstallation
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function, unwrapped_paths

_IS_FLOATING_POINT = torch.Tensor.is_floating_point


class PolicyModule:
    """Module under a policy. The policy covers its call and the methods that its class defines; every other attribute
    is the wrapped module's.

    Inside the step, the casts are installed around the whole of `loss_fn`, so that calls of submodules
    (`model.encoder(x)`) are covered too. Elsewhere each call installs them for itself. Several threads may call it at
    the same time. During a call, the casts and overrides apply to the module in every thread.
    """

    _module: nn.Module
    _plan: ResolvedPolicy
    _device: torch.device
    _overrides: dict[str, str]
    _installation: PolicyInstallation
    _settings: RegionSettings
    _traced_masters: list[dict[str, torch.Tensor]]
    _frozen: frozenset[str]
    _checks_rules: bool
    _path: Callable[[str], str]

    def __init__(self, module: nn.Module, plan: ResolvedPolicy, device: torch.device) -> None:
        paths = unwrapped_paths(module) if plan.overridden else {}
        overrides = {paths[path]: dtype for path, dtype in plan.overridden.items()}
        own: dict[str, Any] = {
            "_module": module,
            "_plan": plan,
            "_device": device,
            "_overrides": {paths[path]: path for path in plan.overridden},
            "_installation": PolicyInstallation(module, plan, device.type, overrides),
            "_settings": root_settings(plan, device.type),
            "_traced_masters": [],
            "_checks_rules": bool(plan.op_rules) and plan.mixes,
            "_path": path_function(module),
            "_frozen": frozenset(name for name, p in tree_parameters(module) if not p.requires_grad),
        }
        self.__dict__.update(own)
        check_device(plan.policy.float8, device.type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self._module, name)
        own = isinstance(value, types.MethodType) and value.__self__ is self._module
        if own and (name == "forward" or not hasattr(nn.Module, name)):
            return functools.partial(self._call_function, value)
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
        acts = self._plan.mixes and self._plan.kept
        islands = f", float32_islands={'kernels' if uses_kernels() else 'mode'!r}" if acts else ""
        return f"PolicyModule({self._module!r}, {self._plan.policy!r}{islands})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PolicyModule, (self._module, self._plan, self._device)  # copies and pickles hold no lock

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's parameters as its class lists them: the masters, also while casts replace them in the
        module (S29)."""
        if is_overridden(self._module, "parameters") or is_overridden(self._module, "named_parameters"):
            return self._with_masters(self._module.parameters(*args, **kwargs))
        return iter([parameter for _, parameter in self._tree("", *args, **kwargs)])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return names and parameters; see `parameters`."""
        if is_overridden(self._module, "named_parameters"):
            return self._with_masters(self._module.named_parameters(*args, **kwargs))
        return self._tree(*args, **kwargs)

    def _with_masters(self, listed: Any) -> Any:
        """Return what the module's own method lists, with masters in place of casts."""
        masters = dict(self._installation.masters)
        if self._traced_masters:
            given = self._traced_masters[-1]
            masters |= {id(p): given[name] for name, p in tree_parameters(self._module) if name in given}
        return map_listed_parameters(lambda p: masters.get(id(p), p), listed) if masters else listed

    def _tree(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return names and parameters of the module tree, under torch's names."""
        given, masters = self._traced_masters[-1] if self._traced_masters else {}, self._installation.masters
        named = nn.Module.named_parameters(self._module, "", *args, **kwargs)
        before = f"{prefix}." if prefix else ""
        return iter([(before + name, given[name] if name in given else masters.get(id(p), p)) for name, p in named])

    def trainable(self) -> dict[str, torch.Tensor]:
        """Return the trainable master weights by `/`-separated path."""
        named, path = self._tree(), self._path
        if not torch.compiler.is_compiling():  # when compiling, they are traced tensors, which require no gradient
            return {path(name): p for name, p in named if p.requires_grad}
        return {path(name): p for name, p in named if name not in self._frozen}

    @contextlib.contextmanager
    def around(self, masters: dict[str, torch.Tensor]) -> Iterator[None]:
        """Context manager, in a compiled step, in which the module's tensors are functions of these masters."""
        self._traced_masters.append(masters)
        try:
            yield
        finally:
            self._traced_masters.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output with floating tensors in the policy's output dtype."""
        return self._call_function(self._module, *args, **kwargs)

    def _call_function(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module, or of a method that it defines (S29), in the policy's output dtype."""
        plan, double = self._plan, self._plan.float64
        inside = self in OPEN_BLOCKS.bound
        if inside and OPEN_BLOCKS.functions and (policy := self._function_policy()) is not None:
            second = PolicyModule(self._module, resolve_policy(self._module, policy), self._device)
            return second._call_function(function, *args, **kwargs)
        installed = NULL_CONTEXT if inside else self.installed()
        around: contextlib.AbstractContextManager[None] = NULL_CONTEXT
        if not (inside and (is_redundant(self._settings, plan.float32_matmul) or self._installation.is_overruled())):
            around = self.region()
        try:
            with installed, around:
                if plan.cast or plan.param == plan.compute != "float32":
                    args = cast_tree(args, plan.compute, float64=double)
                    kwargs = {name: cast_tree(value, plan.compute, float64=double) for name, value in kwargs.items()}
                result = cast_tree(function(*args, **kwargs), plan.output, float64=double)
                if installed is not NULL_CONTEXT and plan.cast:
                    self.commit()
                return result
        except BaseException:
            _close_open_blocks(around, installed)
            raise

    def _function_policy(self) -> Policy | None:
        """Return the policy of the function in `loss_fn` that calls the model, if a region is not enough because one of
        the two policies casts weights."""
        policy, outside = OPEN_BLOCKS.functions[-1]
        later = self not in OPEN_BLOCKS.bound[outside:]
        found: Policy | None = policy if later and (self._plan.cast or policy.mode == "cast") else None
        return found

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that installs the overrides and, in cast mode, the cast parameters."""
        if torch.compiler.is_compiling():
            return self._traced(kept=self._plan.mixes and self._plan.kept)
        return InstallationBlock(self, self._installation)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager around `loss_fn`: the region of the policy."""
        return region(self._settings, self._plan.float32_matmul)

    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy what a forward pass wrote to casts of parameters to the parameters, in mode "cast".

        Returns:
            Each parameter that was written to, with its previous value.
        """
        written: list[tuple[torch.Tensor, torch.Tensor]] = self._installation.apply_to_casts(ParameterCasts.commit)
        return written

    def discard(self) -> None:
        """Drop what a forward pass wrote to casts of parameters, in mode "cast"."""
        self._installation.apply_to_casts(ParameterCasts.discard)

    def written(self) -> list[torch.Tensor]:
        """Return the parameters that `commit` will write to after a forward pass, in mode "cast"."""
        written: list[torch.Tensor] = self._installation.apply_to_casts(ParameterCasts.written)
        return written

    @contextlib.contextmanager
    def _traced(self, *, kept: bool) -> Iterator[None]:
        """`installed` for a function that a compiler traces."""
        with self._installation.active(), islands(self._device.type) if kept else contextlib.nullcontext():
            bound, placed = OPEN_BLOCKS.bound, OPEN_BLOCKS.placed
            bound.append(self)
            placed.append(self._installation)
            try:
                yield
            finally:
                bound.remove(self)
                placed.pop()

    def check_pass(self) -> None:
        """Check, after a forward pass, that the overrides ran, and once that `op_rules` name functions that ran.

        Raises:
            UnsupportedError: see `check_overrides_ran`.
        """
        if self._overrides:
            self.check_overrides_ran()
        if self._checks_rules:
            self.__dict__["_checks_rules"] = False
            names = unmet_rules(rule_changes(self._plan))
            if names:
                warnings.warn(unmet_text(names, "the first step"), stacklevel=2)

    def check_overrides_ran(self) -> None:
        """Reject overrides of modules that own parameters but are never called as modules.

        Raises:
            UnsupportedError: names the first one.
        """
        for place, path in self._overrides.items():
            owner = self._module.get_submodule(place.replace("/", "."))
            own = (p for _, p in tree_parameters(owner, recurse=False))
            if self._plan.policy.float8 is not None and head_paths([path]):
                continue  # such as a head that is tied to an embedding
            if place not in self._installation.called and any(p.requires_grad for p in own):
                raise UnsupportedError(
                    f"overrides: the module {path!r} is never called as a module, so its dtype cannot be changed; the "
                    f"module around it uses its parameters directly. Override {path.rpartition('/')[0]!r} instead."
                )


def resolve_policy(module: nn.Module, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy against a module's paths.

    The root has no path here, so no glob overrides it.

    Raises:
        PolicyError: an override matches no module, or `op_rules` names no function of torch.
        UnsupportedError: a module would compute in a dtype to which autocast does not cast its parameters.
    """
    check_op_rules(policy)
    inner = unwrapped_paths(module) if policy.has_module_precisions else {}
    plan = policy.plan(inner, backend="torch")
    for path, dtype in {"": plan.compute, **plan.overridden_dtypes}.items():
        part = module.get_submodule(inner[path].replace("/", ".")) if path else module
        if not _can_compute_in(plan, dtype) and any(map(_IS_FLOATING_POINT, part.parameters())):
            change = "mode='cast'" + (f", or drop overrides of {dtype}" if path else "")
            raise UnsupportedError(
                f"{f'the module {path!r}' if path else 'the model'} would have to compute in {dtype} over parameters "
                f"of {plan.param}. torch.autocast casts float32 to 16 bits, and nothing else. Use "
                f"{change if dtype != 'float64' else 'param=' + repr(dtype)}. Received: {policy}."
            )
    return plan


def _can_compute_in(plan: ResolvedPolicy, dtype: str) -> bool:
    if dtype == plan.param or dtype == "float64":
        return dtype == plan.param
    return plan.cast or (plan.param == "float32" and dtype in HALF_DTYPES)


def wrapped_module(bound: PolicyModule) -> nn.Module:
    """Return the module that a `PolicyModule` wraps."""
    return bound._module


def _close_open_blocks(*blocks: contextlib.AbstractContextManager[None]) -> None:
    """Close blocks that an interrupt left open, while an exception propagates."""
    for block in blocks:
        if isinstance(block, RegionBlock):
            block.close(interrupted=True)


def module_device(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter; the others may be on other devices of its type.

    Raises:
        UnsupportedError: the parameters are on devices of several types, or on `meta`.
    """
    devices = list(dict.fromkeys(parameter.device for _, parameter in tree_parameters(module))) or [torch.device("cpu")]
    if len({device.type for device in devices}) > 1 or devices[0].type == "meta":
        listed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"model must have its parameters on devices of one type that hold data. Received: {listed}. Move it with "
            "model.to(device) first (from meta: model.to_empty(device=...) and load weights)."
        )
    return devices[0]
