"""`custom_fwd` and `custom_bwd`: custom autograd functions whose backward runs under the autocast of their forward.

They take the place of `torch.amp.custom_fwd` and `custom_bwd`, which know only functions whose `forward` gets `ctx`:
with `setup_context` theirs write to a tensor, and fail in backward. The float32 islands are restored as well.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd.function import Function, FunctionCtx

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import PlainAutocast, constant_when_compiled, tell_custom_bwd, told_by_custom_fwd
from polyamp_torch.precision.islands import DEVICE_TYPES, Captured, captured, device_types, restored

_STATE: Final = "polyamp_autocast"
"""The attribute of `ctx` that holds the state for backward."""
_OWNERS: Final = "polyamp_owners"
"""The attribute of a decorated `forward` that knows whose it is."""
_SAVED: Final = "polyamp_saved"
"""The attribute of `ctx` that holds, per saved tensor, the dtype that it is to be cast to, or None."""


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorates `forward` of a `torch.autograd.Function`, below `@staticmethod`, with or without `setup_context`.

    Args:
        fwd: `forward(ctx, ...)`, or `forward(...)` beside a `setup_context(ctx, inputs, output)`.
        device_type: the device type whose autocast state counts; None for all.
        cast_inputs: where autocast is enabled, cast floating tensors except float64 to this dtype, and run `forward`
            and `backward` with autocast off. Outside autocast it does nothing.

    Raises:
        UnsupportedError: an unknown device type.

    Example:
        >>> import torch
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(cast_inputs=torch.float32)
        ...     def forward(x):
        ...         return x * x
        ...     @staticmethod
        ...     def setup_context(ctx, inputs, output):
        ...         ctx.save_for_backward(*inputs)
        ...     @staticmethod
        ...     @custom_bwd
        ...     def backward(ctx, grad):
        ...         return 2 * grad * ctx.saved_tensors[0].to(grad.dtype)
        >>> x = torch.full((1,), 3.0, requires_grad=True)
        >>> Square.apply(x).backward(); x.grad
        tensor([6.])
    """
    kinds = _kinds(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        casting = _Casting(captured(kinds), cast_inputs)
        if isinstance(args[0], FunctionCtx):
            setattr(args[0], _STATE, casting.inside)
            _tell_torch(args[0], casting.inside)
            args = (casting.context(args[0]), *args[1:])
        else:
            _prepare(forward)
        if not casting.casts:
            return fwd(*args, **kwargs)
        with restored(casting.inside):
            return fwd(*casting.cast(args), **casting.cast(kwargs))

    setattr(forward, _OWNERS, _Owners(kinds, cast_inputs))
    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorates `backward` (or `jvp`) of a `torch.autograd.Function` whose `forward` is under `custom_fwd`.

    Args:
        bwd: `backward(ctx, ...)`; it runs under the autocast state that its `forward` ran under.
        device_type: as torch's; the state is the one that `custom_fwd` noted, and only torch's needs to be told whose.

    Raises:
        UnsupportedError: an unknown device type, or, in backward, a `forward` that is not under `custom_fwd`.
    """
    _kinds(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *grads: Any) -> Any:
        state = getattr(ctx, _STATE, None)
        told = told_by_custom_fwd(ctx) if state is None and device_type is not None else None
        if told is not None and device_type is not None:  # torch's own custom_fwd
            with PlainAutocast(device_type, enabled=told[0], dtype=told[1]):
                return bwd(ctx, *grads)
        if state is None:
            raise UnsupportedError(
                "custom_bwd does not know the autocast state of its forward. Decorate forward with custom_fwd of "
                "polyamp_torch as well, or name the device: custom_bwd(device_type=...) knows torch's. A function with "
                "setup_context must have run once before torch.compile sees it."
            )
        with restored(state):
            return bwd(_CastContext(ctx, {}) if getattr(ctx, _SAVED, None) else ctx, *grads)

    return backward


def _tell_torch(ctx: Any, state: Captured) -> None:
    """torch notes one device type: the one named, else the first where autocast is on."""
    for region in state.regions:
        if region.enabled or region is state.regions[-1]:
            tell_custom_bwd(ctx, enabled=region.enabled, dtype=region.dtype)
            return


def _kinds(device_type: str | None) -> tuple[str, ...]:
    if device_type is None:
        return device_types()
    if device_type not in DEVICE_TYPES:
        raise UnsupportedError(
            f"device_type must be one of {', '.join(DEVICE_TYPES)}. Received: device_type={device_type!r}."
        )
    return tuple(kind for kind in device_types() if kind == device_type)


class _Casting:
    """What `cast_inputs` does to one call.

    Attributes:
        casts: whether it does anything: autocast is on somewhere.
        inside: the autocast state of the function's body.
    """

    def __init__(self, state: Captured, dtype: torch.dtype | None) -> None:
        self.enabled = {region.device_type for region in state.regions if region.enabled}
        self.casts = dtype is not None and bool(self.enabled)
        self.dtype = dtype
        self.inside = state
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if self.casts:
            off = (region._replace(enabled=False) for region in state.regions)
            self.inside = state._replace(regions=tuple(off))

    def cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            narrowed = value.is_floating_point() and value.dtype != torch.float64 and value.device.type in self.enabled
            return self._cast_tensor(value) if narrowed else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.cast, value))
        if isinstance(value, list | tuple):
            return type(value)([self.cast(item) for item in value])
        if isinstance(value, dict):
            return {name: self.cast(item) for name, item in value.items()}
        return value

    def _cast_tensor(self, value: torch.Tensor) -> torch.Tensor:
        wanted = value.to(self.dtype)
        self.originals[id(wanted)] = (wanted, value)
        return wanted

    def context(self, ctx: Any) -> Any:
        return _CastContext(ctx, self.originals) if self.casts else ctx


class _CastContext:
    """A ctx that saves the inputs themselves where it is given their casts, and casts them again in backward.

    Casts that were made in `forward` have no history, so a second derivative would not reach the inputs.
    """

    def __init__(self, ctx: Any, originals: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.__dict__["polyamp_ctx"] = ctx
        self.__dict__["polyamp_originals"] = originals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.polyamp_ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.polyamp_ctx, name, value)

    def save_for_backward(self, *tensors: Any) -> None:
        found = [self.polyamp_originals.get(id(tensor)) for tensor in tensors]
        setattr(self.polyamp_ctx, _SAVED, tuple(None if pair is None else pair[0].dtype for pair in found))
        originals = (tensor if pair is None else pair[1] for tensor, pair in zip(tensors, found, strict=True))
        self.polyamp_ctx.save_for_backward(*originals)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        dtypes = getattr(self.polyamp_ctx, _SAVED)
        pairs = zip(self.polyamp_ctx.saved_tensors, dtypes, strict=True)
        return tuple(tensor if dtype is None else tensor.to(dtype) for tensor, dtype in pairs)


class _Owners:
    """The functions with `setup_context` that share a `forward`; theirs note the state, because theirs get the ctx.

    A `forward` without ctx does not know whose it is when it is decorated, so its owners are looked for when it runs,
    which is before their `setup_context` does.
    """

    def __init__(self, kinds: tuple[str, ...], cast_inputs: torch.dtype | None) -> None:
        self.kinds = kinds
        self.cast_inputs = cast_inputs
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def prepare(self, forward: Any) -> None:
        """Find owners and prepare them; after the first time, only subclasses of those that are known."""
        for function in _subclasses(tuple(self.known) or (Function,)):
            if function not in self.known and function.forward is forward:
                self.known.add(function)
                if "setup_context" in function.__dict__ or not getattr(function.setup_context, _STATE, False):
                    function.setup_context = staticmethod(self._noting(function.setup_context))

    def _noting(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        kinds, cast_inputs = self.kinds, self.cast_inputs

        @functools.wraps(setup)
        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            casting = _Casting(captured(kinds), cast_inputs)
            setattr(ctx, _STATE, casting.inside)
            return setup(casting.context(ctx), casting.cast(inputs) if casting.casts else inputs, output)

        setattr(setup_context, _STATE, True)
        return setup_context


@constant_when_compiled
def _prepare(forward: Any) -> None:
    """Once per call; in a compiled function while it is traced."""
    getattr(forward, _OWNERS).prepare(forward)


def _subclasses(functions: tuple[Any, ...]) -> Iterator[Any]:
    for function in functions:
        yield from _subclasses(tuple(function.__subclasses__()))
        if function is not Function:
            yield function
