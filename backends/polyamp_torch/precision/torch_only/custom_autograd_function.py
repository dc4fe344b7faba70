"""`custom_fwd` and `custom_bwd`: decorators of custom autograd functions. Backward runs under the autocast of forward.

They replace `torch.amp.custom_fwd` and `custom_bwd`, which support only functions whose `forward` gets `ctx`: with
`setup_context`, torch's write to a tensor and fail in backward. The float32 islands are restored as well.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd.function import Function, FunctionCtx

from polyamp.errors import UnsupportedError
from polyamp.trees import map_tree
from polyamp_torch.arrays import is_castable
from polyamp_torch.compat import TorchAutocast, assume_constant_result, get_custom_fwd_state, set_custom_fwd_state
from polyamp_torch.precision.torch_only.float32_islands import (
    DEVICE_TYPES,
    AutocastState,
    capture_autocast_state,
    device_types,
    restore_autocast_state,
)

_STATE_ATTRIBUTE: Final = "polyamp_autocast"
"""The attribute of `ctx` that stores the autocast state for backward."""
_OWNERS_ATTRIBUTE: Final = "polyamp_owners"
"""The attribute of a decorated `forward` that stores the functions it belongs to."""
_DTYPES_ATTRIBUTE: Final = "polyamp_saved"
"""The attribute of `ctx` that stores, per saved tensor, the dtype to cast it to, or None."""


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate `forward` of a `torch.autograd.Function`, below `@staticmethod`, with or without `setup_context`.

    Args:
        fwd: `forward(ctx, ...)`, or `forward(...)` of a function with `setup_context(ctx, inputs, output)`.
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
    kinds = _selected_device_types(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        casting = _InputCasting(capture_autocast_state(kinds), cast_inputs)
        if isinstance(args[0], FunctionCtx):
            setattr(args[0], _STATE_ATTRIBUTE, casting.inner_state)
            _store_torch_state(args[0], casting.inner_state)
            args = (casting.context(args[0]), *args[1:])
        else:
            _prepare_owners(forward)
        if not casting.casts:
            return fwd(*args, **kwargs)
        with restore_autocast_state(casting.inner_state):
            return fwd(*casting.cast(args), **casting.cast(kwargs))

    setattr(forward, _OWNERS_ATTRIBUTE, _ForwardOwners(kinds, cast_inputs))
    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorate `backward` (or `jvp`) of a `torch.autograd.Function` whose `forward` is under `custom_fwd`.

    Args:
        bwd: `backward(ctx, ...)`; it runs under the autocast state of its `forward`.
        device_type: as in torch; needed only if torch's own `custom_fwd` recorded the state.

    Raises:
        UnsupportedError: an unknown device type, or, in backward, a `forward` that is not under `custom_fwd`.
    """
    _selected_device_types(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *grads: Any) -> Any:
        state = getattr(ctx, _STATE_ATTRIBUTE, None)
        torch_state = get_custom_fwd_state(ctx) if state is None and device_type is not None else None
        if torch_state is not None and device_type is not None:  # torch's own custom_fwd
            with TorchAutocast(device_type, enabled=torch_state[0], dtype=torch_state[1]):
                return bwd(ctx, *grads)
        if state is None:
            raise UnsupportedError(
                "custom_bwd does not know the autocast state of its forward. Decorate forward with custom_fwd of "
                "polyamp_torch as well, or name the device: custom_bwd(device_type=...) knows torch's. A function with "
                "setup_context must have run once before torch.compile sees it."
            )
        with restore_autocast_state(state):
            return bwd(_CastContext(ctx, {}) if getattr(ctx, _DTYPES_ATTRIBUTE, None) else ctx, *grads)

    return backward


def _store_torch_state(ctx: Any, state: AutocastState) -> None:
    """Store the state as torch does, for one device type: the given one, else the first with autocast on."""
    for region in state.regions:
        if region.enabled or region is state.regions[-1]:
            set_custom_fwd_state(ctx, enabled=region.enabled, dtype=region.dtype)
            return


def _selected_device_types(device_type: str | None) -> tuple[str, ...]:
    if device_type is None:
        return device_types()
    if device_type not in DEVICE_TYPES:
        raise UnsupportedError(
            f"device_type must be one of {', '.join(DEVICE_TYPES)}. Received: device_type={device_type!r}."
        )
    return tuple(kind for kind in device_types() if kind == device_type)


class _InputCasting:
    """Effect of `cast_inputs` on one call.

    Attributes:
        casts: whether it casts: a dtype is given and autocast is on for a device type.
        inner_state: the autocast state of the function's body.
    """

    def __init__(self, state: AutocastState, dtype: torch.dtype | None) -> None:
        self.enabled = {region.device_type for region in state.regions if region.enabled}
        self.casts = dtype is not None and bool(self.enabled)
        self.dtype = dtype
        self.inner_state = state
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if self.casts:
            off = (region._replace(enabled=False) for region in state.regions)
            self.inner_state = state._replace(regions=tuple(off))

    def cast(self, values: Any) -> Any:
        return map_tree(self._cast_leaf, values)

    def _cast_leaf(self, value: Any) -> Any:
        if not is_castable(value, float64=False) or value.device.type not in self.enabled:
            return value
        wanted = value.to(self.dtype)
        self.originals[id(wanted)] = (wanted, value)
        return wanted

    def context(self, ctx: Any) -> Any:
        return _CastContext(ctx, self.originals) if self.casts else ctx


class _CastContext:
    """Wrapper of `ctx` that saves the original inputs in place of their casts, and casts them again in backward.

    Casts that were made in `forward` have no autograd history, so a second derivative would not reach the inputs.
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
        setattr(self.polyamp_ctx, _DTYPES_ATTRIBUTE, tuple(None if pair is None else pair[0].dtype for pair in found))
        originals = (tensor if pair is None else pair[1] for tensor, pair in zip(tensors, found, strict=True))
        self.polyamp_ctx.save_for_backward(*originals)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        dtypes = getattr(self.polyamp_ctx, _DTYPES_ATTRIBUTE)
        pairs = zip(self.polyamp_ctx.saved_tensors, dtypes, strict=True)
        return tuple(tensor if dtype is None else tensor.to(dtype) for tensor, dtype in pairs)


class _ForwardOwners:
    """The functions with `setup_context` that share a `forward`. Their `setup_context` gets `ctx` and stores the state.

    When `forward` is decorated, its functions are not known yet. They are searched when it runs, before their
    `setup_context`.
    """

    def __init__(self, kinds: tuple[str, ...], cast_inputs: torch.dtype | None) -> None:
        self.kinds = kinds
        self.cast_inputs = cast_inputs
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def prepare(self, forward: Any) -> None:
        """Find owners and prepare them; after the first call, search only subclasses of known owners."""
        for function in _subclasses(tuple(self.known) or (Function,)):
            if function not in self.known and function.forward is forward:
                self.known.add(function)
                if "setup_context" in function.__dict__ or not getattr(function.setup_context, _STATE_ATTRIBUTE, False):
                    function.setup_context = staticmethod(self._record_state(function.setup_context))

    def _record_state(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        kinds, cast_inputs = self.kinds, self.cast_inputs

        @functools.wraps(setup)
        def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
            casting = _InputCasting(capture_autocast_state(kinds), cast_inputs)
            setattr(ctx, _STATE_ATTRIBUTE, casting.inner_state)
            return setup(casting.context(ctx), casting.cast(inputs) if casting.casts else inputs, output)

        setattr(setup_context, _STATE_ATTRIBUTE, True)
        return setup_context


@assume_constant_result
def _prepare_owners(forward: Any) -> None:
    """Prepare the owners on every call; in a compiled function at trace time."""
    getattr(forward, _OWNERS_ATTRIBUTE).prepare(forward)


def _subclasses(functions: tuple[Any, ...]) -> Iterator[Any]:
    for function in functions:
        yield from _subclasses(tuple(function.__subclasses__()))
        if function is not Function:
            yield function
