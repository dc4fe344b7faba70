"""Float32 islands: inside autocast, the sensitive functions of `op_list` run in float32 (S4).

`Islands` is a `torch.overrides.TorchFunctionMode`. It acts only while autocast is enabled on its device type, so any
region with `enabled=False` ends it. `Captured` is the state of autocast with its islands, to be opened again
elsewhere. Called by `autocast`, `bound` and `custom_function`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from polyamp_torch.compat import NOTHING, PlainAutocast, backward_as_eager, open_modes
from polyamp_torch.precision import recomputation
from polyamp_torch.precision.gathers import gathered, source
from polyamp_torch.precision.op_list import BACKWARD, ENTERED, Rule, cuda_rule, rule, without_dispatch
from polyamp_torch.precision.products import classified, plain

_AVAILABLE: Final[dict[str, Callable[[], bool]]] = {
    "cpu": lambda: True,
    "cuda": lambda: torch.cuda.is_available(),
    "mps": lambda: torch.backends.mps.is_available(),
    "xpu": lambda: torch.xpu.is_available(),
}
DEVICE_TYPES: Final = tuple(_AVAILABLE)
_NARROW: Final = (torch.float16, torch.bfloat16)
_CAST: Final = {torch.float16, torch.bfloat16, torch.float32}
"""The dtypes that autocast casts from and to."""
_SEQUENCES: Final = (list, tuple)  # torch 2.7 cannot compile `list | tuple` in isinstance()
_METHODS: Final = ("forward", "setup_context", "vmap", "jvp")
"""What runs in the forward pass of a `torch.autograd.Function`."""


class Islands(TorchFunctionMode):
    """Runs the sensitive functions on one device type's tensors in float32 while autocast is enabled there.

    Attributes:
        device_type: "cpu", "cuda", ...
        acting: False while a region with torch's own op list is open inside.
        closed: whether its block has ended. torch puts a mode aside while it handles a function, and one that is
            interrupted there comes back to the stack later than its block ends; then it does nothing.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.acting = True
        self.closed = False
        self.rule_of = cuda_rule if device_type == "cuda" else rule

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function passes here, and most go straight on."""
        found = self.rule_of(func)
        if found is not None and not (found == "matmul" and plain(args)):
            return self._ruled(found, func, types, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _ruled(self, found: Rule, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        compiling = torch.compiler.is_compiling()
        if found not in ("widen", "statistics", "isolate", "lstm", "matmul", "product", "gather"):
            return self._seen_through(found, func, types, args, kwargs, compiling=compiling)
        if not self.acting or not torch.is_autocast_enabled(self.device_type):
            return func(*args, **kwargs)
        if found in ("matmul", "product"):
            return self._product(func, args, kwargs, compiling=compiling)
        if found == "gather":
            narrow = source(func, args, kwargs)
            if narrow is None or narrow.device.type != self.device_type:
                return func(*args, **kwargs)
            if not compiling:
                recomputation.carry(self._key, self._again)
            return gathered(func, args, kwargs, narrow)
        if found == "lstm" and (self.device_type != "cpu" or torch.get_autocast_dtype("cpu") != torch.float16):
            return func(*args, **kwargs)
        if found == "statistics" and _has_float32(args, kwargs):
            return func(*args, **kwargs)
        if not compiling:
            recomputation.carry(self._key, self._again)
        if _chooses_dtype(kwargs):
            return func(*args, **kwargs)
        args = [self._wide(value) for value in args]
        kwargs = {name: self._wide(value) for name, value in kwargs.items()}
        if found in ("isolate", "lstm"):
            with PlainAutocast(self.device_type, enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, args: Any, kwargs: dict[str, Any], *, compiling: bool) -> Any:
        """An inner product in float32, a multiplication in its operands' dtype, a matrix product as autocast has it."""
        kind = None if _chooses_dtype(kwargs) else classified(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        operands = _tensors((*args, *kwargs.values()))
        dtypes = {operand.dtype for operand in operands}
        if not dtypes <= _CAST or any(operand.device.type != self.device_type for operand in operands):
            return func(*args, **kwargs)
        if not compiling:
            recomputation.carry(self._key, self._again)
        wanted = torch.float32 if kind == "sum" or len(dtypes) > 1 else next(iter(dtypes))
        with PlainAutocast(self.device_type, enabled=False):
            return func(
                *[_cast(value, wanted) for value in args],
                **{name: _cast(value, wanted) for name, value in kwargs.items()},
            )

    def _seen_through(
        self, found: Rule, func: Any, types: Any, args: Any, kwargs: dict[str, Any], *, compiling: bool
    ) -> Any:
        """A function that is not sensitive itself, but calls what is."""
        if found == "unflatten":
            return torch.unflatten(*args, **kwargs)
        if found == "grad_mode" and self.acting and not compiling and args == (False,):
            recomputation.carry_into_reentrant(self._key, self._again)
        if found == "function" and not compiling:
            return func(self._entered(args[0]), *args[1:], **kwargs)
        plain = all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types)  # other subclasses have their own say
        if found == "enter" and plain and not (compiling and func in BACKWARD):
            # A new copy each time, because libraries put functions of their own into torch's modules.
            body = ENTERED[func] if compiling else without_dispatch(func)
            with self:
                return body(*args, **kwargs)
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            narrow = value.dtype in _NARROW and value.device.type == self.device_type
            return value.float() if narrow else value
        if isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):  # an LSTM's weights
            return [self._wide(item) for item in value]
        return value

    def _entered(self, function: Any) -> Any:
        """A custom autograd function like `function` whose methods run under the islands.

        `torch.func` hands it to the mode as a whole, and with the mode set aside its methods would not be seen.
        """

        def under(name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return getattr(function, name)(*args, **kwargs)

            return staticmethod(call)

        own = [name for name in _METHODS if getattr(function, name) is not getattr(torch.autograd.Function, name)]
        return type(function.__name__, (function,), {name: under(name) for name in own})

    @property
    def _key(self) -> tuple[str, str]:
        return ("islands", self.device_type)

    def _again(self) -> contextlib.AbstractContextManager[None]:
        return islands(self.device_type)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor):  # einsum's, as a list
            found.extend(value)
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, _SEQUENCES) and value and isinstance(value[0], torch.Tensor | list | tuple):
        return [_cast(item, dtype) for item in value]
    return value


def _has_float32(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in (*args, *kwargs.values()))


def _chooses_dtype(kwargs: dict[str, Any]) -> bool:
    """True for a call that names the dtype of its result, or the tensor to put it in.

    A dtype by position needs no notice: the functions that take one so cast to it, and widening first changes no bit.
    """
    return kwargs.get("dtype") is not None or kwargs.get("out") is not None


def current(device_type: str) -> Islands | None:
    """The islands of a device type that are open in this thread."""
    for mode in open_modes():
        if isinstance(mode, Islands) and mode.device_type == device_type and not mode.closed:
            return mode
    return None


@contextlib.contextmanager
def islands(device_type: str, *, acting: bool = True) -> Iterator[None]:
    """A block in which the islands of a device type act, or, with `acting=False`, do not."""
    mode = current(device_type)
    if mode is None and acting:
        with Islands(device_type):
            yield
    elif mode is None or mode.acting is acting:
        yield
    else:
        mode.acting = acting
        try:
            yield
        finally:
            mode.acting = not acting


class Region(NamedTuple):
    """Autocast's state on one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    islands: bool


class Captured(NamedTuple):
    """Autocast's state in one thread at one moment.

    Attributes:
        regions: the state on each device type that this machine has.
        cache: whether torch's weight cache is on.
        ours: whether islands act anywhere, so that the region is polyamp's.
    """

    regions: tuple[Region, ...]
    cache: bool
    ours: bool


@functools.cache
def device_types() -> tuple[str, ...]:
    """The device types of this machine."""
    return tuple(kind for kind, available in _AVAILABLE.items() if available())


def captured(kinds: tuple[str, ...] | None = None) -> Captured:
    """The state that is open in the calling thread, on all device types or some."""
    regions = []
    for kind in device_types() if kinds is None else kinds:
        mode = current(kind)
        acting = mode is not None and mode.acting
        regions.append(Region(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), acting))
    return Captured(tuple(regions), torch.is_autocast_cache_enabled(), any(region.islands for region in regions))


@contextlib.contextmanager
def restored(state: Captured) -> Iterator[None]:
    """A block under a captured state, in any thread."""
    if not state.regions:
        with backward_as_eager() if state.ours else NOTHING:
            yield
        return
    first, *others = state.regions
    with (
        PlainAutocast(first.device_type, dtype=first.dtype, enabled=first.enabled, cache_enabled=state.cache),
        islands(first.device_type, acting=first.islands),
        restored(state._replace(regions=tuple(others))),
    ):
        yield
