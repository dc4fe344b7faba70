"""What weights do not carry, compared: epsilons, momenta, paddings, activations, slopes, rates. Called by `port`.

Only what both sides show is compared; what one of them does not show is counted, so that silence is not taken for
agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.kinds import default_scale, known, plain
from polyamp.porting.matching.fits import Fit
from polyamp.porting.matching.matching import Match

_LAYOUT: Final = ("channels", "inputs", "outputs")
"""Attributes that say how numbers lie; both sides' layouts are the converters' business."""
_CONVENTIONS: Final = ("mask", "unbiased")
"""Attributes that every layer of a framework has alike: a remark, no difference of these two models."""
_WITHOUT: Final[dict[str, Any]] = {
    "scale": 1.0,
    "dropout": 0.0,
    "recurrent_dropout": 0.0,
    "padding_mode": "zeros",
    "reverse": False,
    "groups": 1,
}
"""What a layer does that lacks an attribute."""
RECURRENT: Final = ("lstm", "gru", "simple_rnn")
"""Kinds whose activation is within them, and follows nothing."""
_APART: Final = 8
"""How many layers with the same difference are listed each for itself."""
_NAMED: Final = 3
"""How many of more are named."""
_CLOSE: Final = 1e-6
"""Relative distance below which two numbers are one: an epsilon kept in float32 is not 1e-5 to the last digit."""


class Difference(NamedTuple):
    """Something that is not in the weights, and is not alike.

    Attributes:
        source: path of the source's layer.
        target: path of the target's.
        attribute: its name, as in the table of kinds.
        ours: the source's value.
        theirs: the target's.
        line: the line of code that makes the target like the source; "" where the framework has none.
        structural: whether the arrays mean another function because of it.
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


def listed(differences: Sequence[Difference]) -> list[str]:
    """Differences as lines to read: one that many layers have alike is one line.

    >>> some = [Difference(f"bn{n}", f"norm{n}", "epsilon", 1e-5, 1e-3, f"norm{n}.epsilon = 1e-05") for n in range(9)]
    >>> print(*listed(some))
    epsilon is 0.001, in the source 1e-05, in 9 layers: norm0, norm1, norm2 and 6 more. Write: norm0.epsilon = 1e-05
    """
    groups: dict[str, list[Difference]] = {}
    for each in differences:
        groups.setdefault(repr((each.attribute, each.ours, each.theirs, bool(each.line))), []).append(each)
    lines: list[str] = []
    for group in groups.values():
        if len(group) <= _APART:
            lines += map(str, group)
            continue
        first = group[0]
        shown = ", ".join(each.target for each in group[:_NAMED])
        said = f"{first.attribute} is {first.theirs!r}, in the source {first.ours!r}, in {len(group)} layers: {shown}"
        line = f". Write: {first.line}" if first.line else ""
        lines.append(f"{said} and {len(group) - _NAMED} more{line}")
    return lines


class Compared(NamedTuple):
    """What came of comparing two models.

    Attributes:
        differences: what is not alike.
        conventions: what the two frameworks mean otherwise, whatever the model, a sentence each.
        unseen: attribute -> how many layers show it on one side alone.
    """

    differences: list[Difference]
    conventions: list[str]
    unseen: Mapping[str, int]


def compare(source: Inventory, target: Inventory, pairs: Sequence[Match]) -> Compared:
    """The attributes of matched layers, and those of layers without arrays where both models have them alike."""
    differences: list[Difference] = []
    conventions: dict[str, None] = {}
    unseen: dict[str, int] = {}
    for each in pairs:
        _pair(each.source, each.target, each.fit, differences, conventions, unseen)
    for one, other in _without_arrays(source, target):
        _pair(one, other, Fit(one.forms[0], other.forms[0]), differences, conventions, unseen)
    differences += _activations(source, target)
    return Compared(differences, list(conventions), unseen)


def _pair(
    source: NativeLayer,
    target: NativeLayer,
    way: Fit,
    differences: list[Difference],
    conventions: dict[str, None],
    unseen: dict[str, int],
) -> None:
    ours, theirs = dict(plain(way.source.attributes)), dict(plain(way.target.attributes))
    kind = known(way.source.kind)
    structural = kind.structural if kind is not None else ()
    if way.source.kind != way.target.kind:
        return
    own = () if way.source.kind in RECURRENT else ("activation",)  # those of other layers: `_activations`
    for name in sorted({*ours, *theirs} - {*_LAYOUT, *own}):
        if name not in ours or name not in theirs:
            usual = _usual(name, ours.get(name, theirs.get(name)), way, source)
            if not usual and (kind is None or name in kind.attributes):
                unseen[name] = unseen.get(name, 0) + 1
            continue
        if _equal(name, ours, theirs, way, source):
            continue
        if name in _CONVENTIONS:
            conventions[_convention(name, ours[name])] = None
            continue
        differences.append(
            Difference(
                source.path,
                target.path,
                name,
                ours[name],
                theirs[name],
                _line(target.lines.get(name), ours[name]),
                name in structural,
            )
        )


def _usual(name: str, value: Any, way: Fit, source: NativeLayer) -> bool:
    """Whether an attribute that one framework does not even have is what it is without it."""
    if name == "scale" and way.source.kind == "attention" and value is not None:
        return _same(value, default_scale(way.source.shapes(source.arrays)["query_kernel"][-1]))
    return name in _CONVENTIONS or value is None or (name in _WITHOUT and _same(value, _WITHOUT[name]))


def _line(write: Callable[[Any], str] | None, value: Any) -> str:
    return "" if write is None else write(value)


def _convention(name: str, value: Any) -> str:
    if name == "mask":
        kept = "keep" if value == "keep" else "drop"
        return f"attention masks: a true means {kept!r} in the source, and the opposite in the target"
    kind = "n - 1" if value else "n"
    return f"running variances: the source divides by {kind}, the target by {'n' if value else 'n - 1'}, as it trains"


def _equal(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], way: Fit, source: NativeLayer) -> bool:
    one, other = ours[name], theirs[name]
    if name == "padding":
        kernel = way.source.shapes(source.arrays).get("kernel") or (*ours.get("window", ()), 0, 0)  # a pooling has none
        return bool(_padding(one, ours, kernel) == _padding(other, theirs, kernel))
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float | int) and isinstance(other, float | int)
    if numbers and not isinstance(one, bool):
        return bool(math.isclose(one, other, rel_tol=_CLOSE))
    return bool(one == other)


def _padding(value: Any, attributes: Mapping[str, Any], kernel: Sequence[int]) -> Any:
    """Zero padding in one form: pairs where they do not hang on the input's size, else the word."""
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


def _without_arrays(source: Inventory, target: Inventory) -> list[tuple[NativeLayer, NativeLayer]]:
    """Dropouts, poolings and resizes in pairs, where both models have equally many of a kind as layers."""
    if not source.ordered or not target.ordered:
        return []
    pairs: list[tuple[NativeLayer, NativeLayer]] = []
    for kind in ("dropout", "pooling", "resize"):
        ours, theirs = ([layer for layer in side.layers if layer.forms[0].kind == kind] for side in (source, target))
        if len(ours) == len(theirs):
            pairs += zip(ours, theirs, strict=True)
    return pairs


class _Act(NamedTuple):
    """An activation: of a layer, or one of its own."""

    path: str
    attributes: Mapping[str, Any]
    lines: Mapping[str, Callable[[Any], str]]


def _activations(source: Inventory, target: Inventory) -> list[Difference]:
    """Activations, in order if both sides show equally many; otherwise the kinds of GELU and slopes that each uses."""
    ours, theirs = _acts(source), _acts(target)
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
            if mine is not None and yours is not None and not _same(mine, yours):
                line = _line(other.lines.get(name), mine)
                found.append(Difference(one.path, other.path, name, mine, yours, line))
    return found


def _acts(inventory: Inventory) -> list[_Act]:
    found = []
    for layer in inventory.layers:
        form = layer.forms[0]
        said = form.attributes.get("activation")
        if form.kind in RECURRENT or said in (None, "linear"):
            continue
        found.append(_Act(layer.path, form.attributes, layer.lines))
    return found
