"""The autocast region of a policy, for torch code of any kind (S3, S4). Modules under a policy are in `bound`.

Called by the user, the step and the backend.
"""

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
from polyamp.rules.plan import Place, Plan
from polyamp.rules.process_setting import ProcessSetting
from polyamp.trees import leaves
from polyamp_torch.arrays import DTYPES, cast_tree
from polyamp_torch.compat import NOTHING, PlainAutocast, RegionBase, never_compiled
from polyamp_torch.precision.islands import captured, current, device_types, islands, restored
from polyamp_torch.precision.region_arguments import RegionError, read
from polyamp_torch.precision.regions import OPENED, Region, Setting, innermost, owned, repair

_Function = TypeVar("_Function", bound=Callable[..., Any])


if TYPE_CHECKING:
    _Base = torch.autocast
else:
    _Base = RegionBase


_LATER: Final = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
"""Functions that return at once, and compute later."""


class autocast(_Base):  # noqa: N801  # named and used like torch.autocast
    """A region, or decorator, in which operations pick their dtype: `torch.autocast` made whole, and typed like it.

        autocast(policy)                 autocast(policy, "cpu")                 autocast("mixed_float16")
        autocast("cuda")                 autocast("cuda", torch.float16, enabled=use_amp)
        autocast(device_type="cuda", dtype=torch.float16, enabled=use_amp, cache_enabled=False)

    Matrix products, convolutions and attention run in the compute dtype; the sensitive operations of S4 in float32, on
    every device (`op_list="native"`: torch's own list for the device). torch's cache of cast weights is off. Where the
    policy computes in one dtype only, autocast is off inside. Regions nest, with torch's own too; one object may be
    entered again and again, and by several threads. It is a `torch.autocast`, with its attributes.

    Args:
        policy_or_device: a policy or its spelling, in mode="autocast" without overrides, which need a module:
            `policy.autocast(module)`; or, as in torch, a device type. Without it, `dtype` and `enabled` are as in
            `torch.cuda.amp.autocast`.
        dtype_or_device: behind a device type the dtype, behind a policy the device type.
        enabled: False for a region with autocast off.
        cache_enabled: True for torch's weight cache, with what docs/guides/torch_autocast.md says of it.
        device_type: "cpu", "cuda", "mps", "xpu", or in torch's form any that torch has autocast for. With a policy,
            None is "cuda" where there is one, else "cpu".
        dtype: torch.float16 or torch.bfloat16; None for torch's for the device. A policy has its own.
        policy: the policy by name.

    Attributes:
        policy: what the region follows; in torch's form the policy of that dtype, None for one of torch's others.
        device, fast_dtype, prev, prev_fastdtype, prev_cache_enabled: as torch has them; `device_type` is `device`.

    Raises:
        RegionError: neither a policy nor a device type, or both say the dtype; a policy and a device type that torch
            does not find here. In torch's form that is a warning, and autocast is off, as in torch.
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
        asked = read(policy_or_device, dtype_or_device, device_type, dtype, policy, enabled=enabled)
        self.policy, kind, fast, on, self._acting = asked
        self.device_type = kind
        if torch.compiler.is_compiling():  # which traces no more than what a region is made of
            self.device, self.fast_dtype, self._enabled, self._cache_enabled = kind, fast, on, bool(cache_enabled)
        else:
            super().__init__(kind, dtype=fast, enabled=on, cache_enabled=bool(cache_enabled))

    @property
    def _setting(self) -> Setting:
        """What the region sets; by torch's attributes, which libraries write as well as read."""
        on = self._enabled
        return Setting(self.device, self.fast_dtype, on, on and self._acting, self._cache_enabled)

    @property
    def _precision(self) -> str | None:
        return None if self.policy is None else self.policy.float32_matmul

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            traced = _traced(self._setting, matmul_precision(self._precision))
            traced.__enter__()
            OPENED.traced.append(traced)
            return self
        repair()
        kind, self.prev_cache_enabled = self.device, torch.is_autocast_cache_enabled()
        self.prev, self.prev_fastdtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        block = Region(self._setting, matmul_precision(self._precision))
        block.owner = owned(self)
        return block.opened_in(sys._getframe(1), self)  # type: ignore[no-any-return]  # it returns what it is given

    def __exit__(self, *error: Any) -> bool | None:
        if torch.compiler.is_compiling():
            return OPENED.traced.pop().__exit__(*error)
        try:
            block = innermost(self)
            if block is not None:
                block.close(interrupted=error[0] is not None)
        except BaseException:  # an interrupt in the midst of it
            block = innermost(self)
            if block is not None:
                block.close(interrupted=True)
            raise
        return None

    def __call__(self, function: _Function) -> _Function:
        """A function that runs in the region."""
        if isinstance(function, nn.Module):
            raise UnsupportedError("autocast decorates functions. For a module use policy.autocast(module).")
        if not callable(function):
            raise RegionError(
                f"autocast(...)(function) takes a function. Received: {type(function).__qualname__}. As a block it is "
                "`with autocast(...):`."
            )
        if any(later(function) for later in _LATER):
            raise UnsupportedError(
                f"{function.__qualname__} would run after its region is closed. Open the region inside it."
            )
        setting, precision = self._setting, self._precision

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _opened(setting, matmul_precision(precision)):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


never_compiled(autocast.__enter__, autocast.__exit__)
"""A region that was made outside of a compiled function is entered by plain Python."""


def opened(plan: Plan, device_type: str) -> contextlib.AbstractContextManager[None]:
    """The region of a plan in its compute dtype; overrides and casts of a model are its caller's."""
    return _opened(_setting(plan.root, device_type), matmul_precision(plan.float32_matmul))


def region(place: Place, device_type: str) -> contextlib.AbstractContextManager[None]:
    """`torch.autocast` as a plan has it in one place, or with autocast off where it does not mix dtypes.

    The weight cache is off: torch keys it by the tensor alone and shares it between threads, so it serves weights from
    before an optimizer step, in another dtype, or without their gradient. docs/guides/torch_autocast.md has its worth.
    """
    return _opened(_setting(place, device_type), NOTHING)


def is_open(place: Place, device_type: str) -> bool:
    """Whether what is open here and now sets what the region of that place does, whoever has opened it."""
    if torch.is_autocast_enabled(device_type) is not place.mixes:
        return False
    if not place.mixes:
        return True
    if torch.get_autocast_dtype(device_type) != DTYPES[place.dtype]:
        return False
    mode = None if torch.compiler.is_compiling() else current(device_type)
    return mode is None or mode.acting is place.kept


def _setting(place: Place, device_type: str) -> Setting:
    return Setting(device_type, DTYPES[place.dtype] if place.mixes else None, place.mixes, place.kept)


def _opened(
    setting: Setting, precision: contextlib.AbstractContextManager[None]
) -> contextlib.AbstractContextManager[None]:
    return _traced(setting, precision) if torch.compiler.is_compiling() else Region(setting, precision)


@contextlib.contextmanager
def _traced(setting: Setting, precision: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """The same for a compiler, which keeps no state that could be left behind."""
    with precision:
        if not setting.enabled:
            with PlainAutocast(setting.device_type, dtype=setting.dtype, enabled=False):
                yield
            return
        with (
            PlainAutocast(setting.device_type, dtype=setting.dtype, cache_enabled=setting.cache),
            islands(setting.device_type, acting=setting.acting),
        ):
            yield


def carried(function: _Function) -> _Function:
    """`function` as one that runs under the region open here and now, in whatever thread and whenever it is called.

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
    state = captured()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with restored(state):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


_FLOAT32_MATMUL: Final[ProcessSetting[str]] = ProcessSetting(
    "float32_matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
)


def matmul_precision(wanted: str | None) -> contextlib.AbstractContextManager[None]:
    """torch's process-wide float32 matmul precision, set for the time of a block; None leaves it alone."""
    return NOTHING if wanted is None else _FLOAT32_MATMUL.held(wanted)


def run_under(target: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """A plain function as one that runs under a plan, on the device of its first tensor argument.

    Without one it may compute on any device, so the region is opened for all that this machine has.
    """
    if plan.policy.overrides:
        raise UnsupportedError("overrides name module paths; policy.autocast needs a module for them, not a function.")

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = next((x.device.type for _, x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
        with contextlib.ExitStack() as regions:
            for device in device_types() if given is None else [given]:
                regions.enter_context(opened(plan, device))
            if plan.cast:
                args, kwargs = cast_tree((args, kwargs), plan.compute, float64=plan.float64)
            OPENED.functions.append((plan.policy, len(OPENED.bound)))
            try:
                result = target(*args, **kwargs)
            finally:
                OPENED.functions.pop()
        return cast_tree(result, plan.output, float64=plan.float64)

    return call
