"""Comparison of settings that weights do not carry: epsilons, momenta, paddings, activations, slopes, rates.

Only attributes that both sides report are compared. Attributes that one side does not report are counted, so that a
missing value is not taken for agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_kinds import KINDS, RECURRENT_KINDS, Attribute, find_attribute, to_json_value
from polyamp.porting.matching.layer_fit import LayerFit
from polyamp.porting.matching.matching import LayerMatch

_MAX_LISTED: Final = 8
"""Largest number of layers with the same difference that are listed individually."""
_MAX_NAMED: Final = 3
"""Number of layers named if there are more."""
_RELATIVE_TOLERANCE: Final = 1e-6
"""Relative difference below which two numbers are equal: an epsilon stored in float32 is not exactly 1e-5."""


class Difference(NamedTuple):
    """A setting that the weights do not carry, and that differs.

    Attributes:
        source: path of the source's layer.
        target: path of the target's.
        attribute: its name, as in the table of kinds.
        ours: the source's value.
        theirs: the target's.
        line: the line of code that makes the target equal to the source; "" if the framework has none.
        structural: whether the difference changes the function of the arrays.
    """

    source: str
    target: str
    attribute: str
    ours: Any
    theirs: Any
    line: str
    structural: bool = False

    def __str__(self) -> str:
        said = f"{self.target}: {self.attribute} is {self.theirs!r}, in the source ({self.source}) {self.ours!r}"
        return f"{said}. Write: {self.line}" if self.line else said


def format_differences(differences: Sequence[Difference]) -> list[str]:
    """Return differences as text lines; a difference that many layers share is one line.

    >>> some = [Difference(f"bn{n}", f"norm{n}", "epsilon", 1e-5, 1e-3, f"norm{n}.epsilon = 1e-05") for n in range(9)]
    >>> print(*format_differences(some))
    epsilon is 0.001, in the source 1e-05, in 9 layers: norm0, norm1, norm2 and 6 more. Write: norm0.epsilon = 1e-05
    """
    groups: dict[str, list[Difference]] = {}
    for each in differences:
        groups.setdefault(repr((each.attribute, each.ours, each.theirs, bool(each.line))), []).append(each)
    lines: list[str] = []
    for group in groups.values():
        if len(group) <= _MAX_LISTED:
            lines += map(str, group)
            continue
        first = group[0]
        shown = ", ".join(each.target for each in group[:_MAX_NAMED])
        said = f"{first.attribute} is {first.theirs!r}, in the source {first.ours!r}, in {len(group)} layers: {shown}"
        line = f". Write: {first.line}" if first.line else ""
        lines.append(f"{said} and {len(group) - _MAX_NAMED} more{line}")
    return lines


class AttributeComparison(NamedTuple):
    """Result of comparing the attributes of two models.

    Attributes:
        differences: attributes that differ.
        conventions: differences between the two frameworks that hold for every model, a sentence each.
        unseen: attribute -> number of layers that report it on only one side.
    """

    differences: list[Difference]
    conventions: list[str]
    unseen: Mapping[str, int]


def compare_attributes(source: Inventory, target: Inventory, pairs: Sequence[LayerMatch]) -> AttributeComparison:
    """Compare the attributes of matched layers, and of layers without arrays if both models have the same ones."""
    differences: list[Difference] = []
    conventions: dict[str, None] = {}
    unseen: dict[str, int] = {}
    for each in pairs:
        _compare_pair(each.source, each.target, each.fit, differences, conventions, unseen)
    for one, other in _pair_arrayless_layers(source, target):
        _compare_pair(one, other, LayerFit(one.forms[0], other.forms[0]), differences, conventions, unseen)
    differences += _activation_differences(source, target)
    counts = len(_activation_uses(source)), len(_activation_uses(target))
    if all(counts) and counts[0] != counts[1]:  # which is which is not known
        unseen["activation"] = unseen.get("activation", 0) + abs(counts[0] - counts[1])
    return AttributeComparison(differences, list(conventions), unseen)


def _compare_pair(
    source: NativeLayer,
    target: NativeLayer,
    fit: LayerFit,
    differences: list[Difference],
    conventions: dict[str, None],
    unseen: dict[str, int],
) -> None:
    kind = fit.source.kind
    if kind != fit.target.kind:
        return
    ours, theirs = dict(to_json_value(fit.source.attributes)), dict(to_json_value(fit.target.attributes))
    for name in sorted({*ours, *theirs}):
        attribute = find_attribute(kind, name)
        if not attribute.compared or (name == "activation" and kind not in RECURRENT_KINDS):
            continue  # the activations of other layers: `_activation_differences`
        if name not in ours or name not in theirs:
            usual = _is_neutral_value(attribute, ours.get(name, theirs.get(name)), fit, source)
            if not usual and (kind not in KINDS or name in KINDS[kind].attributes):
                unseen[name] = unseen.get(name, 0) + 1
        elif not _has_equal_attribute(name, ours, theirs, fit, source):
            if attribute.convention is not None:
                conventions[attribute.convention(ours[name])] = None
                continue
            line = _setting_line(target.lines.get(name), ours[name])
            values = ours[name], theirs[name]
            differences.append(Difference(source.path, target.path, name, *values, line, attribute.structural))


def _is_neutral_value(attribute: Attribute, value: Any, fit: LayerFit, source: NativeLayer) -> bool:
    """Return whether an attribute that one framework lacks has the value that is equivalent to its absence."""
    if value is None or attribute.convention is not None:
        return True
    neutral = attribute.neutral
    if callable(neutral):
        neutral = neutral(fit.source.shapes(source.arrays))
    return neutral is not None and _is_same_value(value, neutral)


def _setting_line(write: Callable[[Any], str] | None, value: Any) -> str:
    return "" if write is None else write(value)


def _has_equal_attribute(
    name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], fit: LayerFit, source: NativeLayer
) -> bool:
    one, other = ours[name], theirs[name]
    if name == "padding":
        kernel = fit.source.shapes(source.arrays).get("kernel") or (*ours.get("window", ()), 0, 0)  # a pooling has none
        return bool(_normalize_padding(one, ours, kernel) == _normalize_padding(other, theirs, kernel))
    return _is_same_value(one, other)


def _is_same_value(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float | int) and isinstance(other, float | int)
    if numbers and not isinstance(one, bool):
        return bool(math.isclose(one, other, rel_tol=_RELATIVE_TOLERANCE))
    return bool(one == other)


def _normalize_padding(value: Any, attributes: Mapping[str, Any], kernel: Sequence[int]) -> Any:
    """Return zero padding in one form: pairs if they do not depend on the input's size, else the name."""
    spatial = len(kernel) - 2
    strides = attributes.get("strides") or [1] * spatial
    dilation = attributes.get("dilation") or [1] * spatial
    if value == "valid":
        return [[0, 0]] * spatial
    reach = [(kernel[axis] - 1) * dilation[axis] for axis in range(spatial)]
    if value == "same" and (all(stride == 1 for stride in strides) or not any(reach)):
        return [[each // 2, each - each // 2] for each in reach]
    if value == "causal":
        return [[each, 0] for each in reach]
    return value


def _pair_arrayless_layers(source: Inventory, target: Inventory) -> list[tuple[NativeLayer, NativeLayer]]:
    """Return dropouts, poolings and resizes in pairs, if both models have the same number of a kind."""
    if not source.ordered or not target.ordered:
        return []
    pairs: list[tuple[NativeLayer, NativeLayer]] = []
    for kind in (kind for kind, row in KINDS.items() if row.paired_in_order):
        ours, theirs = ([layer for layer in side.layers if layer.forms[0].kind == kind] for side in (source, target))
        if len(ours) == len(theirs):
            pairs += zip(ours, theirs, strict=True)
    return pairs


class _ActivationUse(NamedTuple):
    """An activation: attribute of a layer, or a separate layer."""

    path: str
    attributes: Mapping[str, Any]
    lines: Mapping[str, Callable[[Any], str]]


def _activation_differences(source: Inventory, target: Inventory) -> list[Difference]:
    """Compare activations in order if both sides report the same number; otherwise the GELU variants and slopes in
    use."""
    ours, theirs = _activation_uses(source), _activation_uses(target)
    if source.ordered and target.ordered and len(ours) == len(theirs):
        couples = list(zip(ours, theirs, strict=True))
    else:
        couples = []
        for family in ("gelu", "leaky_relu"):
            of_ours = [act for act in ours if str(act.attributes.get("activation")).startswith(family)]
            of_theirs = [act for act in theirs if str(act.attributes.get("activation")).startswith(family)]
            if len({str(act.attributes) for act in of_ours}) == 1:
                couples += [(of_ours[0], act) for act in of_theirs]
    found = []
    for one, other in couples:
        for name in ("activation", "negative_slope", "alpha", "axis"):
            mine, yours = one.attributes.get(name), other.attributes.get(name)
            if mine is not None and yours is not None and not _is_same_value(mine, yours):
                line = _setting_line(other.lines.get(name), mine)
                found.append(Difference(one.path, other.path, name, mine, yours, line))
    return found


def _activation_uses(inventory: Inventory) -> list[_ActivationUse]:
    found = []
    for layer in inventory.layers:
        form = layer.forms[0]
        said = form.attributes.get("activation")
        if form.kind in RECURRENT_KINDS or said in (None, "linear"):
            continue
        found.append(_ActivationUse(layer.path, form.attributes, layer.lines))
    return found
