"""Products that are no matrix products: inner products, which are sums, and multiplications (S4).

`classified` tells them from a call's shapes: a product without free axes is a sum and runs in float32, one that
contracts nothing follows its operands. Called by `islands`, which has `PRODUCTS` from `op_list`.

An axis of length 1 contracts nothing. A free axis of length 1 is one all the same, so that a batch of one row keeps the
dtype of a larger batch, except in batches of matrices: `(b, 1, n) @ (b, n, 1)` is how inner products of rows are
written. `linear` and convolutions are layers and run in the compute dtype whatever their widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from polyamp_torch.compat import constant_when_compiled

Kind = Literal["sum", "multiplication"]
_Classify = Callable[..., Kind | None]


def _matmul(left: Any, right: Any, *_: Any) -> Kind | None:
    a, b = left.shape, right.shape
    if not a or not b:  # torch raises
        return None
    columns, batches = (1 if len(b) == 1 else b[-1]), len(a) > 2 and len(b) > 2
    if (len(a) == 1 and len(b) == 1) or (batches and a[-2] == 1 and columns == 1):
        return "sum"
    return "multiplication" if a[-1] == 1 else None


def _reversed_matmul(right: Any, left: Any) -> Kind | None:
    return _matmul(left, right) if isinstance(left, torch.Tensor) else None


def _added(_: Any, left: Any, right: Any, **__: Any) -> Kind | None:
    """`addmm` and its like: the first argument is added to the product."""
    return "multiplication" if left.dim() and left.shape[-1] == 1 else None


def _outer(*_: Any, **__: Any) -> Kind:
    return "multiplication"


def _dot(*_: Any, **__: Any) -> Kind:
    return "sum"


def _inner(left: Any, right: Any) -> Kind | None:
    if left.dim() == 1 and right.dim() == 1:
        return "sum"
    return "multiplication" if not left.dim() or not right.dim() or left.shape[-1] == 1 else None


def _tensordot(left: Any, right: Any, dims: Any = 2, **_: Any) -> Kind | None:
    if isinstance(dims, torch.Tensor):
        return None
    if isinstance(dims, int):
        axes: Sequence[int] = range(-dims, 0)
    else:
        axes = tuple(dims[0]) if isinstance(dims[0], Iterable) else (dims[0],)
    if len(axes) and left.dim() == right.dim() == len(axes):
        return "sum"
    return "multiplication" if all(left.shape[axis] == 1 for axis in axes) else None


class _Equation(NamedTuple):
    """What an einsum does, whatever the lengths of its axes.

    Attributes:
        summed: (operand, axis from the end) of each label that the result lacks.
        free: whether the result has a label that some operand lacks.
    """

    summed: tuple[tuple[int, int], ...]
    free: bool


@constant_when_compiled  # which sees no further: torch.compile warns of a function with a cache
def _parsed(equation: str, ranks: tuple[int, ...]) -> _Equation | None:
    """An einsum's equation; None where it is malformed, which torch says better."""
    return _parse(equation, ranks)


@functools.lru_cache(maxsize=1024)
def _parse(equation: str, ranks: tuple[int, ...]) -> _Equation | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = [_labels(term, rank) for term, rank in zip(inputs.split(","), ranks, strict=False)]
    if len(terms) != inputs.count(",") + 1 or len(terms) != len(ranks) or None in terms:
        return None
    operands = [set(term or ()) for term in terms]
    every = set().union(*operands)
    if arrow:
        kept = {label for label in every if (label.startswith("...") and "..." in output) or label in output}
    else:
        counts = [label for term in terms for label in term or ()]
        kept = {label for label in every if label.startswith("...") or counts.count(label) == 1}
    summed = tuple(
        next((number, axis - len(term)) for number, term in enumerate(terms) if term for axis in _places(term, label))
        for label in sorted(every - kept)
    )
    return _Equation(summed, any(label not in operand for label in kept for operand in operands))


def _labels(term: str, rank: int) -> tuple[str, ...] | None:
    """The label of each axis; those of an ellipsis are counted from its end."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        return None
    return (*before, *(f"...{number}" for number in range(hidden, 0, -1)), *after)


def _places(term: tuple[str, ...], label: str) -> list[int]:
    return [axis for axis, other in enumerate(term) if other == label]


def _einsum(equation: Any, *operands: Any) -> Kind | None:
    if not isinstance(equation, str):
        return _einsum(*_as_equation((equation, *operands)))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not all(isinstance(operand, torch.Tensor) for operand in operands):  # torch raises
        return None
    found = _parsed(equation, tuple(operand.dim() for operand in operands))
    if found is None:
        return None
    if all(operands[number].shape[axis] == 1 for number, axis in found.summed):
        return "multiplication"
    return None if found.free else "sum"


def _as_equation(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`einsum(a, [0, 1], b, [1], [0])` with its equation written out."""
    operands, lists = args[0 : len(args) // 2 * 2 : 2], args[1::2]
    output = f"->{_letters(args[-1])}" if len(args) % 2 else ""
    return (",".join(map(_letters, lists)) + output, *operands)


def _letters(numbers: Any) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    return "".join("..." if number is Ellipsis else alphabet[number] for number in numbers)


_NAMES: Final[dict[str, _Classify]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm", "mv"), _matmul),
    "__rmatmul__": _reversed_matmul,
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm"), _added),
    "addr": _outer,
    **dict.fromkeys(("dot", "vdot", "vecdot"), _dot),
    "inner": _inner,
    "tensordot": _tensordot,
    "einsum": _einsum,
}
PRODUCTS: Final[dict[Any, _Classify]] = {
    getattr(space, name): classify
    for name, classify in _NAMES.items()
    for space in (torch, torch.Tensor, torch.linalg)
    if hasattr(space, name)
}
"""Each function -> what tells its calls apart."""

_OPERANDS: Final = (
    *("input", "self", "a", "x", "mat", "mat1", "batch1", "vec1"),
    *("other", "tensor", "b", "y", "mat2", "batch2", "vec", "vec2"),
)
"""What torch calls the operands of its products, so sorted that those of any one product stand in its order."""
PLAIN: Final = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
"""Those of `PRODUCTS` for which `plain` may be asked first: `x @ w` stands in every model, and its call counts."""


def plain(args: Any) -> bool:
    """Whether a call of one of `PLAIN` is a product of two matrices that contracts something: for the least time."""
    if len(args) != 2:
        return False
    left, right = args
    return bool(left.dim() == 2 and right.dim() == 2 and left.size(1) != 1)


def classified(function: Any, args: Any, kwargs: dict[str, Any]) -> Kind | None:
    """What a call of one of `PRODUCTS` is, or None for a matrix product."""
    operands = [kwargs[name] for name in _OPERANDS if name in kwargs] if kwargs else ()
    others = {name: value for name, value in kwargs.items() if name not in _OPERANDS}
    return PRODUCTS[function](*args, *operands, **others)
