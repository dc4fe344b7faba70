"""Tensor lists that behave like one array, so that multi-tensor kernels run an optimizer formula over all parameters.

Used for the specs for which torch has no kernel that accepts the finite flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from polyamp.array_namespace import ArrayNamespace
from polyamp_torch.compat import (
    foreach_add,
    foreach_cos,
    foreach_div,
    foreach_expm1,
    foreach_floor,
    foreach_maximum,
    foreach_minimum,
    foreach_mul,
    foreach_neg,
    foreach_pow,
    foreach_sign,
    foreach_sqrt,
    foreach_sub,
)

Operand = Any
"""`TensorList`, a number, or a 0-dim tensor on the device of the lists."""


class TensorList:
    """List of tensors of one device and dtype with the operations of the formulas; each operation makes new tensors.

    >>> import torch
    >>> pair = TensorList([torch.ones(2), torch.ones(3)])
    >>> (1.0 - pair * 0.25).tensors[1]
    tensor([0.7500, 0.7500, 0.7500])
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __add__(self, other: Operand) -> TensorList:
        if isinstance(other, torch.Tensor):  # without alpha torch reads the tensor on the host
            return TensorList(list(foreach_add(self.tensors, other, alpha=1.0)))
        return _apply_foreach(foreach_add, self, other)

    def __sub__(self, other: Operand) -> TensorList:
        if isinstance(other, torch.Tensor):
            return self.__add__(torch.neg(other))
        return _apply_foreach(foreach_sub, self, other)

    def __mul__(self, other: Operand) -> TensorList:
        return _apply_foreach(foreach_mul, self, other)

    def __truediv__(self, other: Operand) -> TensorList:
        return _apply_foreach(foreach_div, self, other)

    def __rtruediv__(self, other: Operand) -> TensorList:
        return TensorList([other / tensor for tensor in self.tensors])

    def __neg__(self) -> TensorList:
        return TensorList(list(foreach_neg(self.tensors)))

    def __rsub__(self, other: Operand) -> TensorList:
        return self.__neg__().__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__


class TensorListNamespace:
    """`ArrayNamespace` over `TensorList`, with the functions that optimizer formulas use."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return TensorList([torch.where(condition, one, other) for one, other in zip(x.tensors, y.tensors, strict=True)])

    def minimum(self, x: Any, y: Any, /) -> Any:
        return TensorList(list(foreach_minimum(x.tensors, y.tensors)))

    def maximum(self, x: Any, y: Any, /) -> Any:
        return TensorList(list(foreach_maximum(x.tensors, y.tensors)))

    def asarray(self, value: Any, like: Any, /) -> Any:
        return TensorList([torch.full_like(tensor, value) for tensor in like.tensors])

    def sqrt(self, x: Any, /) -> Any:
        return TensorList(list(foreach_sqrt(x.tensors)))

    def sign(self, x: Any, /) -> Any:
        return TensorList(list(foreach_sign(x.tensors)))

    def cos(self, x: Any, /) -> Any:
        return TensorList(list(foreach_cos(x.tensors)))

    def floor(self, x: Any, /) -> Any:
        return TensorList(list(foreach_floor(x.tensors)))

    def power(self, x: Any, y: Any, /) -> Any:
        return _apply_foreach(foreach_pow, x, y)

    def expm1(self, x: Any, /) -> Any:
        return TensorList(list(foreach_expm1(x.tensors)))


TENSOR_LIST_XP: Final[ArrayNamespace] = TensorListNamespace()


def _apply_foreach(kernel: Callable[..., Any], many: TensorList, other: Operand) -> TensorList:
    return TensorList(list(kernel(many.tensors, other.tensors if isinstance(other, TensorList) else other)))
