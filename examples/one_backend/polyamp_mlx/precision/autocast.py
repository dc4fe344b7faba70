"""Autocast per operation for MLX, which has none: wrappers replace its functions and cast inside a region.

MLX's functions are attributes of its modules and are looked up at each call, by `mlx.nn` too, so a wrapper in a
function's place sees every call. Outside a region, and in other threads, it only calls the function. Functions that
were imported before (`from mlx.core import exp`) are not wrapped.
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

from polyamp.recipe.resolved_policy import ModulePrecision
from polyamp.rules.process_setting import ProcessSetting, SettingBlock
from polyamp.trees import map_tree
from polyamp_mlx.arrays import DTYPES
from polyamp_mlx.precision.op_list import FAMILIES, GATHERS, PRODUCTS

_CURRENT_PRECISION: Final[ContextVar[ModulePrecision | None]] = ContextVar("polyamp_mlx place", default=None)
_COMPILE: Final = ProcessSetting(
    "MLX's compilation",
    lambda: "MLX_DISABLE_COMPILE" not in os.environ,
    lambda on: mx.enable_compile() if on else mx.disable_compile(),
)
Function = Callable[..., Any]


@contextlib.contextmanager
def precision_region(place: ModulePrecision | None) -> Iterator[None]:
    """Run operations of a block in the dtypes of `place`; None disables autocast."""
    install()
    token = _CURRENT_PRECISION.set(place if place is not None and place.mixes else None)
    try:
        yield
    finally:
        _CURRENT_PRECISION.reset(token)


def disable_compilation() -> SettingBlock:
    """Return a context manager in which `mx.compile` returns the plain function.

    A program that MLX traced outside a region, such as those of `mlx.nn`'s activations, ignores the region's dtypes.
    """
    return _COMPILE.temporary_value(False)


@functools.cache
def install() -> None:
    """Install the wrappers, once per process, before the first region."""
    for names in FAMILIES.values():
        _wrap_functions(names, _wrap_sensitive)
    _wrap_functions(PRODUCTS, _wrap_product)
    _wrap_functions(GATHERS, _wrap_gather)
    for name, rule in (("__pow__", _wrap_sensitive), ("__rpow__", _wrap_sensitive), ("__matmul__", _wrap_product)):
        setattr(mx.array, name, rule(getattr(mx.array, name), name))
    mx.array.__getitem__ = _wrap_gather(mx.array.__getitem__, "__getitem__")


def _wrap_functions(names: str, rule: Callable[[Function, str], Function]) -> None:
    for name in names.split():
        module, _, short = name.rpartition(".")
        home = nn.losses if module == "nn.losses" else getattr(mx, module) if module else mx
        for owner in (home, mx.array) if home is mx else (home,):
            if hasattr(owner, short):
                setattr(owner, short, rule(getattr(owner, short), short))


def _wrap_sensitive(function: Function, name: str) -> Function:
    """Wrap a function to run in float32 (S4)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = _CURRENT_PRECISION.get()
        if place is None or not place.kept:
            return function(*args, **kwargs)
        return function(*_cast(args, mx.float32), **_cast(kwargs, mx.float32))

    return call


def _wrap_product(function: Function, name: str) -> Function:
    """Wrap a product to run in the compute dtype; in float32 without free axes, uncast without a contraction."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = _CURRENT_PRECISION.get()
        if place is None:
            return function(*args, **kwargs)
        contracts, free = _product_axes(name, args)
        if not contracts:
            return function(*args, **kwargs)
        dtype = DTYPES[place.dtype] if free or not place.kept else mx.float32
        return function(*_cast(args, dtype), **_cast(kwargs, dtype))

    return call


def _wrap_gather(function: Function, name: str) -> Function:
    """Wrap a gather to run through float32 and back, so that gradients of repeated rows are summed in float32."""

    @functools.wraps(function)
    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        narrow = isinstance(array, mx.array) and array.dtype in (mx.float16, mx.bfloat16)
        if _CURRENT_PRECISION.get() is None or not narrow or (name == "__getitem__" and not _may_repeat_rows(args[0])):
            return function(array, *args, **kwargs)
        return function(array.astype(mx.float32), *args, **kwargs).astype(array.dtype)

    return call


def _may_repeat_rows(index: Any) -> bool:
    """Return whether an index may repeat a row: slices and numbers do not."""
    return any(isinstance(part, (mx.array, list)) for part in (index if isinstance(index, tuple) else (index,)))


def _cast(tree: Any, dtype: mx.Dtype) -> Any:
    """Cast real floating arrays to `dtype`; float64 and Python numbers are unchanged."""
    floats = (mx.float16, mx.bfloat16, mx.float32)
    return map_tree(lambda x: x.astype(dtype) if isinstance(x, mx.array) and x.dtype in floats else x, tree)


def _product_axes(name: str, args: tuple[Any, ...]) -> tuple[bool, bool]:
    """Return whether a product contracts anything, and whether an operand has an axis that the other lacks."""
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
