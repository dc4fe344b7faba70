"""`explain_formula`: what each side computes between arrays that agree and the first one that does not.

Elementwise formulas (activations, gates), sums (residual connections) and the epsilon of a layer or RMS normalization
are tried against the recorded values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import sample_indices
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.known_arrays import KnownArray
from polyamp.parity.verdict.causes.normalizations import Parameters, epsilon_texts, find_normalization
from polyamp.parity.verdict.causes.update_rule import fit
from polyamp.porting.layouts.activations import ACTIVATION_NAMES, apply_activation

Array = np.ndarray[Any, Any]
_EQUAL: Final = 2e-6
"""Relative distance up to which a formula gives an array."""
_MAX_GATES: Final = 4
_MIN_ELEMENTS: Final = 32
_MAX_TERMS: Final = 3
_DROPOUT_ERROR: Final = 1e-3
"""Largest error of the ratio of an element to what it is before a dropout: differences of sums are less exact."""


class ValueFormula(NamedTuple):
    """A formula that gives one side's values.

    Attributes:
        text: in words.
        error: its relative distance from the values.
    """

    text: str
    error: float


def explain_formula(
    labels: tuple[str, str],
    sides: tuple[Array, Array],
    known: Sequence[KnownArray],
    where: str,
    parameters: Parameters,
) -> Cause | None:
    """Return the formulas of both sides; None if that of neither is recognised.

    Args:
        labels: of both sides.
        sides: the stored elements of the array that differs.
        known: arrays of the same size that agree, the latest first.
        where: the place, in words.
        parameters: arrays of the model, before the step.
    """
    if sides[0].size < _MIN_ELEMENTS or sides[0].shape != sides[1].shape:
        return None
    normal = [find_normalization(side, known, parameters) for side in sides]
    if normal[0] is not None and normal[1] is not None and normal[0].text == normal[1].text:
        evidence = ["Row by row the outputs are one factor apart, which the mean of squares of the row explains."]
        measured = epsilon_texts(normal[0], normal[1], labels)
        return Cause("epsilon", f"Another epsilon of {normal[0].text}, {where}: {measured}.", evidence)
    one, two = (
        _formula(side, known, parameters) or (None if each is None else ValueFormula(each.text, _EQUAL))
        for side, each in zip(sides, normal, strict=True)
    )
    if one is not None and two is not None and one.text != two.text:
        texts = [f"{label} computes {each.text}" for label, each in zip(labels, (one, two), strict=True)]
        evidence = [f"Each gives its side's values to {max(one.error, two.error, 1e-8):.0e}."]
        return Cause("formula", f"{', '.join(texts)}: other formulas {where}.", evidence)
    found = one or two
    if found is not None and (one is None or two is None):
        label, other = labels if two is None else labels[::-1]
        evidence = [f"This gives {label}'s values to {max(found.error, 1e-8):.0e}."]
        return Cause("formula", f"{label} computes {found.text}, {other} does not: another formula {where}.", evidence)
    return None


def explain_columns(
    labels: tuple[str, str], sides: tuple[Array, Array], parts: Sequence[KnownArray], where: str
) -> Cause | None:
    """Return the formulas of both sides in some columns, where several arrays were joined; None if there are none.

    Args:
        labels: of both sides.
        sides: the array that differs, as (rows, columns).
        parts: arrays with the same rows and fewer columns that agree.
        where: the place, in words.
    """
    for part in parts:
        width = part.shape[-1]
        for begin in range(sides[0].shape[1] - width + 1):
            columns = [side[:, begin : begin + width].ravel() for side in sides]
            if columns[0].size < _MIN_ELEMENTS or _error(*columns) <= _EQUAL:
                continue
            one, two = (_activation(each, [part]) or _clip(each, [part]) for each in columns)
            if one is None or two is None:
                continue
            texts = [f"{label} has {each.text}" for label, each in zip(labels, (one, two), strict=True)]
            place = f"columns {begin} to {begin + width - 1} of {sides[0].shape[1]}"
            error = max(one.error, two.error, 1e-8)
            sentence = f"{', '.join(texts)} in {place}: other formulas {where}."
            return Cause("formula", sentence, [f"Each gives its side's values to {error:.0e}."])
    return None


def _formula(values: Array, known: Sequence[KnownArray], parameters: Parameters) -> ValueFormula | None:
    """Return the simplest formula of known arrays that gives some values."""
    return (
        _constant(values)
        or _activation(values, known)
        or _clip(values, known)
        or _gate(values, known)
        or _sum(values, known)
        or _scaled_sum(values, known, parameters)
        or _dropout(values, known)
    )


def _constant(values: Array) -> ValueFormula | None:
    """Return the number that all values are."""
    return ValueFormula(f"{values[0]:.4g} everywhere", 0.0) if (values == values[0]).all() else None


def _clip(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the known array that is clipped to the range of some values."""
    low, high = float(values.min()), float(values.max())
    return _best(
        ValueFormula(f"{each.name} clipped to {low:.4g} and {high:.4g}", _error(values, each.values.clip(low, high)))
        for each in known[:_MAX_GATES]
    )


def _scaled_sum(values: Array, known: Sequence[KnownArray], parameters: Parameters) -> ValueFormula | None:
    """Return the known array times a parameter of its channels, alone or added to another, that gives some values."""
    for (module, name), scale in parameters.items():
        for each in known:
            width = each.shape[-1] if len(each.shape) > 1 else 0
            if scale.size != width:
                continue
            factors = scale[sample_indices(math.prod(each.shape)) % width]
            path, scaled = f"{module}.{name}", each.values * factors
            found = _best(
                ValueFormula(text, _error(values, array))
                for text, array in (
                    (f"{path} * {each.name}", scaled),
                    *((f"{x.name} + {path} * {each.name}", x.values + scaled) for x in known if x is not each),
                    *((f"{path} * ({each.name} + {x.name})", scaled + factors * x.values) for x in known),
                )
            )
            if found is not None:
                return found
    return None


def _dropout(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the known array with dropped elements, alone or added to another, that gives some values."""
    for rest in (None, *known[:_MAX_GATES]):
        for each in known[:_MAX_GATES]:
            usable = np.abs(each.values) > 1e-3 * float(np.abs(each.values).max())
            left = values if rest is None else values - rest.values
            ratios = (left[usable] / each.values[usable]) if usable.any() else np.zeros(0)
            zeros = np.abs(ratios) < _DROPOUT_ERROR
            if rest is each or not 0.0 < zeros.mean() < 1.0:
                continue
            factor = float(np.median(ratios[~zeros]))
            if float(np.abs(ratios[~zeros] - factor).max()) > _DROPOUT_ERROR * abs(factor):
                continue
            share = f"{zeros.mean():.0%}"
            name = f"dropout({each.name}; {share} are 0, the others times {factor:.4g})"
            if abs(factor - 1.0) <= _DROPOUT_ERROR:
                name = f"{each.name} with {share} of its elements set to 0"
            return ValueFormula(name if rest is None else f"{rest.name} + {name}", _DROPOUT_ERROR)
    return None


def _activation(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the activation of a known array that gives some values."""
    return _best(
        ValueFormula(f"{name} of {each.name}" if name != "linear" else each.name, _error(values, activated))
        for each in known[:_MAX_GATES]
        for name, activated in _activations(each.values)
    )


def _gate(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the product of one known array and an activation of another that gives some values."""
    return _best(
        ValueFormula(f"{name}({one.name}) * {two.name}", _error(values, activated * two.values))
        for one, two in itertools.permutations(known[:_MAX_GATES], 2)
        for name, activated in _activations(one.values)
    )


def _sum(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the linear combination of known arrays that gives some values, the shortest one."""
    for count in range(1, _MAX_TERMS + 1):
        found = _best(
            ValueFormula(
                " + ".join(_term(factor, each) for factor, each in zip(combination.coefficients, chosen, strict=True)),
                combination.residual,
            )
            for chosen in itertools.combinations(known, count)
            for combination in [fit(values, [each.values for each in chosen])]
            if all(abs(factor) > 1e-3 for factor in combination.coefficients)
        )
        if found is not None:
            return found
    return None


def _activations(x: Array) -> Iterator[tuple[str, Array]]:
    for name in ACTIVATION_NAMES:
        made = apply_activation(name, x)
        assert made is not None
        yield name, made
    for slope in (0.01, 0.1, 0.2, 0.3):
        yield f"leaky_relu ({slope})", np.where(x > 0, x, slope * x)
    yield "elu", np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _best(formulas: Iterable[ValueFormula]) -> ValueFormula | None:
    best = min(formulas, key=lambda each: each.error, default=None)
    return best if best is not None and best.error <= _EQUAL else None


def _error(values: Array, other: Array) -> float:
    size = float(np.linalg.norm(values))
    return float(np.linalg.norm(values - other)) / size if size else 1.0


def _term(factor: float, array: KnownArray) -> str:
    return array.name if abs(factor - 1.0) < 1e-4 else f"{factor:.5g} * {array.name}"
