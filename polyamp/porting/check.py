"""`port(..., check=batch)`: both models run on one batch in float32, and outputs and gradients are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from polyamp.errors import PortError
from polyamp.porting.layouts.activations import applied
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.matching.differences import RECURRENT, Difference, listed
from polyamp.porting.matching.flatten import Order
from polyamp.porting.matching.matching import Match
from polyamp.porting.side import Side
from polyamp.trees import map_tree

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

OUTPUTS: Final = 1e-5
"""Largest relative error of outputs that passes."""
GRADIENTS: Final = 1e-4
"""The same of a parameter's gradient."""
_FLOOR: Final = 1e-2
"""A gradient is compared with the largest of its parameter, or with this share of the largest of all: a key's bias has
a gradient of 0 but for rounding."""
_SEED: Final = 0
_NAMED: Final = 8
"""How many layers a message lists."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs for a check, one for each side where they differ.

    Args:
        source: an array, a tuple of positional arguments or a mapping of keyword arguments, of NumPy arrays.
        target: the same for the target; by default the source's, with the channels of images put where the target has
            them.
        outputs: largest relative error of outputs that passes.
        gradients: the same of a parameter's gradient.

    Example:
        >>> import numpy as np
        >>> Batch(np.ones((2, 3, 8, 8)), np.ones((2, 8, 8, 3)), outputs=1e-4).gradients
        0.0001
    """

    source: Any
    target: Any = None
    outputs: float = OUTPUTS
    gradients: float = GRADIENTS

    @classmethod
    def of(cls, check: Any) -> Batch:
        """What a user gave as `check`."""
        return check if isinstance(check, Batch) else cls(check)


@dataclasses.dataclass(frozen=True)
class Checked:
    """What a check measured.

    Attributes:
        outputs: largest relative error of the outputs: the largest difference over the largest output.
        gradients: "path/array" of the target -> relative error of its gradient.
        modules: path of a layer of the target -> relative error of its output, where both sides show it.
    """

    outputs: float
    gradients: Mapping[str, float]
    modules: Mapping[str, float]

    def __str__(self) -> str:
        worst = max(self.gradients, key=self.gradients.__getitem__, default=None)
        said = f"checked in float32: outputs within {self.outputs:.1e}"
        if worst is None:
            return said
        return f"{said}, gradients of {len(self.gradients)} parameters within {self.gradients[worst]:.1e} ({worst})"


def filled_and_checked(
    source: Side,
    target: Side,
    leaves: Mapping[str, Lazy],
    pairs: Sequence[Match],
    turned: Mapping[str, Order],
    batch: Batch,
    differences: Sequence[Difference],
) -> tuple[Any, Checked]:
    """The filled target, after it proved to compute what the source computes.

    What the weights do not carry and differs is said with an error: it is likely the reason.

    Raises:
        PortError: it does not; the target has its old values again.
    """
    assert target.converter is not None
    if source.converter is None:
        raise PortError(
            "check= runs both models, and the source is no model but its weights. Port without it, or give the model."
        )
    kept = {
        leaf.name: Lazy.of(_copy(leaf.array))
        for layer in target.inventory.layers
        for leaf in layer.leaves.values()
        if target.converter.in_place and leaf.name in leaves
    }
    filled = target.converter.fill(target.model, leaves)
    try:
        return filled, _checked(source, target._replace(model=filled), pairs, turned, batch, differences)
    except BaseException:
        if kept:
            target.converter.fill(filled, kept)
        raise


def _copy(array: Lazy) -> Array:
    import numpy as np

    return np.array(array.read())


def _checked(
    source: Side,
    target: Side,
    pairs: Sequence[Match],
    turned: Mapping[str, Order],
    batch: Batch,
    differences: Sequence[Difference],
) -> Checked:
    assert source.converter is not None
    assert target.converter is not None
    across = Across(source.inventory, target.inventory)
    given: list[Array] = []
    shapes: list[list[list[int]]] = []

    def ours(outputs: Sequence[Array]) -> list[Array]:
        import numpy as np

        rng = np.random.default_rng(_SEED)
        given[:] = [np.asarray(rng.standard_normal(output.shape), np.float32) for output in outputs]
        return given

    def theirs(outputs: Sequence[Array]) -> list[Array]:
        import numpy as np

        turned_back = [across.array(each) for each in given]
        shapes[:] = [[list(each.shape) for each in group] for group in (turned_back, outputs)]
        alike = shapes[0] == shapes[1]
        return turned_back if alike else [np.zeros(output.shape, np.float32) for output in outputs]

    one = source.converter.evaluate(source.model, _packed(batch.source), ours)
    two = target.converter.evaluate(target.model, _packed(batch.target), theirs)
    modules = _modules(one, two, pairs, across)
    lines = _lines(source.inventory, target.inventory, pairs, one)
    where = _where(modules, batch.outputs, lines, {each.target for each in differences})
    said = "".join(f"\n  {each}" for each in listed(differences))
    why = f"\nThe weights do not carry these, and they differ:{said}" if said else ""
    if shapes[0] != shapes[1]:
        raise PortError(
            f"check: the source's outputs have shapes {shapes[0]} and the target's {shapes[1]}. {where}{why}"
        )
    outputs = max((_error(across.array(a), b) for a, b in zip(one.outputs, two.outputs, strict=True)), default=0.0)
    if not outputs <= batch.outputs:
        raise PortError(
            f"check: the outputs differ by {outputs:.1e} (relative), {batch.outputs:g} is allowed. {where}{why}"
        )
    gradients = _gradients(one, two, pairs, turned)
    worst = max(gradients, key=gradients.__getitem__, default=None)
    if worst is not None and not gradients[worst] <= batch.gradients:
        first = next(name for name, error in gradients.items() if not error <= batch.gradients)
        raise PortError(
            f"check: outputs agree within {outputs:.1e}, but the gradient of {worst} differs by {gradients[worst]:.1e} "
            f"(relative), {batch.gradients:g} is allowed. The first in the model's order: {first}.{why} Behind many "
            "ReLUs a rounding error can switch one: polyamp.porting.Batch(batch, gradients=1e-2) allows more."
        )
    return Checked(outputs, gradients, modules)


class Across:
    """Images of the source as the target has them.

    Args:
        source: the source's layers.
        target: the target's.
    """

    def __init__(self, source: Inventory, target: Inventory) -> None:
        self._rank = source.spatial + 2 if source.spatial else 0
        self._from, self._to = source.channels, target.channels

    def array(self, array: Array) -> Array:
        """The array with its channels where the target has them, if it has the rank of an image."""
        import numpy as np

        if not self._rank or array.ndim != self._rank or None in (self._from, self._to) or self._from == self._to:
            return array
        return np.moveaxis(array, 1, -1) if self._from == "first" else np.moveaxis(array, -1, 1)

    def tree(self, batch: Any) -> Any:
        """A batch with every image so."""
        import numpy as np

        return map_tree(lambda leaf: self.array(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


def _packed(batch: Any) -> Any:
    """A batch whose arrays lie in memory as their axes say: torch's convolutions take another layout for a wish, and
    their backward pass of it can end the process (2.13 on the CPU). A copy: an axis of length 1 may have any stride."""
    import numpy as np

    return map_tree(lambda leaf: leaf.copy("C") if isinstance(leaf, np.ndarray) else leaf, batch)


def _error(ours: Array, theirs: Array, floor: float = 0.0) -> float:
    """The largest difference over the largest value; infinite where one has a NaN that the other has not."""
    import numpy as np

    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.size:
        return 0.0
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    difference = float(np.max(np.abs(a - b)))
    if np.isnan(difference):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return difference / max(float(np.max(np.abs(a))), float(np.max(np.abs(b))), floor, 1e-30)


def _modules(one: Evaluation, two: Evaluation, pairs: Sequence[Match], across: Across) -> dict[str, float]:
    """Errors of the outputs of matched layers, in the order in which the source calls them."""
    import numpy as np

    partner = {each.source.path: each for each in pairs}
    found = {}
    for path, output in one.modules.items():
        if path not in partner or partner[path].target.path not in two.modules:
            continue
        name = partner[path].target.path
        shown = _alike(partner[path], output, two.modules[name])
        if shown is None:
            continue
        output, other = shown
        mine = across.array(output) if across.array(output).shape == other.shape else output
        if np.squeeze(mine).shape == np.squeeze(other).shape:
            found[name] = _error(np.squeeze(mine), np.squeeze(other))
        elif not _broadcasts(mine.shape, other.shape):  # else one side gives rows that the other gives once
            found[name] = float("inf")
    return found


def _alike(match: Match, ours: Array, theirs: Array) -> tuple[Array, Array] | None:
    """Both outputs behind the activation that one of the layers has in it; None if nobody knows what it does."""
    acts = [form.attributes.get("activation") or "linear" for form in (match.fit.source, match.fit.target)]
    if match.fit.source.kind in RECURRENT or (acts[0] == "linear") == (acts[1] == "linear"):
        return ours, theirs
    made = applied(str(acts[1]), ours) if acts[0] == "linear" else applied(str(acts[0]), theirs)
    if made is None:
        return None
    return (made, theirs) if acts[0] == "linear" else (ours, made)


def _broadcasts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    import numpy as np

    try:
        return bool(np.broadcast_shapes(one, other) in (one, other))
    except ValueError:
        return False


def _where(
    modules: Mapping[str, float], allowed: float, lines: Sequence[Sequence[str]], explained: Container[str]
) -> str:
    """The sentence that says where the two part.

    Args:
        modules: path -> error of its output, in the order of calls.
        allowed: the error that passes.
        lines: the paths of matched layers in orders that are known.
        explained: paths of layers that are known to differ, for which no others are to be looked at.
    """
    last = None
    for path, error in modules.items():
        if not error <= allowed:
            before = f"after {last!r}, which agrees, " if last is not None else ""
            said = f"The first layer whose output differs, {before}is {path!r} ({error:.1e})."
            return said if path in explained else said + _hidden(modules, lines, last, path)
        last = path
    if last is None:
        return "No layer shows its output on both sides." + _hidden(modules, lines, None, None)
    said = f"All matched layers agree, {last!r} the last of them: what differs comes after it."
    return said + _hidden(modules, lines, last, None)


def _hidden(modules: Mapping[str, float], lines: Sequence[Sequence[str]], last: str | None, first: str | None) -> str:
    """The layers between the last that agrees and the first that does not whose outputs nobody saw."""
    found: list[str] = []
    for lined in lines if last is not None or first is None else lines[:1]:  # parameters may be defined before all
        known = {*modules, *(lines[0] if lined is not lines[0] else ())}
        if {each for each in (last, first) if each is not None} <= set(lined):
            begin = 0 if last is None else lined.index(last) + 1
            end = len(lined) if first is None else lined.index(first)
            found += [path for path in lined[begin:end] if path not in known]
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f" Layers there whose outputs are not shown by both sides: {', '.join(map(repr, found[:_NAMED]))}{more}."


def _lines(source: Inventory, target: Inventory, pairs: Sequence[Match], one: Evaluation) -> list[list[str]]:
    """The target's paths of matched layers as the source calls them; and with the rest of them, that no call showed,
    as the side defines them that has an order."""
    partner = {each.source.path: each.target.path for each in pairs}
    called = [partner[path] for path in one.modules if path in partner]
    if not source.ordered and not target.ordered:
        return [called]
    place = {layer.path: number for number, layer in enumerate((source if source.ordered else target).layers)}
    own = [((each.source if source.ordered else each.target).path, each.target.path) for each in pairs]
    defined = [path for _, path in sorted((place[mine], path) for mine, path in own if mine in place)]
    return [called, defined]


def _gradients(
    one: Evaluation, two: Evaluation, pairs: Sequence[Match], turned: Mapping[str, Order]
) -> dict[str, float]:
    """Errors of the gradients of what is trained on both sides, in canonical layout."""
    import numpy as np

    largest = max((float(np.max(np.abs(each))) for each in one.gradients.values() if each.size), default=0.0)
    found = {}
    for each in pairs:
        ours = _canonical(each, 0, one.gradients)
        theirs = _canonical(each, 1, two.gradients)
        if ours is None or theirs is None:
            continue
        if each.target.path in turned:
            ours = turned[each.target.path].apply(ours)
        for name in (name for name in ours if name in theirs):
            found[f"{each.target.path}/{name}"] = _error(ours[name].read(), theirs[name].read(), _FLOOR * largest)
    return found


def _canonical(match: Match, side: int, gradients: Mapping[str, Array]) -> dict[str, Lazy] | None:
    """The gradients of a layer's arrays as canonical arrays; None where some are not trained, or tied elsewhere."""
    layer = match.target if side else match.source
    form = match.fit.target if side else match.fit.source
    rules = tuple(
        rule
        for rule in form.rules
        if all(
            layer.leaves[name].trainable and layer.leaves[name].tied is None and layer.leaves[name].name in gradients
            for name in rule.native
        )
    )
    if not rules:
        return None
    found: dict[str, Lazy] = {}
    for rule in rules:
        native = {name: Lazy.of(gradients[layer.leaves[name].name]) for name in rule.native}
        made = dataclasses.replace(form, rules=(rule,)).arrays(native, gradients=True)
        if any(getattr(operation, "absent", ()) for operation in rule.operations):
            made = {rule.canonical[0]: made[rule.canonical[0]]}  # what a framework lacks has no gradient there
        found.update(made)
    return found
