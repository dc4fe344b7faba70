"""Formulas of normalizations: which array is normalized, over which axis, by which statistics, scale and epsilon."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.parity.verdict.causes.known_values import KnownArray

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Parameters = Mapping[tuple[str, str], "Array"]
_EQUAL: Final = 1e-5
"""Relative distance up to which a normalization gives an array."""
_MIN_ROWS: Final = 3
_MAX_SUMMANDS: Final = 6
_MAX_EPSILON: Final = 0.5
"""Largest epsilon, relative to the mean of squares, that is taken for one."""


class Normalization(NamedTuple):
    """A normalization that gives one side's values.

    Attributes:
        text: in words, without the epsilon.
        epsilon: measured.
    """

    text: str
    epsilon: float


def find_normalization(values: Array, known: Sequence[KnownArray], parameters: Parameters) -> Normalization | None:
    """Return the normalization of a known array, or of the sum of two, that gives some values.

    Args:
        values: the stored elements, which must be all.
        known: arrays of the same size that both sides agree on.
        parameters: arrays of the model, before the step.
    """
    for name, array, shape in _inputs(known):
        if len(shape) < 2 or array.size != values.size or array.size // shape[-1] < _MIN_ROWS:
            continue
        x, y = array.reshape(-1, shape[-1]), values.reshape(-1, shape[-1])
        for words, scale, shift in _affine(shape[-1], parameters):
            for kind, rows in (("RMS", x), ("layer", x - x.mean(1, keepdims=True))):
                epsilon = _epsilon(rows, (y - shift) / scale)
                if epsilon is not None:
                    return Normalization(f"the {kind} normalization of {name}{words}", epsilon)
    return None


def _inputs(known: Sequence[KnownArray]) -> Iterator[tuple[str, Array, tuple[int, ...]]]:
    whole = [each for each in known if each.is_whole]
    for each in whole:
        yield each.name, each.values, each.shape
    for one, two in itertools.combinations(whole[:_MAX_SUMMANDS], 2):
        yield f"({one.name} + {two.name})", one.values + two.values, one.shape


def _affine(width: int, parameters: Parameters) -> Iterator[tuple[str, Array, Array]]:
    """Yield words, scale and shift of what may follow a normalization."""
    import numpy as np

    zero = np.zeros(width)
    yield "", np.ones(width), zero
    for (module, name), array in parameters.items():
        if array.size != width or "bias" in name or not array.all():
            continue
        path = f"{module}.{name}"
        bias = parameters.get((module, "bias"))
        if bias is not None and bias.size == width:
            yield f" * {path} + bias", array, bias
        yield f" * {path}", array, zero
        if (1.0 + array).all():
            yield f" * (1 + {path})", 1.0 + array, zero


def _epsilon(rows: Array, normalized: Array) -> float | None:
    """Return the epsilon with which rows are divided by the root of their mean of squares; None if they are not."""
    import numpy as np

    squares = np.square(rows).mean(1)
    if not squares.all():
        return None
    factors = (rows * normalized).mean(1) / squares
    size = float(np.linalg.norm(normalized))
    if (factors <= 0).any() or float(np.linalg.norm(normalized - factors[:, None] * rows)) > _EQUAL * size:
        return None
    each = 1.0 / np.square(factors) - squares
    found = float(np.median(each))
    close = np.abs(each - found) <= np.maximum(1e-4 * squares, 0.05 * abs(found))
    return max(found, 0.0) if bool(close.all()) and abs(found) < _MAX_EPSILON * float(squares.mean()) else None
