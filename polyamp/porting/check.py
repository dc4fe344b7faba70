"""Comparison for `port(..., check=batch)`: outputs and gradients of both models on one batch in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

import numpy as np

from polyamp.contract import registry
from polyamp.errors import PortError, join_first
from polyamp.porting.layouts.activations import apply_activation
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.input_order import ChannelPosition
from polyamp.porting.layouts.inventory import Inventory, canonical_gradients
from polyamp.porting.layouts.layer_kinds import RECURRENT_KINDS
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.matching.attribute_differences import format_differences
from polyamp.porting.matching.flatten_order import ChannelOrder
from polyamp.porting.matching.matching import LayerMatch
from polyamp.porting.model_side import ModelSide
from polyamp.porting.port_report import CheckResult
from polyamp.porting.transfer_plan import TransferPlan
from polyamp.trees import leaves, map_tree

OUTPUT_TOLERANCE: Final = 1e-5
"""Largest accepted relative error of outputs."""
GRADIENT_TOLERANCE: Final = 1e-4
"""Largest accepted relative error of a parameter's gradient."""
_FLOOR: Final = 1e-2
"""Smallest denominator of a gradient's relative error, as a share of the largest gradient value of all parameters. Some
gradients are 0 except for rounding, such as that of a key's bias."""
_MAX_LISTED: Final = 8
"""Largest number of layers listed in a message."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs for a check, one for each side if they differ.

    Args:
        source: an array, a tuple of positional arguments or a mapping of keyword arguments, of NumPy arrays or of a
            framework's, which are copied to NumPy.
        target: the same for the target; by default the source's, with the channels of images moved to the target's
            position.
        outputs: largest accepted relative error of outputs.
        gradients: largest accepted relative error of a parameter's gradient.

    Example:
        >>> import numpy as np
        >>> Batch(np.ones((2, 3, 8, 8)), np.ones((2, 8, 8, 3)), outputs=1e-4).gradients
        0.0001
    """

    source: Any
    target: Any = None
    outputs: float = OUTPUT_TOLERANCE
    gradients: float = GRADIENT_TOLERANCE

    @classmethod
    def of(cls, check: Any) -> Batch:
        """Return the batch for the user's `check` argument."""
        given = check if isinstance(check, Batch) else cls(check)
        source, target = (map_tree(_host_array, each) for each in (given.source, given.target))
        return dataclasses.replace(given, source=source, target=target)


def _host_array(leaf: Any) -> Any:
    """Return a framework's array as a NumPy array, which models of every framework take; another value as it is."""
    if isinstance(leaf, np.ndarray | np.generic) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    backend = registry.backend_of_type(type(leaf))
    return leaf if backend is None or str(leaf.dtype).startswith("key<") else backend.to_numpy(leaf)


def compare_evaluations(
    source: ModelSide, target: ModelSide, plan: TransferPlan, evaluations: tuple[Evaluation, Evaluation], batch: Batch
) -> CheckResult:
    """Return the errors of outputs and gradients of two evaluations.

    An error message also lists attributes that differ, because they are its likely cause.

    Args:
        source: the source.
        target: the target.
        plan: the transfer.
        evaluations: of the source, and of the target with the source's values.
        batch: the tolerances.

    Raises:
        PortError: the target computes something else.
    """
    one, two = evaluations
    adapter = ChannelOrderAdapter(source.inventory, target.inventory)
    differences = plan.comparison.differences
    modules = _module_errors(one, two, plan.pairs, adapter)
    lines = _call_orders(source.inventory, target.inventory, plan.pairs, one)
    where = _locate_divergence(modules, batch.outputs, lines, {each.target for each in differences})
    said = "".join(f"\n  {each}" for each in format_differences(differences))
    why = f"\nThe weights do not carry these, and they differ:{said}" if said else ""
    expected = [adapter.like(*both) for both in zip(one.outputs, two.outputs, strict=False)]
    expected += one.outputs[len(expected) :]
    shapes = [[list(each.shape) for each in group] for group in (expected, two.outputs)]
    if shapes[0] != shapes[1]:
        raise PortError(
            f"check: the source's outputs have shapes {shapes[0]} and the target's {shapes[1]}. {where}{why}"
        )
    outputs = max((relative_error(a, b) for a, b in zip(expected, two.outputs, strict=True)), default=0.0)
    if not outputs <= batch.outputs:
        raise PortError(
            f"check: the outputs differ by {outputs:.1e} (relative), {batch.outputs:g} is allowed. {where}{why}"
        )
    gradients = _gradient_errors(one, two, plan.pairs, plan.channel_orders)
    worst = max(gradients, key=gradients.__getitem__, default=None)
    if worst is not None and not gradients[worst] <= batch.gradients:
        first = next(name for name, error in gradients.items() if not error <= batch.gradients)
        raise PortError(
            f"check: outputs agree within {outputs:.1e}, but the gradient of {worst} differs by {gradients[worst]:.1e} "
            f"(relative), {batch.gradients:g} is allowed. The first in the model's order: {first}.{why} Behind many "
            "ReLUs a rounding error can switch one: polyamp.porting.Batch(batch, gradients=1e-2) allows more."
        )
    return CheckResult(outputs, gradients, modules)


class ChannelOrderAdapter:
    """Conversion of images from the source's to the target's channel position.

    Args:
        source: the source's layers.
        target: the target's.
        position: the target's channel position, if its layers do not show it.
    """

    def __init__(self, source: Inventory, target: Inventory, position: ChannelPosition | None = None) -> None:
        self._rank = source.spatial + 2 if source.spatial else 0
        self._from, self._to = source.channels, target.channels or position

    def array(self, array: Array) -> Array:
        """Return the array with channels at the target's position, if it has the rank of an image."""
        if not self._rank or array.ndim != self._rank or None in (self._from, self._to) or self._from == self._to:
            return array
        return np.moveaxis(array, 1, -1) if self._from == "first" else np.moveaxis(array, -1, 1)

    def like(self, array: Array, other: Array) -> Array:
        """Return the array with channels at the target's position, or as it is if it then has the target's shape: a
        target may turn its images itself."""
        turned = self.array(array)
        return array if turned.shape != other.shape and array.shape == other.shape else turned

    def tree(self, batch: Any) -> Any:
        """Return a batch with every image converted; the batch itself if that changes nothing."""
        if not any(isinstance(leaf, np.ndarray) and self.array(leaf) is not leaf for _, leaf in leaves(batch)):
            return batch
        return map_tree(lambda leaf: self.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


def relative_error(ours: Array, theirs: Array, floor: float = 0.0) -> float:
    """Return the largest difference over the largest value; infinite if only one side has a NaN at some position."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:
        return 0.0
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    difference = float(np.max(np.abs(a - b)))
    if np.isnan(difference):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return difference / max(float(np.max(np.abs(a))), float(np.max(np.abs(b))), floor, 1e-30)


def _module_errors(
    one: Evaluation, two: Evaluation, pairs: Sequence[LayerMatch], adapter: ChannelOrderAdapter
) -> dict[str, float]:
    """Return the errors of matched layers' outputs, in the source's call order."""
    partner = {each.source.path: each for each in pairs}
    found = {}
    for path, output in one.modules.items():
        if path not in partner or partner[path].target.path not in two.modules:
            continue
        name = partner[path].target.path
        shown = _outputs_after_activation(partner[path], output, two.modules[name])
        if shown is None:
            continue
        output, other = shown
        mine = adapter.array(output) if adapter.array(output).shape == other.shape else output
        if np.squeeze(mine).shape == np.squeeze(other).shape:
            found[name] = relative_error(np.squeeze(mine), np.squeeze(other))
        elif not _can_broadcast(mine.shape, other.shape):  # else one side repeats rows that the other returns once
            found[name] = float("inf")
    return found


def _outputs_after_activation(match: LayerMatch, ours: Array, theirs: Array) -> tuple[Array, Array] | None:
    """Return both outputs after an activation that only one of the layers includes; None if the activation is
    unknown."""
    acts = [form.attributes.get("activation") or "linear" for form in (match.fit.source, match.fit.target)]
    if match.fit.source.kind in RECURRENT_KINDS or (acts[0] == "linear") == (acts[1] == "linear"):
        return ours, theirs
    made = apply_activation(str(acts[1]), ours) if acts[0] == "linear" else apply_activation(str(acts[0]), theirs)
    if made is None:
        return None
    return (made, theirs) if acts[0] == "linear" else (ours, made)


def _can_broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        return bool(np.broadcast_shapes(one, other) in (one, other))
    except ValueError:
        return False


def _locate_divergence(
    modules: Mapping[str, float], allowed: float, lines: Sequence[Sequence[str]], known_paths: Container[str]
) -> str:
    """Return a sentence on where the outputs first differ.

    Args:
        modules: path -> error of its output, in the order of calls.
        allowed: largest accepted error.
        lines: paths of matched layers in known call orders.
        known_paths: paths of layers whose difference has a known cause, so that no other layers are searched.
    """
    last = None
    for path, error in modules.items():
        if not error <= allowed:
            before = f"after {last!r}, which agrees, " if last is not None else ""
            said = f"The first layer whose output differs, {before}is {path!r} ({error:.1e})."
            return said if path in known_paths else said + _unobserved_layers(modules, lines, last, path)
        last = path
    if last is None:
        return "No layer shows its output on both sides." + _unobserved_layers(modules, lines, None, None)
    said = f"All matched layers agree, {last!r} the last of them: what differs comes after it."
    return said + _unobserved_layers(modules, lines, last, None)


def _unobserved_layers(
    modules: Mapping[str, float], lines: Sequence[Sequence[str]], last: str | None, first: str | None
) -> str:
    """Return the unobserved layers between the last that agrees and the first that does not."""
    found: list[str] = []
    for lined in lines if last is not None or first is None else lines[:1]:  # parameters may be defined first
        known = {*modules, *(lines[0] if lined is not lines[0] else ())}
        if {each for each in (last, first) if each is not None} <= set(lined):
            begin = 0 if last is None else lined.index(last) + 1
            end = len(lined) if first is None else lined.index(first)
            found += [path for path in lined[begin:end] if path not in known]
    if not found:
        return ""
    return (
        f" Layers there whose outputs are not shown by both sides: {join_first(list(map(repr, found)), _MAX_LISTED)}."
    )


def _call_orders(source: Inventory, target: Inventory, pairs: Sequence[LayerMatch], one: Evaluation) -> list[list[str]]:
    """Return the target's paths of matched layers in the source's call order. A second order adds layers that no call
    showed, as defined by the side whose order is meaningful."""
    partner = {each.source.path: each.target.path for each in pairs}
    called = [partner[path] for path in one.modules if path in partner]
    if not source.ordered and not target.ordered:
        return [called]
    place = {layer.path: number for number, layer in enumerate((source if source.ordered else target).layers)}
    own = [((each.source if source.ordered else each.target).path, each.target.path) for each in pairs]
    defined = [path for _, path in sorted((place[mine], path) for mine, path in own if mine in place)]
    return [called, defined]


def _gradient_errors(
    one: Evaluation, two: Evaluation, pairs: Sequence[LayerMatch], orders: Mapping[str, ChannelOrder]
) -> dict[str, float]:
    """Return the gradient errors, in canonical layout, of parameters trained on both sides."""
    largest = max((float(np.max(np.abs(each))) for each in one.gradients.values() if each.size), default=0.0)
    gradients = [
        (
            canonical_gradients(each.source, each.fit.source, one.gradients),
            canonical_gradients(each.target, each.fit.target, two.gradients),
        )
        for each in pairs
    ]
    for side in (0, 1):
        _add_tied_gradients(gradients, pairs, side)
    found = {}
    for each, (ours, theirs) in zip(pairs, gradients, strict=True):
        if not ours or not theirs:
            continue
        if each.target.path in orders:
            ours = orders[each.target.path].apply(ours)
        for name in (name for name in ours if name in theirs):
            found[f"{each.target.path}/{name}"] = relative_error(
                ours[name].read(), theirs[name].read(), _FLOOR * largest
            )
    return found


def _add_tied_gradients(
    gradients: Sequence[tuple[dict[str, Lazy], dict[str, Lazy]]], pairs: Sequence[LayerMatch], side: int
) -> None:
    """Add the gradients of arrays that one side alone ties to another array to those of that array. Where it is one
    array in two places its gradient is the sum.

    Args:
        gradients: canonical gradients of every pair, of the source and of the target; changed in place.
        pairs: the pairs.
        side: the side with the ties, 0 for the source.
    """
    sides = [((each.source, each.fit.source), (each.target, each.fit.target))[side] for each in pairs]
    owners = {
        leaf.name: (number, name)
        for number, (layer, _) in enumerate(sides)
        for name, leaf in layer.leaves.items()
        if leaf.tied is None
    }
    for number, (layer, form) in enumerate(sides):
        for rule in form.rules:
            tied = layer.leaves[rule.native[0]].tied
            if len(rule.native) > 1 or len(rule.canonical) > 1 or tied not in owners:
                continue
            gradient = gradients[number][1 - side].pop(rule.canonical[0], None)
            if gradient is None:  # the other side ties it too
                continue
            made = dataclasses.replace(form, rules=(rule,)).leaves(
                {rule.canonical[0]: gradient}, layer.arrays, moments=True
            )
            owner, name = owners[tied]
            own = dataclasses.replace(
                sides[owner][1], rules=tuple(each for each in sides[owner][1].rules if each.native == (name,))
            )
            for canonical, part in own.arrays({name: made[rule.native[0]]}, gradients=True).items():
                whole = gradients[owner][1 - side]
                whole[canonical] = Lazy.of(part.read() + whole[canonical].read()) if canonical in whole else part
