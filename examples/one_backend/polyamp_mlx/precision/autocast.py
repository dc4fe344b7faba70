"""Autocast, operation by operation: MLX has none, so its functions are wrapped, once, in what looks at a region first.

MLX's functions are attributes of its modules and are looked up when they are called, by `mlx.nn` too; so a wrapper that
stands in a function's place sees every call. Outside of a region, and in other threads, it calls the function and does
nothing else. Functions that somebody took out before (`from mlx.core import exp`) are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from polyamp.rules.plan import Place
from polyamp.rules.process_setting import Block, ProcessSetting
from polyamp.trees import map_tree
from polyamp_mlx.arrays import DTYPES
from polyamp_mlx.precision.op_list import FAMILIES, GATHERS, PRODUCTS

_PLACE: Final[ContextVar[Place | None]] = ContextVar("polyamp_mlx place", default=None)
_COMPILE: Final = ProcessSetting(
    "MLX's compilation",
    lambda: "MLX_DISABLE_COMPILE" not in os.environ,
    lambda on: mx.enable_compile() if on else mx.disable_compile(),
)
Function = Callable[..., Any]


@contextlib.contextmanager
def region(place: Place | None) -> Iterator[None]:
    """A block in which operations pick their dtypes as `place` says; None switches autocast off."""
    install()
    token = _PLACE.set(place if place is not None and place.mixes else None)
    try:
        yield
    finally:
        _PLACE.reset(token)


def uncompiled() -> Block:
    """A block in which `mx.compile` gives the plain function: a program that MLX traced outside of a region, as those
    of `mlx.nn`'s activations are, has other dtypes than the region asks for."""
    return _COMPILE.held(False)


@functools.cache
def install() -> None:
    """Put the wrappers in place, once in a process, before the first region."""
    for names in FAMILIES.values():
        _wrap(names, _sensitive)
    _wrap(PRODUCTS, _product)
    _wrap(GATHERS, _gather)
    for name, rule in (("__pow__", _sensitive), ("__rpow__", _sensitive), ("__matmul__", _product)):
        setattr(mx.array, name, rule(getattr(mx.array, name), name))
    mx.array.__getitem__ = _gather(mx.array.__getitem__, "__getitem__")


def _wrap(names: str, rule: Callable[[Function, str], Function]) -> None:
    for name in names.split():
        module, _, short = name.rpartition(".")
        home = nn.losses if module == "nn.losses" else getattr(mx, module) if module else mx
        for owner in (home, mx.array) if home is mx else (home,):
            if hasattr(owner, short):
                setattr(owner, short, rule(getattr(owner, short), short))


def _sensitive(function: Function, name: str) -> Function:
    """S4: in float32."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = _PLACE.get()
        if place is None or not place.kept:
            return function(*args, **kwargs)
        return function(*_cast(args, mx.float32), **_cast(kwargs, mx.float32))

    return call


def _product(function: Function, name: str) -> Function:
    """In the compute dtype; a sum in float32, and what contracts nothing as it comes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = _PLACE.get()
        if place is None:
            return function(*args, **kwargs)
        contracts, free = _axes(name, args)
        if not contracts:
            return function(*args, **kwargs)
        dtype = DTYPES[place.dtype] if free or not place.kept else mx.float32
        return function(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _gather(function: Function, name: str) -> Function:
    """Through float32 and back, so that the gradient of what is read twice is added up in float32."""

    @functools.wraps(function)
    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = isinstance(array, mx.array) and array.dtype in (mx.float16, mx.bfloat16)
        if _PLACE.get() is None or not narrow or (name == "__getitem__" and not _computed(args[0])):
            return function(array, *args, **kwargs)
        return function(array.astype(mx.float32), *args, **kwargs).astype(array.dtype)

    return call


def _computed(index: Any) -> bool:
    """Whether an index may name a row twice: slices and numbers do not."""
    return any(isinstance(part, (mx.array, list)) for part in (index if isinstance(index, tuple) else (index,)))


def _cast(tree: Any, dtype: mx.Dtype) -> Any:
    """Real floating arrays in `dtype`; float64 stays, and Python's numbers follow what they meet."""
    floats = (mx.float16, mx.bfloat16, mx.float32)
    return map_tree(lambda x: x.astype(dtype) if isinstance(x, mx.array) and x.dtype in floats else x, tree)


def _axes(name: str, args: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a product contracts anything, and whether an operand has an axis that the other has not."""
    if name in ("matmul", "__matmul__"):
        left, right = args[:2]
        return left.shape[-1] > 1, left.ndim > 1 or right.ndim > 1
    if name == "inner":
        return args[0].shape[-1:] != (1,), args[0].ndim > 1 or args[1].ndim > 1
    if name == "einsum":
        return _einsum_axes(*args)
    return True, True


def _einsum_axes(subscripts: str, *operands: Any) -> tuple[bool, bool]:
    inputs, arrow, output = subscripts.replace(" ", "").replace("...", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1)
    sizes = {
        letter: size
        for term, operand in zip(terms, operands, strict=True)
        for letter, size in zip(reversed(term), reversed(operand.shape), strict=False)
    }
    contracts = any(size > 1 and letter not in output for letter, size in sizes.items())
    return contracts, any(sum(letter in term for term in terms) == 1 for letter in output)
