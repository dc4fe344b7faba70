"""Classification of products that are not matrix products: inner products, which are sums, and multiplications (S4).

`classify_product` decides by a call's shapes. A product without free axes is a sum and runs in float32. One that
contracts nothing runs in the dtype of its operands.

An axis of length 1 contracts nothing. A free axis of length 1 still counts as free, so that a batch of one row keeps
the dtype of a larger batch. Batches of matrices are an exception: inner products of rows are written as
`(b, 1, n) @ (b, n, 1)`. `linear` and convolutions are layers and run in the compute dtype whatever their widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from polyamp_torch.compat import assume_constant_result

ProductKind = Literal["sum", "multiplication"]
_Classifier = Callable[..., ProductKind | None]


def _matmul(left: Any, right: Any, *_: Any) -> ProductKind | None:
    a, b = left.shape, right.shape
    if not a or not b:  # torch raises
        return None
    columns, batches = (1 if len(b) == 1 else b[-1]), len(a) > 2 and len(b) > 2
    if (len(a) == 1 and len(b) == 1) or (batches and a[-2] == 1 and columns == 1):
        return "sum"
    return "multiplication" if a[-1] == 1 else None


def _reversed_matmul(right: Any, left: Any) -> ProductKind | None:
    return _matmul(left, right) if isinstance(left, torch.Tensor) else None


def _addmm(_: Any, left: Any, right: Any, **__: Any) -> ProductKind | None:
    """Classify `addmm` and similar functions, whose first argument is added to the product."""
    return "multiplication" if left.dim() and left.shape[-1] == 1 else None


def _outer(*_: Any, **__: Any) -> ProductKind:
    return "multiplication"


def _dot(*_: Any, **__: Any) -> ProductKind:
    return "sum"


def _inner(left: Any, right: Any) -> ProductKind | None:
    if left.dim() == 1 and right.dim() == 1:
        return "sum"
    return "multiplication" if not left.dim() or not right.dim() or left.shape[-1] == 1 else None


def _tensordot(left: Any, right: Any, dims: Any = 2, **_: Any) -> ProductKind | None:
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
    """Parsed einsum equation, independent of the lengths of its axes.

    Attributes:
        summed: (operand, axis from the end) of each label that the result lacks.
        free: whether the result has a label that some operand lacks.
    """

    summed: tuple[tuple[int, int], ...]
    free: bool


@assume_constant_result  # hides the cached function, about which torch.compile would warn
def _parse_equation(equation: str, ranks: tuple[int, ...]) -> _Equation | None:
    """Parse an einsum's equation; None if it is malformed, so that torch raises its own error."""
    return _parse_equation_once(equation, ranks)


@functools.lru_cache(maxsize=1024)
def _parse_equation_once(equation: str, ranks: tuple[int, ...]) -> _Equation | None:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = [_axis_labels(term, rank) for term, rank in zip(inputs.split(","), ranks, strict=False)]
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
        next(
            (number, axis - len(term))
            for number, term in enumerate(terms)
            if term
            for axis in _label_positions(term, label)
        )
        for label in sorted(every - kept)
    )
    return _Equation(summed, any(label not in operand for label in kept for operand in operands))


def _axis_labels(term: str, rank: int) -> tuple[str, ...] | None:
    """Return the label of each axis; labels of an ellipsis are counted from its end."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots):
        return None
    return (*before, *(f"...{number}" for number in range(hidden, 0, -1)), *after)


def _label_positions(term: tuple[str, ...], label: str) -> list[int]:
    return [axis for axis, other in enumerate(term) if other == label]


def _einsum(equation: Any, *operands: Any) -> ProductKind | None:
    if not isinstance(equation, str):
        return _einsum(*_equation_from_lists((equation, *operands)))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not all(isinstance(operand, torch.Tensor) for operand in operands):  # torch raises
        return None
    found = _parse_equation(equation, tuple(operand.dim() for operand in operands))
    if found is None:
        return None
    if all(operands[number].shape[axis] == 1 for number, axis in found.summed):
        return "multiplication"
    return None if found.free else "sum"


def _equation_from_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the arguments of `einsum(a, [0, 1], b, [1], [0])` to the form with an equation string."""
    operands, lists = args[0 : len(args) // 2 * 2 : 2], args[1::2]
    output = f"->{_letters_from_numbers(args[-1])}" if len(args) % 2 else ""
    return (",".join(map(_letters_from_numbers, lists)) + output, *operands)


def _letters_from_numbers(numbers: Any) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    return "".join("..." if number is Ellipsis else alphabet[number] for number in numbers)


_CLASSIFIER_BY_NAME: Final[dict[str, _Classifier]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm", "mv"), _matmul),
    "__rmatmul__": _reversed_matmul,
    **dict.fromkeys(("addmv", "baddbmm", "addbmm"), _addmm),
    "addr": _outer,
    **dict.fromkeys(("dot", "vdot", "vecdot"), _dot),
    "inner": _inner,
    "tensordot": _tensordot,
    "einsum": _einsum,
}
PRODUCT_CLASSIFIERS: Final[dict[Any, _Classifier]] = {
    getattr(space, name): classify
    for name, classify in _CLASSIFIER_BY_NAME.items()
    for space in (torch, torch.Tensor, torch.linalg)
    if hasattr(space, name)
}
"""Function -> classifier of its calls."""

_OPERAND_NAMES: Final = (
    *("input", "self", "a", "x", "mat", "mat1", "batch1", "vec1"),
    *("other", "tensor", "b", "y", "mat2", "batch2", "vec", "vec2"),
)
"""torch's names of the operands of its products, sorted so that the operands of every product are in its order."""
PLAIN_MATMULS: Final = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
"""Functions of `PRODUCT_CLASSIFIERS` for which `is_matrix_product` is a fast first check: every model calls `x @ w`."""


def is_matrix_product(args: Any) -> bool:
    """Return whether a call of one of `PLAIN_MATMULS` is a product of two matrices that contracts an axis. Fast."""
    if len(args) != 2:
        return False
    left, right = args
    return bool(left.dim() == 2 and right.dim() == 2 and left.size(1) != 1)


def classify_product(function: Any, args: Any, kwargs: dict[str, Any]) -> ProductKind | None:
    """Return the kind of a call of one of `PRODUCT_CLASSIFIERS`, or None for a matrix product."""
    operands = [kwargs[name] for name in _OPERAND_NAMES if name in kwargs] if kwargs else ()
    others = {name: value for name, value in kwargs.items() if name not in _OPERAND_NAMES}
    return PRODUCT_CLASSIFIERS[function](*args, *operands, **others)
