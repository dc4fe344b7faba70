"""Tensor lists that behave like one array, so that multi-tensor kernels run an optimizer formula over all parameters.

Used for the specs for which torch has no kernel that accepts the finite flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from polyamp.array_namespace import array_namespace
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


def _apply_foreach(kernel: Callable[..., Any], many: TensorList, *others: Operand) -> TensorList:
    operands = (other.tensors if isinstance(other, TensorList) else other for other in others)
    return TensorList(list(kernel(many.tensors, *operands)))


def _where(condition: Any, x: TensorList, y: TensorList) -> TensorList:
    return TensorList([torch.where(condition, one, other) for one, other in zip(x.tensors, y.tensors, strict=True)])


def _asarray(value: Any, like: TensorList) -> TensorList:
    return TensorList([torch.full_like(tensor, value) for tensor in like.tensors])


_KERNELS: Final = {
    "minimum": foreach_minimum,
    "maximum": foreach_maximum,
    "sqrt": foreach_sqrt,
    "sign": foreach_sign,
    "cos": foreach_cos,
    "floor": foreach_floor,
    "power": foreach_pow,
    "expm1": foreach_expm1,
}
TENSOR_LIST_XP: Final = array_namespace(
    torch,
    _asarray,
    where=_where,
    **{name: functools.partial(_apply_foreach, kernel) for name, kernel in _KERNELS.items()},
)
"""The array namespace of tensor lists."""
