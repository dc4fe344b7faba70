"""`PolicyInstallation`: installs a policy's overrides and casts in a module for the time of a block (S3, S5).

Overrides replace methods; the casts of mode "cast" replace parameters.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import assume_constant_result, is_in_backward
from polyamp_torch.precision.autocast import carried, is_region_open, place_region
from polyamp_torch.precision.cast_mode import ParameterCasts
from polyamp_torch.precision.torch_only import activation_checkpointing
from polyamp_torch.precision.torch_only.autocast_region_stack import RegionBlock, autocast_nesting, close_stale_blocks
from polyamp_torch.precision.torch_only.op_rules import rule_changes
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS

MethodWrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the replacement of a module's method."""
_MODEL: Final = operator.attrgetter("model")


class PolicyInstallation:
    """Overrides and casts of a `PolicyModule`. The first thread to enter installs them, the last to leave removes them.

    Attributes:
        called: paths of the overridden modules that ran.
        cast_outputs: ids of the overridden modules outside of which autocast does not act; their outputs are cast.
    """

    def __init__(self, module: nn.Module, plan: ResolvedPolicy, device_type: str, overrides: dict[str, str]) -> None:
        self.module = module
        self.plan = plan
        self.device_type = device_type
        self.rules = rule_changes(plan)
        self.called: set[str] = set()
        self.own_casts = ParameterCasts(module, overrides, plan) if plan.cast and plan.policy.is_mixed else None
        self.casts = self.own_casts
        self.cast_outputs = {id(self._part(path)) for path in overrides if self._needs_output_cast(path, overrides)}
        self.wrappers = [(self._part(path), "forward", self._override_wrapper(path, overrides)) for path in overrides]
        self.wrappers.reverse()  # if a module has several names, the last one wins: it becomes the innermost wrapper
        self.wrappers += [
            (part, "parallel_apply", _carry_region) for part in module.modules() if isinstance(part, nn.DataParallel)
        ]
        self.replacements: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self.lock = threading.RLock()  # not Lock: an interrupt's handler may come while this thread holds it
        self.holders: list[Any] = []
        self.methods: list[tuple[nn.Module, str, Any]] = []
        self.hooks: list[Any] = []

    def is_overruled(self, part: nn.Module | None = None) -> bool:
        """Return whether an inner region with other settings, or a second policy around `part`, takes precedence (S3).

        A region counts if it was opened after the installation. None is open in a backward pass, whose hooks may call
        the model; there, a checkpoint opens again what was open in the forward pass.
        """
        compiling = torch.compiler.is_compiling()
        own = (
            None if compiling else next((block for block in reversed(OPEN_BLOCKS.installed) if self.is_in(block)), None)
        )
        if part is not None and self._is_under_another(own, part):
            return True
        dtype = next((dtype for owner, dtype in reversed(OPEN_BLOCKS.overrides) if owner is self), None)
        place = self.plan.root if dtype is None else self.plan.place(dtype)
        if is_region_open(place, self.device_type, self.rules):
            return False
        if (
            not compiling and dtype is None and part is not None and is_in_backward()
        ):  # a checkpoint inside an overridden module
            places = map(self.plan.place, set(self.plan.overridden.values()))
            if any(is_region_open(place, self.device_type, self.rules) for place in places):
                return False
        return _is_inner_region_open(self)

    def is_in(self, block: RegionBlock) -> bool:
        """Return whether this block has installed it."""
        return isinstance(block, InstallationBlock) and block.installation is self

    def _is_under_another(self, own: Any, part: nn.Module) -> bool:
        """Return whether a policy that was installed inside this one's region covers `part`."""
        if torch.compiler.is_compiling():
            last = OPEN_BLOCKS.placed[-1] if OPEN_BLOCKS.placed else self
            return last is not self and any(part is inner for inner in last.module.modules())
        if own is None or len(OPEN_BLOCKS.installed) == 1:
            return False
        further_in = [block.installation.module for block in OPEN_BLOCKS.installed if block.depth > own.depth]
        return any(part is inner for module in further_in for inner in module.modules())

    @property
    def masters(self) -> dict[int, torch.Tensor]:
        """The id of each cast that replaces a parameter now -> the parameter."""
        return {} if self.casts is None else {id(place.copy): place.master for place in self.casts.places}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context manager in which everything is installed."""
        if self.own_casts is None and torch.compiler.is_compiling():  # a compiler cannot trace locks
            methods: list[tuple[nn.Module, str, Any]] = []
            self._replace_methods(methods)
            try:
                yield
            finally:
                _restore_methods(methods)
            return
        holder = object()
        try:
            self.acquire(holder)
            yield
        finally:
            self.release(holder)

    def acquire(self, holder: Any) -> None:
        """Keep everything installed until `holder` is released."""
        outer = self._outer_masters() if len(OPEN_BLOCKS.installed) > 1 else {}
        if self.own_casts is None and not self.wrappers and not outer:
            return
        with self.lock:
            if not self.holders:
                self._uninstall()  # removes what an interrupt may have left
                self._install(outer)
            elif self.casts is not None:
                self.casts.refresh()
            self.holders = [*self.holders, holder]

    def release(self, holder: Any) -> None:
        """Release `holder`. A second call, or an unknown holder, has no effect."""
        if self.casts is None and not self.wrappers:
            return
        with self.lock:
            self.holders = [other for other in self.holders if other is not holder]
            if not self.holders:
                self._uninstall()

    def _outer_masters(self) -> dict[int, torch.Tensor]:
        """Return the masters of the parameters that enclosing policies have replaced by casts."""
        found: dict[int, torch.Tensor] = {}
        for block in OPEN_BLOCKS.installed:
            if block.installation is not self:
                found |= block.installation.masters
        return found

    def apply_to_casts(self, function: Callable[[ParameterCasts], Any]) -> Any:
        """Return `function` of the casts, while no other thread changes them; an empty list if there are none."""
        if self.casts is None:
            return []
        with self.lock:
            return function(self.casts)

    def _install(self, outer: dict[int, torch.Tensor]) -> None:
        self.casts = self.own_casts
        if self.casts is None and outer:
            self.casts = ParameterCasts(self.module, {}, self.plan)
        if self.casts is not None:
            self.casts.outer = outer
        self._replace_methods(self.methods)
        for part, name, _ in self.wrappers:
            if name == "forward" and (self.casts is not None or id(part) in self.cast_outputs):
                # The hook runs after the user's hooks.
                self.hooks.append(part.register_forward_hook(self._cast_back))
        if self.casts is not None:
            self.casts.__enter__()

    def _uninstall(self) -> None:
        if self.casts is not None and self.casts.places:
            self.casts.__exit__()
        _restore_methods(self.methods)
        for hook in self.hooks:
            hook.remove()
        self.methods, self.hooks = [], []

    def _replace_methods(self, previous: list[tuple[nn.Module, str, Any]]) -> None:
        """Replace the methods, and append each one's module, name and previous entry to `previous`.

        In eager code a replacement is the same object each time, or torch.compile would recompile."""
        for number, (part, name, wrap) in enumerate(self.wrappers):
            method = getattr(part, name)
            known = None if torch.compiler.is_compiling() else self.replacements.get(number)
            value = known[1] if known is not None and known[0] == method else wrap(method)
            if not torch.compiler.is_compiling():
                self.replacements[number] = (method, value)
            previous.append((part, name, part.__dict__.get(name, part)))
            part.__dict__[name] = value

    def _cast_back(self, part: nn.Module, args: Any, output: Any) -> Any:
        """Cast the output of an overridden module to the dtype around it, unless autocast casts in what follows."""
        return None if self.is_overruled(part) else self._cast_to_outer_dtype(output)

    def _cast_to_outer_dtype(self, output: Any) -> Any:
        named = next((dtype for owner, dtype in reversed(OPEN_BLOCKS.overrides) if owner is self), self.plan.compute)
        around = self.plan.place(named)
        mixes = self.casts is None and around.mixes
        return output if mixes else cast_tree(output, around.dtype, float64=self.plan.float64)

    def _needs_output_cast(self, path: str, overrides: dict[str, str]) -> bool:
        """Return whether the code around a module computes in another dtype, without autocast."""
        outer = path.rpartition("/")[0]
        while outer and outer not in overrides:
            outer = outer.rpartition("/")[0]
        around = self.plan.place(overrides[outer]) if outer else self.plan.root
        return not around.mixes and around.dtype != self.plan.place(overrides[path]).dtype

    def _part(self, path: str) -> nn.Module:
        return self.module.get_submodule(path.replace("/", "."))

    def _override_wrapper(self, path: str, overrides: dict[str, str]) -> MethodWrapper:
        """Return a wrapper of a submodule's `forward` that runs it in the submodule's own dtype (S5)."""
        named, double = overrides[path], self.plan.float64
        place, part = self.plan.place(named), self._part(path)
        dtype = place.dtype
        casts_output = id(part) in self.cast_outputs

        def replace(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def call(*args: Any, **kwargs: Any) -> Any:
                self._record_call(path)
                if self.is_overruled(part):
                    return forward(*args, **kwargs)
                OPEN_BLOCKS.overrides.append((self, named))
                try:
                    with place_region(place, self.device_type, self.rules):
                        kwargs = {name: cast_tree(value, dtype, float64=double) for name, value in kwargs.items()}
                        output = forward(*cast_tree(args, dtype, float64=double), **kwargs)
                finally:
                    OPEN_BLOCKS.overrides.pop()
                return self._cast_to_outer_dtype(output) if casts_output and torch.compiler.is_compiling() else output

            carrier: Any = call  # a function takes any attribute; `_carry_region` reads this one
            carrier.polyamp_rebind = lambda part: replace(type(part).forward.__get__(part))
            return call

        return replace

    def _record_call(self, path: str) -> None:
        _add_called(self.called, path)
        if not torch.compiler.is_compiling():
            activation_checkpointing.carry_into_checkpoint(id(self), self.active, everywhere=True)


def _restore_methods(previous: list[tuple[nn.Module, str, Any]]) -> None:
    for part, name, before in reversed(previous):
        if before is part:
            part.__dict__.pop(name, None)
        else:
            part.__dict__[name] = before


@assume_constant_result
def _is_inner_region_open(installation: PolicyInstallation) -> bool:
    """Return whether a region was opened inside the innermost installation. In a traced function this is evaluated at
    trace time, when the regions that occur are opened."""
    own = next((block for block in reversed(OPEN_BLOCKS.installed) if installation.is_in(block)), None)
    return autocast_nesting() > (0 if own is None else own.depth)


@assume_constant_result
def _add_called(called: set[str], path: str) -> None:
    """Record that a module ran; in a compiled function at trace time, as a later change would cause recompilation."""
    called.add(path)


class InstallationBlock(RegionBlock):
    """Block in which the overrides and casts of a `PolicyModule` are installed: see `PolicyModule.installed`.

    Args:
        model: the `PolicyModule`.
        installation: its overrides and casts.

    Attributes:
        depth: nesting depth of torch's regions around it.
    """

    depth = 0

    def __init__(self, model: Any, installation: PolicyInstallation) -> None:
        self.model = model
        self.installation = installation

    def open(self) -> None:
        close_stale_blocks()
        self.depths = len(OPEN_BLOCKS.regions), len(OPEN_BLOCKS.overrides)
        self.depth = autocast_nesting()
        OPEN_BLOCKS.installed.append(self)
        self.installation.acquire(self)
        OPEN_BLOCKS.bound.append(self.model)

    def close(self, *, interrupted: bool) -> None:
        if self not in OPEN_BLOCKS.installed:
            return
        regions, overrides = self.depths
        if interrupted:
            while len(OPEN_BLOCKS.regions) > regions:
                OPEN_BLOCKS.regions[-1].close(interrupted=True)
            del OPEN_BLOCKS.overrides[overrides:]
        self.installation.release(self)
        models = list(map(_MODEL, OPEN_BLOCKS.installed))  # with this block's
        while OPEN_BLOCKS.bound.count(self.model) >= models.count(self.model):
            OPEN_BLOCKS.bound.remove(self.model)  # not pop(): training libraries close their blocks in any order
        OPEN_BLOCKS.installed.remove(self)
        self.frame = None


def _carry_region(parallel_apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DataParallel.parallel_apply` to carry the region into its worker threads, which get `enabled` only."""

    def call(replicas: list[nn.Module], *args: Any) -> Any:
        for part in (part for replica in replicas for part in replica.modules()):
            rebind = getattr(part.__dict__.get("forward"), "polyamp_rebind", None)
            if rebind is not None:  # replicate() copied the attribute, which uses the original's parameters
                part.__dict__["forward"] = rebind(part)
        return parallel_apply([carried(replica) for replica in replicas], *args)

    return call
