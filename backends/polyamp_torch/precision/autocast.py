"""Autocast region of a policy, for torch code of any kind (S3, S4). Modules under a policy are in `policy_module`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ModulePrecision, ResolvedPolicy
from polyamp.rules.process_setting import ProcessSetting
from polyamp.trees import leaves
from polyamp_torch.arrays import DTYPES, cast_tree
from polyamp_torch.compat import NULL_CONTEXT, RegionBase, TorchAutocast, open_mode_count, skip_compilation
from polyamp_torch.precision.torch_only.autocast_argument_parsing import RegionError, parse_region_arguments
from polyamp_torch.precision.torch_only.autocast_region_stack import (
    AutocastRegion,
    RegionSettings,
    close_stale_blocks,
    innermost_region,
    weak_owner_reference,
)
from polyamp_torch.precision.torch_only.float8_products import region_rules
from polyamp_torch.precision.torch_only.float32_islands import (
    backward_islands,
    capture_autocast_state,
    current_islands,
    device_types,
    islands,
    restore_autocast_state,
)
from polyamp_torch.precision.torch_only.op_rules import RuleChanges, check_op_rules, region_changes, rule_changes
from polyamp_torch.precision.torch_only.op_rules_mode import (
    check_traced_rules,
    current_changes,
    current_rules_mode,
    op_rules_region,
)
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS

_Function = TypeVar("_Function", bound=Callable[..., Any])


if TYPE_CHECKING:
    _Base = torch.autocast
else:
    _Base = RegionBase


_LAZY_FUNCTION_TESTS: Final = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
"""Tests for functions that return immediately and compute later."""


class autocast(_Base):  # noqa: N801  # named and used like torch.autocast
    """Region or decorator in which operations choose their dtype: a complete `torch.autocast`, with its signature.

        autocast(policy)                 autocast(policy, "cpu")                 autocast("mixed_float16")
        autocast("cuda")                 autocast("cuda", torch.float16, enabled=use_amp)
        autocast(device_type="cuda", dtype=torch.float16, enabled=use_amp, cache_enabled=False)

    Matrix products, convolutions and attention run in the compute dtype; the sensitive operations of S4 in float32, on
    every device (`op_list="native"`: torch's list for the device). torch's cache of cast weights is off. If the policy
    computes in one dtype only, autocast is off inside. Regions nest, also with torch's. An object may be entered
    repeatedly and by several threads. It is an instance of `torch.autocast`, with its attributes.

    Args:
        policy_or_device: a policy or its spelling, in mode="autocast" without overrides, which need a module:
            `policy.autocast(module)`; or, as in torch, a device type. Without it, `dtype` and `enabled` are as in
            `torch.cuda.amp.autocast`.
        dtype_or_device: after a device type the dtype, after a policy the device type.
        enabled: False for a region with autocast off.
        cache_enabled: True for torch's weight cache; see docs/guides/torch_autocast.md for its limits.
        device_type: "cpu", "cuda", "mps", "xpu", or in torch's form any that torch has autocast for. With a policy,
            None means "cuda" if available, else "cpu".
        dtype: torch.float16 or torch.bfloat16; None for torch's default of the device. A policy has its own dtype.
        policy: the policy as a keyword argument.

    Attributes:
        policy: the policy of the region; in torch's form the policy of that dtype, None for other dtypes of torch.
        device, fast_dtype, prev, prev_fastdtype, prev_cache_enabled: as in torch; `device_type` is `device`.

    Raises:
        RegionError: neither a policy nor a device type; a policy together with a dtype; a policy with a device type
            that is not available. In torch's form the last is a warning and autocast is off, as in torch.
        UnsupportedError: a policy that needs a module.

    Example:
        >>> import torch, polyamp
        >>> x = torch.ones(2, 2)
        >>> with autocast(polyamp.Policy("mixed_bfloat16"), "cpu"):
        ...     (x @ x).dtype, (x @ x).exp().dtype
        (torch.bfloat16, torch.float32)
        >>> with autocast("cpu", dtype=torch.float16) as region:
        ...     (x @ x).dtype, torch.get_autocast_dtype("cpu"), isinstance(region, torch.autocast)
        (torch.float16, torch.float16, True)
    """

    def __init__(
        self,
        policy_or_device: Policy | str | None = None,
        dtype_or_device: torch.dtype | str | None = None,
        /,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        policy: Policy | str | None = None,
    ) -> None:
        self.policy, kind, fast, on, self._acting = parse_region_arguments(
            policy_or_device, dtype_or_device, device_type, dtype, policy, enabled=enabled
        )
        self.device_type = kind
        self._rules = region_changes(self.policy)
        if torch.compiler.is_compiling():  # the compiler traces the settings of a region only
            self.device, self.fast_dtype, self._enabled, self._cache_enabled = kind, fast, on, bool(cache_enabled)
        else:
            super().__init__(kind, dtype=fast, enabled=on, cache_enabled=bool(cache_enabled))

    @property
    def _setting(self) -> RegionSettings:
        """The region's settings, read from torch's attributes, which libraries read and write."""
        on = self._enabled
        return RegionSettings(self.device, self.fast_dtype, on, on and self._acting, self._cache_enabled, self._rules)

    @property
    def _precision(self) -> str | None:
        return None if self.policy is None else self.policy.float32_matmul

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            traced = region(self._setting, self._precision)
            traced.__enter__()
            OPEN_BLOCKS.traced.append(traced)
            return self
        close_stale_blocks()
        kind, self.prev_cache_enabled = self.device, torch.is_autocast_cache_enabled()
        self.prev, self.prev_fastdtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        block: Any = region(self._setting, self._precision)
        block.owner = weak_owner_reference(self)
        return block.__enter__(sys._getframe(1), self)  # type: ignore[no-any-return]  # it returns what it is given

    def __exit__(self, *error: Any) -> bool | None:
        if torch.compiler.is_compiling():
            return OPEN_BLOCKS.traced.pop().__exit__(*error)
        try:
            block = innermost_region(self)
            if block is not None:
                block.close(interrupted=error[0] is not None)
        except BaseException:  # an interrupt during close
            block = innermost_region(self)
            if block is not None:
                block.close(interrupted=True)
            raise
        return None

    def __call__(self, function: _Function) -> _Function:
        """Return `function` wrapped to run in the region."""
        if isinstance(function, nn.Module):
            raise UnsupportedError("autocast decorates functions. For a module use policy.autocast(module).")
        if not callable(function):
            raise RegionError(
                f"autocast(...)(function) takes a function. Received: {type(function).__qualname__}. As a block it is "
                "`with autocast(...):`."
            )
        if any(later(function) for later in _LAZY_FUNCTION_TESTS):
            raise UnsupportedError(
                f"{function.__qualname__} would run after its region is closed. Open the region inside it."
            )
        setting, precision = self._setting, self._precision

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with region(setting, precision):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


skip_compilation(autocast.__enter__, autocast.__exit__)
"""Plain Python enters a region that was created outside of a compiled function."""


def root_region(plan: ResolvedPolicy, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return the region of a resolved policy in its compute dtype; the caller handles a model's overrides and casts."""
    return region(root_settings(plan, device_type), plan.float32_matmul)


def root_settings(plan: ResolvedPolicy, device_type: str) -> RegionSettings:
    """Return the settings of `root_region`."""
    return _region_settings(plan.root, device_type, rule_changes(plan))


def region(settings: RegionSettings, float32_matmul: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a region with these settings, and the float32 matmul precision; None leaves that unchanged."""
    precision = NULL_CONTEXT if float32_matmul is None else matmul_precision(float32_matmul)
    if not torch.compiler.is_compiling():
        return AutocastRegion(settings, precision)
    if settings.enabled:
        check_traced_rules(settings.device_type, settings.rules)
    return _traced_region(settings, precision)


def place_region(
    place: ModulePrecision, device_type: str, rules: RuleChanges = ()
) -> contextlib.AbstractContextManager[None]:
    """Return the autocast region of one module's precision, with autocast off if it does not mix dtypes.

    The weight cache is off: torch keys it by the tensor alone and shares it between threads. It can return weights from
    before an optimizer step, in another dtype, or without their gradient. See docs/explanation/torch_autocast.md.
    """
    return region(_region_settings(place, device_type, rules), None)


def backward_region(plan: ResolvedPolicy, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a backward pass: regions that its hooks and custom functions open have islands."""
    return backward_islands(device_type) if plan.mixes and plan.kept else NULL_CONTEXT


def is_region_open(place: ModulePrecision, device_type: str, rules: RuleChanges) -> bool:
    """Return whether the regions open now have the settings of that module's region, whoever opened them."""
    if torch.is_autocast_enabled(device_type) is not place.mixes:
        return False
    if not place.mixes:
        return True
    if torch.get_autocast_dtype(device_type) != DTYPES[place.dtype]:
        return False
    if torch.compiler.is_compiling():
        return True
    mode, changed = current_islands(device_type), current_rules_mode(device_type)
    wanted = region_rules(place.float8, device_type, rules)
    return (mode is None or mode.acting is place.kept) and (changed is None or changed.changes == wanted)


def is_redundant(settings: RegionSettings, float32_matmul: str | None) -> bool:
    """Return whether another `region` with these arguments would change nothing. False in a traced function."""
    kind = settings.device_type
    if torch.compiler.is_compiling() or torch.is_autocast_cache_enabled():
        return False
    if float32_matmul not in (None, torch.get_float32_matmul_precision()):
        return False
    if torch.is_autocast_enabled(kind) is not settings.enabled:
        return False
    if settings.enabled:
        islands_now = current_islands(kind)
        if torch.get_autocast_dtype(kind) != settings.dtype:
            return False
        if islands_now is not None and islands_now.acting is not settings.acting:
            return False
    return (current_changes(kind) if open_mode_count() else ()) == settings.rules


def _region_settings(place: ModulePrecision, device_type: str, rules: RuleChanges) -> RegionSettings:
    dtype = DTYPES[place.dtype] if place.mixes else None
    own = region_rules(place.float8, device_type, rules)
    return RegionSettings(device_type, dtype, place.mixes, place.kept, rules=own)


@contextlib.contextmanager
def _traced_region(setting: RegionSettings, precision: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """`AutocastRegion` for a function that a compiler traces: it keeps no state that could be left open."""
    with precision:
        if not setting.enabled:
            with TorchAutocast(setting.device_type, dtype=setting.dtype, enabled=False):
                yield
            return
        with (
            TorchAutocast(setting.device_type, dtype=setting.dtype, cache_enabled=setting.cache),
            islands(setting.device_type, acting=setting.acting),
            op_rules_region(setting.device_type, setting.rules),
        ):
            yield


def carried(function: _Function) -> _Function:
    """Return `function` wrapped to run under the region that is open now, in any thread and at any time.

    torch's autocast is thread-local. The region may be polyamp's or a plain `torch.autocast`, or none.

    Example:
        >>> import threading, torch, polyamp
        >>> x, seen = torch.ones(2, 2), []
        >>> with autocast(polyamp.Policy("mixed_float16"), "cpu"):
        ...     work = carried(lambda: seen.append((x @ x).dtype))
        >>> thread = threading.Thread(target=work)
        >>> thread.start(); thread.join(); seen
        [torch.float16]
    """
    state = capture_autocast_state()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with restore_autocast_state(state):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


_FLOAT32_MATMUL: Final[ProcessSetting[str]] = ProcessSetting(
    "float32_matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
)


def matmul_precision(wanted: str | None) -> contextlib.AbstractContextManager[None]:
    """Context manager that sets torch's process-wide float32 matmul precision; None leaves it unchanged."""
    return NULL_CONTEXT if wanted is None else _FLOAT32_MATMUL.temporary_value(wanted)


def wrap_function(target: Callable[..., Any], plan: ResolvedPolicy) -> Callable[..., Any]:
    """Return a plain function wrapped to run under a resolved policy, on the device of its first tensor argument.

    Without a tensor argument it may compute on any device, so the region covers all devices of this machine.
    """
    if plan.policy.has_module_precisions:
        what = "overrides name" if plan.policy.overrides else "float8 keeps heads in 16 bits, by their"
        raise UnsupportedError(f"{what} module paths; policy.autocast needs a module for them, not a function.")
    check_op_rules(plan.policy)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = next((x.device.type for _, x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
        with contextlib.ExitStack() as regions:
            for device in device_types() if given is None else [given]:
                regions.enter_context(root_region(plan, device))
            if plan.cast:
                args, kwargs = cast_tree((args, kwargs), plan.compute, float64=plan.float64)
            OPEN_BLOCKS.functions.append((plan.policy, len(OPEN_BLOCKS.bound)))
            try:
                result = target(*args, **kwargs)
            finally:
                OPEN_BLOCKS.functions.pop()
        return cast_tree(result, plan.output, float64=plan.float64)

    return call
