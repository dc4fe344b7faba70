"""A training state moves to another framework: masters, running statistics, the optimizer's slots and counts, the loss
scale with its counters, and the number of applied updates, which schedules follow.

`port` calls `port_state` when one of the sides is a training state. In between stands `TrainingState`, the same in
canonical layout. The target's arrays are made first, all of them; then its backend takes them as it takes a
checkpoint's, so that after an error it is as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from polyamp.errors import PortError
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.operations import Merge
from polyamp.porting.report import PortReport
from polyamp.porting.settled import settled
from polyamp.porting.states import recipe
from polyamp.porting.states.canonical import TrainingState, Way, canonical, native, of_way
from polyamp.porting.states.sides import Side, side
from polyamp.rules.scale import LossScaleState
from polyamp.train import contents
from polyamp.train.changes import Change

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_UNCOUNTED: Final = (
    "the source's optimizer does not count its updates, so that the number of applied ones is taken for 0, where "
    "schedules begin: say it in training(..., step=)"
)
_RANDOM: Final = "random streams are not moved: dropout draws other masks than in the source"


def training_state(state: Any) -> TrainingState:
    """A training state in canonical layout, to look at or to compare. Arrays are read late.

    Args:
        state: a polyamp state, the path of a checkpoint, or `training(...)`.

    Raises:
        ArgumentError: none of these.
        PortError: its optimizer keeps what has no canonical form.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.adam(0.1)))
        >>> found = training_state(state)
        >>> sorted(found.slots), found.slots["exp_avg"]["dense0/kernel"], found.counts["dense0/kernel"]
        (['exp_avg', 'exp_avg_sq'], Lazy(float32[4, 1]), 0)
    """
    own = side(state, target=False)
    _check_movable(own)
    return canonical(own, [Way(layer.path, layer, layer.forms[0]) for layer in own.inventory.layers])


@dataclasses.dataclass(frozen=True)
class StateReport(PortReport):
    """What `polyamp.port` returns beside a training state.

    Attributes:
        recipe: what differs between the recipes, the source's value first; the target's own is the one that trains.
    """

    recipe: Sequence[Change] = ()

    @property
    def clean(self) -> bool:
        return super().clean and not self.recipe

    def __str__(self) -> str:
        said = super().__str__()
        if not self.recipe:
            return said
        return "\n".join(
            [said, "recipe: the source's -> the target's, which trains:", *(f"  {c}" for c in self.recipe)]
        )


def port_state(
    source: Any, target: Any, *, names: Mapping[str, str] | None = None, strict: bool = True
) -> tuple[Any, StateReport]:
    """A training state goes on in another framework; `polyamp.port` calls it.

    Args:
        source: a polyamp state, the path of a checkpoint, or `training(...)`.
        target: a polyamp state or `training(...)`.
        names: as for `port`.
        strict: as for `port`; False also goes on where the recipes differ.

    Returns:
        The target with everything but its random streams, and a report. In torch and Keras it is filled in place.

    Raises:
        PortError: as `port` raises it; optimizers of two kinds, what has no counterpart, or another recipe.
        CheckpointError: a damaged file.
    """
    import numpy as np

    ours, theirs = side(source, target=False), side(target, target=True)
    _check_alike(ours, theirs)
    found = settled(ours.inventory, theirs.inventory, names, strict=strict)
    ways = [
        (
            Way(each.target.path, each.source, each.fit.source, found.turned.get(each.target.path)),
            Way(each.target.path, each.target, each.fit.target),
        )
        for each in found.pairs
    ]
    changed = recipe.between(
        ours.settings, theirs.settings, (ours.optimizer, theirs.optimizer), _trained(ways, ours, theirs)
    )
    if strict:
        _check_recipe(changed, ours, theirs)
    state = canonical(ours, [way for way, _ in ways])
    arrays, said = native(state, theirs, [way for _, way in ways])
    said += _put_scale(arrays, ours, theirs, state.loss_scale)
    said += _doubled(ways) + ([_UNCOUNTED] if ours.step is None else [])
    said += found.kept.check({name: Lazy.of(arrays[array]) for name, array in theirs.leaves.items()})
    merges = [
        f"{way.path}: {phrase}, and either's moments are kept for both"
        for _, way in ways
        for phrase in way.form.losses(of_way(way, state.parameters))
    ]
    report = StateReport(
        found.moved,
        found.compared.differences,
        merges,
        [*said, *ours.optimizer.notes, *theirs.optimizer.notes, *found.compared.conventions, *_random(theirs)],
        found.missing,
        found.unused,
        found.compared.unseen,
        recipe=changed,
    )
    assert theirs.replaced is not None
    return theirs.replaced({name: np.ascontiguousarray(a) if a.ndim else a for name, a in arrays.items()}), report


def _random(target: Side) -> list[str]:
    return [_RANDOM] if any(name.startswith("rng/") for name in target.arrays) else []


def _doubled(pairs: Sequence[tuple[Way, Way]]) -> list[str]:
    """Biases that are one in the source and two that are added in the target."""
    found = []
    for ours, theirs in pairs:
        merged = [
            any(isinstance(operation, Merge) for rule in way.form.rules for operation in rule.operations)
            for way in (ours, theirs)
        ]
        if merged == [True, False]:
            found.append(
                f"{theirs.path}: two biases are added where the source has one; either has its moments and is trained "
                "for itself, so that their sum moves twice as far"
            )
    return found


def _check_movable(own: Side) -> None:
    if own.optimizer.refused:
        raise PortError(
            f"{own.name}: {'; '.join(own.optimizer.refused)}. That has no counterpart in another framework's "
            "optimizer. The model alone can be moved: polyamp.port(model, other_model)."
        )


def _check_alike(source: Side, target: Side) -> None:
    """Refuse optimizers that do not keep the same arrays.

    Raises:
        PortError: says what each keeps.
    """
    _check_movable(source)
    _check_movable(target)
    ours, theirs = source.optimizer, target.optimizer
    kinds = [{"adamw": "adam"}.get(each.type, each.type) for each in (ours, theirs)]
    if set(ours.slots) != set(theirs.slots) or (kinds[0] != kinds[1] and "" not in kinds):
        raise PortError(
            "an optimizer's state moves to an optimizer of its kind alone. Received: "
            f"{_kept(source)}, and {_kept(target)}. Give the target the source's optimizer; or move the model alone, "
            "with which the optimizer begins anew: polyamp.port(source_model, target_model)."
        )


def _kept(own: Side) -> str:
    slots = ", ".join(own.optimizer.slots) or "no arrays"
    return f"{own.name} with {own.optimizer.type or 'an optimizer'}, which keeps {slots}"


def _put_scale(new: dict[str, Array], source: Side, target: Side, given: Mapping[str, float]) -> list[str]:
    """The loss scale into the target's arrays, within its scaler's bounds (S18)."""
    import numpy as np

    scaler = target.scaler
    if scaler is None or "loss_scale/scale" not in target.arrays:
        return (
            [] if source.scaler is None or not source.scaler.scales else ["the target has no loss scale to go on with"]
        )
    anew = not given or (source.scaler is not None and source.scaler.kind != scaler.kind)
    start = {"scale": scaler.init_scale, "hysteresis": scaler.hysteresis}
    for name in LossScaleState._fields:
        old = target.arrays.get(f"loss_scale/{name}")
        if old is not None:
            new[f"loss_scale/{name}"] = np.asarray(given.get(name, start.get(name, 0)), old.dtype)
    before = dict(new)
    contents.rescale(new, scaler, anew=anew)
    changed = [name for name in new if name.startswith("loss_scale/") and new[name] != before[name]]
    if anew:
        return ["the loss scale begins anew: the source has none, or one of another kind"] if scaler.scales else []
    return [f"{name} is {new[name]:g}, within the target's scaler; it was {before[name]:g}" for name in changed]


def _trained(pairs: Sequence[tuple[Way, Way]], source: Side, target: Side) -> Iterator[tuple[str, str]]:
    """(leaf of the source, leaf of the target) of layers' trained parameters, by their canonical arrays."""
    for ours, theirs in pairs:
        first = {c: rule.native[0] for rule in ours.form.rules for c in rule.canonical}
        for rule in theirs.form.rules:
            own = first.get(rule.canonical[0])
            one = None if own is None else ours.layer.leaves[own].tied or ours.layer.leaves[own].name
            other = theirs.layer.leaves[rule.native[0]].name
            if one in source.optimizer.numbers and other in target.optimizer.numbers:
                assert one is not None
                yield one, other


def _check_recipe(changed: Sequence[Change], source: Side, target: Side) -> None:
    """Refuse another recipe, as `restore` does.

    Raises:
        PortError: says every difference.
    """
    if changed and source.whole and target.whole:
        said = "\n".join(f"  {change}" for change in changed)
        raise PortError(
            f"{source.name} is trained with another recipe than {target.name}, whose own is the one that trains.\nThe "
            f"source's value -> the target's:\n{said}\nport(..., strict=False) goes on with it; or give the target the "
            "recipe of the source."
        )
