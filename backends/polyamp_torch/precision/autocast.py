"""The autocast region of a policy, for torch code of any kind (S3, S4). Modules under a policy are in `bound`.

Called by the user, the step and the backend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Place, Plan, place_of
from polyamp.rules.process_setting import ProcessSetting
from polyamp.trees import leaves
from polyamp_torch.arrays import DTYPES, cast_tree
from polyamp_torch.compat import NOTHING
from polyamp_torch.precision.islands import DEVICE_TYPES, captured, device_types, islands, restored
from polyamp_torch.precision.regions import OPENED, Region, innermost, owned, repair

_Function = TypeVar("_Function", bound=Callable[..., Any])


class autocast:  # noqa: N801  # named and used like torch.autocast
    """A region, or decorator, in which operations pick their dtype by the policy: `torch.autocast` made whole.

    Matrix products, convolutions and attention run in the policy's compute dtype; the sensitive operations of S4 in
    float32, on every device (`op_list="native"`: torch's own list for the device). torch's cache of cast weights is
    off. Where the policy computes in one dtype only, autocast is off inside. Regions nest; one object may be entered
    again and again, and by several threads.

    Args:
        policy: a policy in mode="autocast" without overrides, which need a module: `policy.autocast(module)`.
        device_type: "cpu", "cuda", "mps" or "xpu"; None for "cuda" where there is one, else "cpu".

    Raises:
        UnsupportedError: a device type that is unknown or missing, or a policy that needs a module.

    Example:
        >>> import torch, polyamp
        >>> x = torch.ones(2, 2)
        >>> with autocast(polyamp.Policy("mixed_bfloat16"), "cpu"):
        ...     (x @ x).dtype, (x @ x).exp().dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, policy: Policy, device_type: str | None = None) -> None:
        if device_type is None:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if device_type not in DEVICE_TYPES:
            raise UnsupportedError(
                f"device_type must be one of {', '.join(DEVICE_TYPES)}. Received: device_type={device_type!r}."
            )
        if device_type != "cpu" and device_type not in device_types():
            raise UnsupportedError(
                f"device_type={device_type!r}: torch finds no such device here. It finds: {', '.join(device_types())}."
            )
        if not OPENED.bound and (len(policy.overrides) or policy.mode == "cast"):
            what = "overrides name module paths" if len(policy.overrides) else "mode='cast' casts a model's parameters"
            raise UnsupportedError(f"{what}, and a region knows no model. Use policy.autocast(model).")
        self.policy = policy
        self.device_type = device_type
        self._place = _place_of(policy)

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            traced = _traced(self._place, self.device_type, matmul_precision(self.policy.float32_matmul))
            traced.__enter__()
            OPENED.traced.append(traced)
            return
        repair()
        block = _block(self._place, self.device_type, matmul_precision(self.policy.float32_matmul))
        block.owner = owned(self)
        block.opened_in(sys._getframe(1))

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
            raise UnsupportedError("autocast(policy) decorates functions. For a module use policy.autocast(module).")
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise UnsupportedError(
                f"{function.__qualname__} would run after its region is closed. Open the region inside it."
            )
        place, precision, device_type = self._place, self.policy.float32_matmul, self.device_type

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _opened(place, device_type, matmul_precision(precision)):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # wraps() keeps the signature, which mypy cannot see


def opened(plan: Plan, device_type: str) -> contextlib.AbstractContextManager[None]:
    """The region of a plan in its compute dtype; overrides and casts of a model are its caller's."""
    return _opened(plan.root, device_type, matmul_precision(plan.float32_matmul))


def region(place: Place, device_type: str) -> contextlib.AbstractContextManager[None]:
    """`torch.autocast` as a plan has it in one place, or with autocast off where it does not mix dtypes.

    The weight cache is off: torch keys it by the tensor alone and shares it between threads, so it serves weights from
    before an optimizer step, in another dtype, or without their gradient. docs/guides/torch_autocast.md has its worth.
    """
    return _opened(place, device_type, NOTHING)


def _opened(
    place: Place, device_type: str, precision: contextlib.AbstractContextManager[None]
) -> contextlib.AbstractContextManager[None]:
    if torch.compiler.is_compiling():
        return _traced(place, device_type, precision)
    return _block(place, device_type, precision)


def _block(place: Place, device_type: str, precision: contextlib.AbstractContextManager[None]) -> Region:
    return Region(device_type, DTYPES[place.dtype] if place.mixes else None, precision, acting=place.kept)


@contextlib.contextmanager
def _traced(place: Place, device_type: str, precision: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """The same for a compiler, which keeps no state that could be left behind."""
    with precision:
        if not place.mixes:
            with torch.autocast(device_type, enabled=False):
                yield
            return
        with (
            torch.autocast(device_type, dtype=DTYPES[place.dtype], cache_enabled=False),
            islands(device_type, acting=place.kept),
        ):
            yield


def _place_of(policy: Policy) -> Place:
    """What a policy says where no override holds. A compiler traces the rule, also of a policy that is made in what it
    compiles; elsewhere the answer is kept."""
    return place_of(policy, None) if torch.compiler.is_compiling() else _root(policy)


@functools.lru_cache(maxsize=64)
def _root(policy: Policy) -> Place:
    return place_of(policy, None)


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
            result = target(*args, **kwargs)
        return cast_tree(result, plan.output, float64=plan.float64)

    return call
