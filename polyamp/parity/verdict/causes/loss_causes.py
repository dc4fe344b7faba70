"""`explain_loss`: how two losses of the same outputs differ, from their gradients with respect to those outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from polyamp.parity.trace.sketch import Sketch, sample_indices
from polyamp.parity.verdict.causes.cause import Cause

Array = np.ndarray[Any, Any]
_ALIKE: Final = "All outputs agree and the loss does not"
_MIN_SAMPLES: Final = 3
"""Least number of stored elements of a place."""
_EQUAL: Final = 1e-4
"""Largest relative distance of two factors, or of gradients, that count as equal."""


def explain_loss(labels: tuple[str, str], gradients: tuple[Sketch, Sketch], numbers: str) -> Cause | None:
    """Return how two losses differ; None if the gradients do not show it.

    Args:
        labels: of both sides.
        gradients: of both losses with respect to the same output.
        numbers: the losses, as a sentence.
    """
    shape = gradients[0].shape
    if not shape or shape != gradients[1].shape:
        return None
    width = shape[-1] if len(shape) > 1 else 1
    places = sample_indices(math.prod(shape)) // width
    counts = np.bincount(places, minlength=math.prod(shape) // width)
    if counts.min() < min(width, _MIN_SAMPLES):
        return _elementwise(labels, gradients, numbers)
    ends = np.cumsum(counts)[:-1]
    one, two = (np.split(each.samples(), ends) for each in gradients)
    used = [np.array([part.any() for part in each]) for each in (one, two)]
    for number in (0, 1):
        alone = int((used[number] & ~used[1 - number]).sum())
        if alone:
            label, other = labels[number], labels[1 - number]
            sentence = f"{_ALIKE}: {label} counts {int(used[number].sum())} of {len(one)} places, {other}"
            text = f"{sentence} {int(used[1 - number].sum())}: padding, a mask, ignored, shifted or other labels."
            return Cause("formula", text, [f"At {alone} places only {label}'s loss has a gradient.", numbers])
    pairs = [(x, y) for x, y, is_used in zip(one, two, used[0], strict=True) if is_used]
    factors = np.array([_factor(x, y) for x, y in pairs])
    if factors.size and np.isfinite(factors).all():
        middle = float(np.median(factors))
        if float(np.abs(factors - middle).max()) <= _EQUAL * abs(middle):
            return _common_factor(labels, middle, (len(one), len(pairs), shape[0]), numbers)
        if width > 1:
            span = f"{labels[1]}'s gradient is {factors.min():.4g} to {factors.max():.4g} times {labels[0]}'s"
            sentence = f"{_ALIKE}: the places have other weights, such as means of rows and then of the batch."
            return Cause("formula", sentence, [f"Place by place {span}.", numbers])
    sums = [max(abs(float(part.sum())) for part in each) for each in (one, two)]
    sizes = [each.largest for each in gradients]
    if width > 1 and counts.min() == width and all(x < _EQUAL * y for x, y in zip(sums, sizes, strict=True)):
        return _other_targets(labels, pairs, numbers)
    return _elementwise(labels, gradients, numbers)


def _factor(x: Array, y: Array) -> float:
    """Return by which factor `y` is a multiple of `x`; NaN if it is not."""
    factor = float(x @ y) / float(x @ x)
    return factor if float(np.linalg.norm(y - factor * x)) <= _EQUAL * float(np.linalg.norm(y)) else float("nan")


def _common_factor(labels: tuple[str, str], factor: float, sizes: tuple[int, int, int], numbers: str) -> Cause | None:
    """Return why all gradients are a multiple; `sizes`: number of places, of those that count, of rows."""
    if abs(factor - 1.0) <= _EQUAL:
        return Cause(
            "formula", f"{_ALIKE}: they differ by a term without a gradient, or in what is reported.", [numbers]
        )
    words = ("all places", "the places that count", "the rows")
    evidence = [f"{labels[1]}'s gradient with respect to the output is {factor:.6g} times {labels[0]}'s.", numbers]
    known = {1.0: "1 (a sum)", **dict(zip(map(float, sizes), words, strict=True))}
    for one, name in known.items():
        for two, other in known.items():
            if one != two and abs(factor - one / two) <= _EQUAL * factor:
                texts = f"{labels[0]} divides by {name}, {labels[1]} by {other}"
                text = f"{texts} ({one:.0f} and {two:.0f}), or by numbers with the same ratio."
                return Cause("factor", f"{_ALIKE}: {text}", evidence)
    return Cause("factor", f"{_ALIKE}: they are multiples of each other, by other weights or divisors.", evidence)


def _other_targets(labels: tuple[str, str], pairs: Sequence[tuple[Array, Array]], numbers: str) -> Cause:
    """Return that two cross-entropies, whose gradients add up to 0 at each place, have other targets."""
    moved = sum(int(x.argmin() != y.argmin()) for x, y in pairs)
    if moved:
        sentence = f"{_ALIKE}: the targets of {moved} of {len(pairs)} places are other classes (shifted or exchanged)."
    else:
        sentence = f"{_ALIKE}: the same classes are the targets, with other shares (label smoothing, temperature)."
    x, y = pairs[0]
    shown = f"{x.min():.4g} in {labels[0]}, {y.min():.4g} in {labels[1]}"
    return Cause("formula", sentence, [f"The first place's gradient of its target: {shown}.", numbers])


def _elementwise(labels: tuple[str, str], gradients: tuple[Sketch, Sketch], numbers: str) -> Cause | None:
    """Return how two losses of single elements differ; None if one's gradient is a multiple of the other's."""
    values = [each.samples() for each in gradients]
    sizes = [np.abs(each[each != 0]) for each in values]
    flat = [each.size > 1 and float(each.max() - each.min()) <= _EQUAL * float(each.max()) for each in sizes]
    for number in (0, 1):
        label, other, zero = labels[number], labels[1 - number], values[number] == 0
        if flat[number] and not flat[1 - number]:
            sentence = f"{_ALIKE}: {label} takes the absolute error, {other} does not."
            return Cause(
                "formula", sentence, [f"All elements of {label}'s gradient have size {sizes[number][0]:.4g}.", numbers]
            )
        alone = int((zero & (values[1 - number] != 0)).sum())
        if alone:
            sentence = f"{_ALIKE}: {label} does not count some elements that {other} counts: clipped or masked."
            text = f"{alone} of {zero.size} elements have no gradient in {label} alone."
            return Cause("formula", sentence, [text, numbers])
    cosine = float(values[0] @ values[1]) / (float(np.linalg.norm(values[0]) * np.linalg.norm(values[1])) or 1.0)
    if cosine > 1.0 - _EQUAL:
        return None
    sentence = f"{_ALIKE}: its gradients differ element by element: other targets, or another formula of the error."
    return Cause(
        "formula", sentence, [f"The cosine of both gradients with respect to the output is {cosine:.3g}.", numbers]
    )
