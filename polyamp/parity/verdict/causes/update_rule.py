"""The rule by which a side has updated its parameters, recovered from its own numbers by least squares.

A first moment is `momentum * earlier + gradient * g + decay * parameter`, and an update is a multiple of the moment, of
its quotient by a root of the second moment, and of the parameter. The coefficients are those that explain the recorded
arrays, so they are known for a user's own loop as for a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.verdict.causes.step_history import ParameterKey, Samples, SideUpdate

Array = np.ndarray[Any, Any]
FIRST_MOMENTS: Final = ("momentum", "exp_avg")
SECOND_MOMENTS: Final = ("exp_avg_sq", "square_avg")
GOOD_FIT: Final = 3e-3
"""Largest relative residual of a formula that explains an array."""
_FLOAT32_ROUNDOFF: Final = 2.0**-24
_ROUNDINGS: Final = 4.0
"""Roundings of a parameter that an update, the difference of two parameters, may contain; and of a gradient."""
_MAX_ELEMENTS: Final = 256
"""Largest number of elements of a parameter that are used."""
_MIN_MOMENT_SHARE: Final = 1e-2
"""Least size of an element of a moment, relative to the root mean square, at which its quotient is used."""
_LIMIT_STEPS: Final = 48
_MIN_UNCLIPPED_SHARE: Final = 0.1
"""Least share of the elements that a limit leaves as they are, to be looked for: Adam's first step is the sign."""
_EPSILONS: Final = (0.0, *(10.0 ** (power / 4) for power in range(-48, 1)))


class Fit(NamedTuple):
    """Least-squares fit: the coefficients, and the norm of the residual relative to the target's."""

    coefficients: tuple[float, ...]
    residual: float


class MomentRule(NamedTuple):
    """Formula of a side's first moment, or of its update where it has none.

    Attributes:
        slot: the moment; "" where the update itself stands for it, with the learning rate and its sign.
        gradient: factor of the gradient.
        decay: factor of the parameter.
        momentum: factor of the earlier moment.
        limit: largest magnitude of an element of the gradient; None if it is not clipped by value.
        residual, tolerance: relative residual, and the largest one at which the formula explains the moment.
        factors: where `gradient` differs between parameters: that of each.
    """

    slot: str
    gradient: float
    decay: float = 0.0
    momentum: float = 0.0
    limit: float | None = None
    residual: float = 0.0
    tolerance: float = GOOD_FIT
    factors: Mapping[ParameterKey, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether the formula explains the moment."""
        return self.residual <= self.tolerance


class UpdateRule(NamedTuple):
    """Formula of a side's update: `-rate * direction - decay * parameter - nesterov * gradient`.

    Attributes:
        rate: factor of the first moment, or of its quotient by the root of the second.
        decay: factor of the parameter.
        nesterov: factor of the gradient.
        epsilon: added to the root of the second moment.
        is_inside: whether `epsilon` is added to the second moment instead.
        is_maximum: whether the second moment is the largest of the steps.
        parameter_size: size of the parameters relative to the update.
        residual, tolerance: relative residual, and the largest one at which the formula counts as known.
        rates, decays: where they differ between parameters: those of each.
    """

    rate: float
    decay: float = 0.0
    nesterov: float = 0.0
    epsilon: float = 0.0
    is_inside: bool = False
    is_maximum: bool = False
    parameter_size: float = 0.0
    residual: float = 0.0
    tolerance: float = GOOD_FIT
    rates: Mapping[ParameterKey, float] = {}
    decays: Mapping[ParameterKey, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether the formula explains the update."""
        return self.residual <= self.tolerance


def fit(target: Array, columns: Sequence[Array]) -> Fit:
    """Return the linear combination of columns that is nearest to an array.

    Columns that depend on earlier ones have the coefficient 0.
    """
    size = float(np.linalg.norm(target))
    kept: list[int] = []
    basis: list[Array] = []
    for number, column in enumerate(columns):
        rest = column - sum((float(b @ column) * b for b in basis), np.zeros_like(column))
        length = float(np.linalg.norm(rest))
        if length > 1e-5 * float(np.linalg.norm(column)) > 0.0:
            kept.append(number)
            basis.append(rest / length)
    if not kept or not size:
        return Fit((0.0,) * len(columns), 0.0 if not size else 1.0)
    matrix = np.stack([columns[number] for number in kept], 1)
    scales = np.linalg.norm(matrix, axis=0)
    found = np.linalg.lstsq(matrix / scales, target, rcond=None)[0] / scales
    coefficients = [0.0] * len(columns)
    for number, value in zip(kept, found, strict=True):
        coefficients[number] = float(value)
    return Fit(tuple(coefficients), float(np.linalg.norm(target - matrix @ found)) / size)


def moment_rule(side: SideUpdate, limits: Sequence[float] = (), roundoff: float = 0.0) -> MomentRule | None:
    """Return the formula of a side's first moment; None if there is nothing to fit.

    Args:
        side: the update.
        limits: limits of a clip that are tried by value before others.
        roundoff: unit roundoff of the passes. A loop makes its moments of a pass of its own, and not of the recorded
            one, which rounds in another way.
    """
    tolerance = max(GOOD_FIT, _ROUNDINGS * roundoff)
    slot = next((slot for slot in FIRST_MOMENTS if side.slots.get(slot)), "")
    moments = side.slots[slot] if slot else {key: side.after[key] - side.before[key] for key in side.before}
    earlier = side.earlier_slots.get(slot, {}) if slot else {}
    keys = [key for key, array in moments.items() if key in side.gradients and array.size == side.gradients[key].size]
    keys = [key for key in keys if moments[key].any()]
    if not keys:
        return None

    def columns(keys: Sequence[ParameterKey], limit: float | None = None) -> tuple[Array, list[Array]]:
        target, scale = _pool(moments, keys, moments)
        gradients = _pool(side.gradients, keys, moments)[0]
        if limit is not None:
            gradients = gradients.clip(-limit * scale, limit * scale)
        found = [gradients, _pool(side.before, keys, moments)[0]]
        found += [_pool(earlier, keys, moments)[0]] if set(keys) <= set(earlier) else []
        return target, found

    def rule(found: Fit, limit: float | None = None) -> MomentRule:
        gradient, decay, *momentum = found.coefficients
        return MomentRule(slot, gradient, decay, sum(momentum), limit, found.residual, tolerance)

    plain = rule(fit(*columns(keys)))
    if plain.is_known:
        return plain
    apart = {key: fit(*columns([key])) for key in keys}
    if max(each.residual for each in apart.values()) <= tolerance:
        worst = max(each.residual for each in apart.values())
        return plain._replace(residual=worst, factors={key: each.coefficients[0] for key, each in apart.items()})
    pooled = _pool(side.gradients, keys, side.gradients)
    sizes = abs(pooled[0]) / pooled[1]
    least = float(np.quantile(sizes, _MIN_UNCLIPPED_SHARE))  # below it a clip is hardly told from the sign
    tried = [*limits, *(each for n in range(_LIMIT_STEPS) if (each := float(sizes.max()) * 0.8**n) >= least)]
    best = min((rule(fit(*columns(keys, limit)), limit) for limit in tried), key=lambda each: each.residual)
    assert best.limit is not None
    for width in (0.1, 0.03, 0.01, 0.003, 0.001):
        near = [best.limit * (1 + width * step) for step in (-2, -1, 1, 2)]
        best = min([best, *(rule(fit(*columns(keys, each)), each) for each in near)], key=lambda each: each.residual)
        assert best.limit is not None
    return best if best.is_known else plain


def stale_gradient_factor(side: SideUpdate, rule: MomentRule) -> float | None:
    """Return what multiple of the gradient of the step before is in a side's first moment, besides what a rule gives;
    None if the rest is no such multiple."""
    moments, earlier = side.slots.get(rule.slot, {}), side.earlier_slots.get(rule.slot, {})
    keys = [key for key in moments if all(key in each for each in (earlier, side.earlier_gradients, side.gradients))]
    if not keys:
        return None
    rest = {
        key: moments[key]
        - rule.momentum * earlier[key]
        - rule.gradient * side.gradients[key]
        - rule.decay * side.before[key]
        for key in keys
    }
    found = fit(_pool(rest, keys, moments)[0], [_pool(side.earlier_gradients, keys, moments)[0]])
    return found.coefficients[0] if found.residual <= GOOD_FIT else None


def second_moment_factor(side: SideUpdate, moment: MomentRule) -> tuple[float, float] | None:
    """Return the factors of the squared gradient, as the first moment has it, and of the earlier second moment; None if
    there is no second moment or they do not explain it."""
    slot = next((slot for slot in SECOND_MOMENTS if side.slots.get(slot)), "")
    if not slot or moment.factors or moment.limit is not None or not moment.gradient:
        return None
    squares = side.slots[slot]
    decay = moment.decay / moment.gradient
    gradients = {key: (side.gradients[key] + decay * side.before[key]) ** 2 for key in side.gradients}
    keys = [key for key in squares if key in gradients and squares[key].size == gradients[key].size]
    keys = [key for key in keys if squares[key].any()]
    if not keys:
        return None
    earlier = side.earlier_slots.get(slot, {})
    columns = [_pool(gradients, keys, squares)[0]]
    columns += [_pool(earlier, keys, squares)[0]] if set(keys) <= set(earlier) else []
    found = fit(_pool(squares, keys, squares)[0], columns)
    if found.residual > 2 * GOOD_FIT:
        return None
    return found.coefficients[0], found.coefficients[1] if len(columns) > 1 else 0.0


def update_rule(side: SideUpdate, epsilons: Sequence[float] = ()) -> UpdateRule | None:
    """Return the formula of a side's update; None if there is nothing to fit.

    Args:
        side: the update.
        epsilons: values that are tried first, such as the recipe's.
    """
    first = next((slot for slot in FIRST_MOMENTS if side.slots.get(slot)), "")
    second = next((slot for slot in SECOND_MOMENTS if side.slots.get(slot)), "")
    moments = side.slots[first] if first else side.gradients
    updates = {key: side.after[key] - side.before[key] for key in side.before}
    keys = [key for key in updates if key in moments and moments[key].size == updates[key].size and moments[key].any()]
    keys = [key for key in keys if updates[key].any() and (not second or key in side.slots[second])]
    if not keys:
        return None
    masks = {key: abs(moments[key]) >= _MIN_MOMENT_SHARE * _rms(moments[key]) for key in keys}
    chosen = {key: updates[key][masks[key]] for key in keys}
    target = _pool(chosen, keys, chosen)[0]
    parameters = {key: side.before[key][masks[key]] for key in keys}
    weights = _pool(parameters, keys, chosen)[0]
    rounding = float(np.linalg.norm(np.maximum(abs(weights), abs(weights + target)))) * _FLOAT32_ROUNDOFF
    size = max(float(np.linalg.norm(target)), 1e-300)
    exact = _ROUNDINGS * rounding / size
    tolerance = max(GOOD_FIT, exact)
    parameter_size = float(np.linalg.norm(weights)) / size
    slots = {key: moments[key][masks[key]] for key in keys}
    gradients = {key: side.gradients[key][masks[key]] for key in keys}

    def directions(epsilon: float, inside: bool, maximum: bool) -> Mapping[ParameterKey, Array]:
        if not second:
            return slots
        found = {}
        for key in keys:
            square = side.slots[second][key]
            if maximum:
                square = np.maximum(square, side.earlier_slots[second][key])
            square = square[masks[key]]
            root = np.sqrt(square + epsilon) if inside else np.sqrt(square) + epsilon
            found[key] = slots[key] / np.where(root > 0.0, root, 1.0)
        return found

    def rule(found: Fit, **more: Any) -> UpdateRule:
        rate, decay, *nesterov = (-each for each in found.coefficients)
        made = UpdateRule(rate, decay, sum(nesterov), parameter_size=parameter_size, tolerance=tolerance, **more)
        return made._replace(residual=found.residual)

    def fitted(epsilon: float = 0.0, inside: bool = False, maximum: bool = False) -> UpdateRule:
        columns = [_pool(directions(epsilon, inside, maximum), keys, chosen)[0], weights]
        if first and not second:
            columns.append(_pool(gradients, keys, chosen)[0])
        return rule(fit(target, columns), epsilon=epsilon, is_inside=inside, is_maximum=maximum)

    plain = min(map(fitted, (0.0, *epsilons)), key=lambda each: each.residual)
    if plain.residual <= max(exact, 1e-5):
        return plain
    if not plain.is_known and (not second or len(keys) > 1):
        given = directions(plain.epsilon, False, False)
        apart = {
            key: fit(_pool(chosen, [key], chosen)[0], [_pool(each, [key], chosen)[0] for each in (given, parameters)])
            for key in keys
        }
        if max(each.residual for each in apart.values()) <= tolerance:
            rates, decays = ({key: -each.coefficients[n] for key, each in apart.items()} for n in (0, 1))
            return plain._replace(residual=0.0, rates=rates, decays=decays)
    if not second:
        return plain
    best = plain
    has_earlier = set(keys) <= set(side.earlier_slots.get(second, {}))
    for inside, maximum in ((False, False), (True, False), *([(False, True)] if has_earlier else [])):
        best = min(
            [best, *(fitted(each, inside, maximum) for each in ((0.0, *epsilons) if maximum else _EPSILONS))],
            key=lambda each: each.residual,
        )
    for width in (0.4, 0.2, 0.1, 0.05, 0.02):
        if best.epsilon:
            near = [fitted(best.epsilon * (1 + width * step), best.is_inside, best.is_maximum) for step in (-1, 1)]
            best = min([best, *near], key=lambda each: each.residual)
    return best


def _pool(arrays: Samples, keys: Sequence[ParameterKey], sizes: Samples) -> tuple[Array, Array]:
    """Return elements of some arrays in one, each divided by the size of that parameter's array in `sizes`, and the
    divisors' reciprocals."""
    factors = [1.0 / _rms(sizes[key]) for key in keys]
    parts = [arrays[key][:_MAX_ELEMENTS] * factor for key, factor in zip(keys, factors, strict=True)]
    return np.concatenate(parts), np.repeat(factors, [part.size for part in parts])


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) or 1.0
