"""Formulas of normalizations: which array is normalized over its last axis, by which statistics, scale and epsilon."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import sample_indices
from polyamp.parity.verdict.causes.known_arrays import KnownArray

Array = np.ndarray[Any, Any]
Parameters = Mapping[tuple[str, str], "Array"]
_EQUAL: Final = 1e-5
"""Relative distance up to which a normalization gives an array."""
_MIN_ROWS: Final = 3
_MIN_SAMPLES: Final = 4
"""Least number of stored elements of a row."""
_MAX_SUMMANDS: Final = 6
_MAX_EPSILON: Final = 0.5
"""Largest epsilon, relative to the mean of squares, that is taken for one."""


class Normalization(NamedTuple):
    """A normalization that gives one side's values.

    Attributes:
        text: in words, without the epsilon.
        inverse_squares: row -> the mean of squares plus epsilon, by which the row is divided.
        epsilon: measured; None where only samples of the array are stored.
    """

    text: str
    inverse_squares: Array
    epsilon: float | None


def find_normalization(values: Array, known: Sequence[KnownArray], parameters: Parameters) -> Normalization | None:
    """Return the normalization of a known array, or of the sum of two, that gives some values.

    Args:
        values: the stored elements.
        known: arrays of the same size that both sides agree on.
        parameters: arrays of the model, before the step; of larger ones samples.
    """
    for name, x, shape in _inputs(known):
        size = math.prod(shape)
        if len(shape) < 2 or x.size != values.size or size // shape[-1] < _MIN_ROWS:
            continue
        rows, columns = np.divmod(sample_indices(size), shape[-1])
        counts = np.bincount(rows, minlength=size // shape[-1])
        if counts.min() < min(_MIN_SAMPLES, shape[-1]):
            continue
        for words, scale, shift in _affine(shape[-1], parameters):
            y = (values - shift[columns]) / scale[columns]
            for kind in ("RMS", "layer"):
                found = _row_squares(x, y, rows, counts, centered=kind == "layer")
                if found is None:
                    continue
                epsilon = _epsilon(x.reshape(-1, shape[-1]), found, kind == "layer") if x.size == size else None
                if x.size < size or epsilon is not None:
                    return Normalization(f"the {kind} normalization of {name}{words}", found, epsilon)
    return None


def epsilon_texts(one: Normalization, two: Normalization, labels: tuple[str, str]) -> str:
    """Return the epsilons of two normalizations of the same array in words."""
    if one.epsilon is not None and two.epsilon is not None:
        return f"about {one.epsilon:.2g} in {labels[0]}, {two.epsilon:.2g} in {labels[1]}"
    apart = float(np.median(two.inverse_squares - one.inverse_squares))
    return f"{labels[1]}'s is {'larger' if apart > 0 else 'smaller'} by {abs(apart):.2g}"


def has_batch_statistics(values: Array, shape: tuple[int, ...], bias: Array) -> bool:
    """Return whether an output was normalized by statistics of the batch, so that its mean in each channel is the bias.

    Args:
        values: the stored elements, which must be all.
        shape: of the output, channels last.
        bias: of the layer.
    """
    means = values.reshape(-1, shape[-1]).mean(0)
    return bool(np.allclose(means, bias, atol=1e-4 * float(np.abs(values).max())))


def _inputs(known: Sequence[KnownArray]) -> Iterator[tuple[str, Array, tuple[int, ...]]]:
    for each in known:
        yield each.name, each.values, each.shape
    for one, two in itertools.combinations(known[:_MAX_SUMMANDS], 2):
        yield f"({one.name} + {two.name})", one.values + two.values, one.shape


def _affine(width: int, parameters: Parameters) -> Iterator[tuple[str, Array, Array]]:
    """Yield words, scale and shift of what may follow a normalization."""
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


def _row_squares(x: Array, y: Array, rows: Array, counts: Array, *, centered: bool) -> Array | None:
    """Return row -> 1 / f^2, where each row of `y` is f times that of `x`; None if it is not.

    Args:
        x, y: stored elements.
        rows: their rows.
        counts: number of stored elements of each row.
        centered: whether the rows of both have their means subtracted.
    """
    if centered:
        offsets = np.bincount(rows, weights=y) / counts
        x = x - (np.bincount(rows, weights=x) / counts)[rows]
        rest = y - offsets[rows]
    else:
        rest = y
    squares = np.bincount(rows, weights=x * x)
    if not squares.all():
        return None
    factors = np.bincount(rows, weights=x * rest) / squares
    if (factors <= 0).any() or float(np.linalg.norm(rest - factors[rows] * x)) > _EQUAL * float(np.linalg.norm(y)):
        return None
    return np.asarray(1.0 / np.square(factors))


def _epsilon(x: Array, inverse_squares: Array, centered: bool) -> float | None:
    """Return the epsilon that makes the mean of squares of each row what it is divided by; None if none does."""
    squares = np.square(x - x.mean(1, keepdims=True) if centered else x).mean(1)
    each = inverse_squares - squares
    found = float(np.median(each))
    close = np.abs(each - found) <= np.maximum(1e-4 * squares, 0.05 * abs(found))
    return max(found, 0.0) if bool(close.all()) and abs(found) < _MAX_EPSILON * float(squares.mean()) else None
