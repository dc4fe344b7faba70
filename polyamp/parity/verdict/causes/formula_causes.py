"""`explain_formula`: what each side computes between arrays that agree and the first one that does not.

Elementwise formulas (activations, gates), sums (residual connections) and the epsilon of a layer or RMS normalization
are tried against the recorded values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.known_values import KnownArray
from polyamp.parity.verdict.causes.update_rule import fit
from polyamp.porting.layouts.activations import ACTIVATION_NAMES, apply_activation

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EQUAL: Final = 2e-6
"""Relative distance up to which a formula gives an array."""
_MAX_GATES: Final = 4
_MIN_ELEMENTS: Final = 32
_MIN_ROWS: Final = 3
_MAX_TERMS: Final = 3


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
    parameters: Mapping[tuple[str, str], Array],
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
    one, two = (_formula(side, known) for side in sides)
    if one is not None and two is not None and one.text != two.text:
        texts = [f"{label} computes {each.text}" for label, each in zip(labels, (one, two), strict=True)]
        evidence = [f"Each gives its side's values to {max(one.error, two.error, 1e-8):.0e}."]
        return Cause("formula", f"Other formulas {where}: {', '.join(texts)}.", evidence)
    found = one or two
    if found is not None and (one is None or two is None):
        label, other = labels if two is None else labels[::-1]
        evidence = [f"This gives {label}'s values to {max(found.error, 1e-8):.0e}."]
        return Cause("formula", f"Another formula {where}: {label} computes {found.text}, {other} does not.", evidence)
    return _epsilon(labels, sides, known, where, parameters)


def _formula(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the simplest formula of known arrays that gives some values."""
    return _activation(values, known) or _gate(values, known) or _sum(values, known)


def _activation(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the activation of a known array that gives some values."""
    return _best(
        ValueFormula(f"{name} of {_name(each)}" if name != "linear" else _name(each), _error(values, activated))
        for each in known[:_MAX_GATES]
        for name, activated in _activations(each.values)
    )


def _gate(values: Array, known: Sequence[KnownArray]) -> ValueFormula | None:
    """Return the product of one known array and an activation of another that gives some values."""
    return _best(
        ValueFormula(f"{name}({_name(one)}) * {_name(two)}", _error(values, activated * two.values))
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
    import numpy as np

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
    import numpy as np

    size = float(np.linalg.norm(values))
    return float(np.linalg.norm(values - other)) / size if size else 1.0


def _name(array: KnownArray) -> str:
    path = array.module or "the model"
    return path if array.what == "output" else f"the input of {path}"


def _term(factor: float, array: KnownArray) -> str:
    return _name(array) if abs(factor - 1.0) < 1e-4 else f"{factor:.5g} * {_name(array)}"


def _epsilon(
    labels: tuple[str, str],
    sides: tuple[Array, Array],
    known: Sequence[KnownArray],
    where: str,
    parameters: Mapping[tuple[str, str], Array],
) -> Cause | None:
    """Return the epsilons of a layer or RMS normalization of a known array that both sides compute."""
    import numpy as np

    for each in known:
        if not each.is_whole or not each.shape or each.values.size // each.shape[-1] < _MIN_ROWS:
            continue
        width = each.shape[-1]
        x = each.values.reshape(-1, width)
        scales = [(np.ones(width), np.zeros(width))]
        for (module, name), array in parameters.items():
            if array.size == width and "bias" not in name:
                scales += [(array, np.zeros(width)), (1.0 + array, np.zeros(width))]
                if (module, "bias") in parameters and parameters[module, "bias"].size == width:
                    scales.append((array, parameters[module, "bias"]))
        for centered in (False, True):
            for scale, shift in scales:
                if not scale.all():
                    continue
                found = [_row_epsilons(x, (side.reshape(-1, width) - shift) / scale, centered) for side in sides]
                if found[0] is None or found[1] is None:
                    continue
                word = "layer" if centered else "RMS"
                texts = [f"{value:.2g} in {label}" for value, label in zip(found, labels, strict=True)]
                return Cause(
                    "epsilon",
                    f"Another epsilon of the {word} normalization of {_name(each)} {where}: about {', '.join(texts)}.",
                    ["Row by row the outputs are one factor apart, which the mean of squares of the row explains."],
                )
    return None


def _row_epsilons(x: Array, y: Array, centered: bool) -> float | None:
    """Return the epsilon with which `y` is the normalized `x`; None if it is not."""
    import numpy as np

    rows = x - x.mean(1, keepdims=True) if centered else x
    squares = np.square(rows).mean(1)
    if not squares.all():
        return None
    factors = (rows * y).mean(1) / squares
    if np.linalg.norm(y - factors[:, None] * rows) > 1e-5 * np.linalg.norm(y) or (factors <= 0).any():
        return None
    found = np.median(1.0 / np.square(factors) - squares)
    return float(found) if -1e-7 < found / squares.mean() < 1.0 else None
