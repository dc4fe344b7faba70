"""`port_state`, the transfer of a training state to another framework, and its report.

The transfer covers masters, running statistics, the optimizer's slots and counts, the loss scale with its counters, and
the number of applied updates, which schedules follow. The intermediate form is `TrainingState`, in canonical layout.
All arrays of the target are created first. Its backend then loads them as it loads a checkpoint's, so that the target
is unchanged after an error.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.alike_layers import make_settler
from polyamp.porting.check import Batch
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.layouts.operations import Merge
from polyamp.porting.model_run import make_model_sides, trace_plan
from polyamp.porting.model_side import ModelSide
from polyamp.porting.port_report import PortReport
from polyamp.porting.states import recipe_comparison
from polyamp.porting.states.training_side import TrainingSide, make_training_side
from polyamp.porting.states.training_state import (
    ArrayMapping,
    TrainingState,
    canonical_state,
    native_state_arrays,
    transfer_arrays,
)
from polyamp.porting.transfer_plan import PortOptions, make_transfer_plan
from polyamp.recipe.scaler import LossScaleState
from polyamp.train import checkpoint_checks
from polyamp.train.recipe_changes import SettingChange

_MISSING_COUNT_NOTE: Final = (
    "the source's optimizer does not count its updates, so that the number of applied ones is taken for 0, where "
    "schedules begin: say it in training(..., step=)"
)
_RANDOM_STREAM_NOTE: Final = "random streams are not moved: dropout draws other masks than in the source"


def training_state(state: Any) -> TrainingState:
    """Return a training state in canonical layout, for inspection or comparison. Arrays are read lazily.

    Args:
        state: a polyamp state, the path of a checkpoint, or `training(...)`.

    Raises:
        ArgumentError: none of these.
        PortError: its optimizer has state without a canonical form.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(optimizer=polyamp.adam(0.1)))
        >>> found = training_state(state)
        >>> sorted(found.slots), found.slots["exp_avg"]["dense0/kernel"], found.counts["dense0/kernel"]
        (['exp_avg', 'exp_avg_sq'], Lazy(float32[4, 1]), 0)
    """
    side = make_training_side(state, target=False)
    _check_movable(side)
    return canonical_state(side, [ArrayMapping(layer.path, layer, layer.forms[0]) for layer in side.inventory.layers])


@dataclasses.dataclass(frozen=True, repr=False)
class StateReport(PortReport):
    """Report that `polyamp.port` returns with a training state.

    Attributes:
        recipe: differences between the recipes, the source's value first; training uses the target's.
    """

    recipe: Sequence[SettingChange] = ()

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


def port_state(source: Any, target: Any, options: PortOptions, batch: Any) -> tuple[Any, StateReport]:
    """Move a training state to another framework; `polyamp.port` for training states.

    Args:
        source: a polyamp state, the path of a checkpoint, or `training(...)`.
        target: a polyamp state or `training(...)`.
        options: see `port`; without `strict` differing recipes are no error either. There are no forms.
        batch: see `port`.

    Returns:
        The target with everything but its random streams, and a report. In torch and Keras it is filled in place.

    Raises:
        PortError: as for `port`; optimizers are of two kinds, an array has no counterpart, or recipes differ.
        CheckpointError: a damaged file.
    """
    strict = options.strict
    ours, theirs = make_training_side(source, target=False), make_training_side(target, target=True)
    _check_same_slots(ours, theirs)
    sides = None if batch is None else _models_to_run(source, target, batch)
    settle = None if sides is None else make_settler(*sides)
    plan = make_transfer_plan(ours.inventory, theirs.inventory, **options._asdict(), settle=settle)
    traced: list[str] = []
    if sides is not None:
        plan, traced = trace_plan(sides[0], sides[1], plan, sides[2], strict=strict)
    plan = plan.without_questions(strict=strict)
    mappings = [
        (
            ArrayMapping(each.target.path, each.source, each.fit.source, plan.channel_orders.get(each.target.path)),
            ArrayMapping(each.target.path, each.target, each.fit.target),
        )
        for each in plan.pairs
    ]
    changed = recipe_comparison.compare_recipes(
        ours.settings(),
        theirs.settings(),
        (ours.optimizer, theirs.optimizer),
        _trained_leaf_pairs(mappings, ours, theirs),
    )
    if strict:
        _check_recipe(changed, ours, theirs)
    state = canonical_state(ours, [mapping for mapping, _ in mappings])
    arrays, said = native_state_arrays(state, theirs, [mapping for _, mapping in mappings])
    said += _write_loss_scale(arrays, ours, theirs, state.loss_scale)
    said += _split_bias_notes(mappings) + ([_MISSING_COUNT_NOTE] if ours.step is None else [])
    said += plan.tie_constraints.check({name: Lazy.of(arrays[array]) for name, array in theirs.leaves.items()})
    merges = [
        f"{mapping.path}: {phrase}, and either's moments are kept for both"
        for _, mapping in mappings
        for phrase in mapping.form.losses(transfer_arrays(mapping, state.parameters))
    ]
    report = StateReport(
        plan.moved,
        plan.comparison.differences,
        merges,
        [
            *said,
            *(f"{path}: {order.describe()}" for path, order in plan.channel_orders.items()),
            *traced,
            *ours.optimizer.notes,
            *theirs.optimizer.notes,
            *plan.comparison.conventions,
            *_random_stream_notes(theirs),
        ],
        plan.missing,
        plan.unused,
        plan.comparison.unseen,
        recipe=changed,
    )
    assert theirs.replace_arrays is not None
    return theirs.replace_arrays({name: np.ascontiguousarray(a) if a.ndim else a for name, a in arrays.items()}), report


def _models_to_run(source: Any, target: Any, batch: Any) -> tuple[ModelSide, ModelSide, Batch]:
    """Return both states' models and the inputs, for runs that show alike layers and the order of rows."""
    if isinstance(source, str | os.PathLike):
        raise PortError(
            "batch= runs both models, and the source is a checkpoint's path. Give the restored state, or rows= instead."
        )
    ours, theirs, given = make_model_sides(source.model, target.model, batch)
    assert given is not None
    return ours, theirs, given


def _random_stream_notes(target: TrainingSide) -> list[str]:
    return [_RANDOM_STREAM_NOTE] if any(name.startswith("rng/") for name in target.arrays) else []


def _split_bias_notes(pairs: Sequence[tuple[ArrayMapping, ArrayMapping]]) -> list[str]:
    """Return notes about biases that are one in the source and two added ones in the target."""
    found = []
    for ours, theirs in pairs:
        merged = [
            any(isinstance(operation, Merge) for rule in mapping.form.rules for operation in rule.operations)
            for mapping in (ours, theirs)
        ]
        if merged == [True, False]:
            found.append(
                f"{theirs.path}: two biases are added where the source has one; either has its moments and is trained "
                "for itself, so that their sum moves twice as far"
            )
    return found


def _check_movable(side: TrainingSide) -> None:
    if side.optimizer.refused:
        raise PortError(
            f"{side.name}: {'; '.join(side.optimizer.refused)}. That has no counterpart in another framework's "
            "optimizer. The model alone can be moved: polyamp.port(model, other_model)."
        )


def _check_same_slots(source: TrainingSide, target: TrainingSide) -> None:
    """Raise if the optimizers do not have the same arrays.

    Raises:
        PortError: the slots differ; the message lists both.
    """
    _check_movable(source)
    _check_movable(target)
    ours, theirs = source.optimizer, target.optimizer
    kinds = [{"adamw": "adam"}.get(each.type, each.type) for each in (ours, theirs)]
    if set(ours.slots) != set(theirs.slots) or (kinds[0] != kinds[1] and "" not in kinds):
        raise PortError(
            "an optimizer's state moves to an optimizer of its kind alone. Received: "
            f"{_describe_slots(source)}, and {_describe_slots(target)}. Give the target the source's optimizer; "
            "or move the model alone, with which the optimizer begins anew: polyamp.port(source_model, target_model)."
        )


def _describe_slots(side: TrainingSide) -> str:
    slots = ", ".join(side.optimizer.slots) or "no arrays"
    return f"{side.name} with {side.optimizer.type or 'an optimizer'}, which keeps {slots}"


def _write_loss_scale(
    new: dict[str, Array], source: TrainingSide, target: TrainingSide, given: Mapping[str, float]
) -> list[str]:
    """Write the loss scale into the target's arrays, within its scaler's bounds (S18)."""
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
    checkpoint_checks.fit_loss_scale(new, scaler, reset=anew)
    changed = [name for name in new if name.startswith("loss_scale/") and new[name] != before[name]]
    if anew:
        return ["the loss scale begins anew: the source has none, or one of another kind"] if scaler.scales else []
    return [f"{name} is {new[name]:g}, within the target's scaler; it was {before[name]:g}" for name in changed]


def _trained_leaf_pairs(
    pairs: Sequence[tuple[ArrayMapping, ArrayMapping]], source: TrainingSide, target: TrainingSide
) -> Iterator[tuple[str, str]]:
    """Yield (leaf of the source, leaf of the target) for trained parameters, matched by their canonical arrays."""
    for ours, theirs in pairs:
        first = {c: rule.native[0] for rule in ours.form.rules for c in rule.canonical}
        for rule in theirs.form.rules:
            own = first.get(rule.canonical[0])
            one = None if own is None else ours.layer.leaves[own].tied or ours.layer.leaves[own].name
            other = theirs.layer.leaves[rule.native[0]].name
            if one in source.optimizer.numbers and other in target.optimizer.numbers:
                assert one is not None
                yield one, other


def _check_recipe(changed: Sequence[SettingChange], source: TrainingSide, target: TrainingSide) -> None:
    """Raise if the recipes differ, as `restore` does.

    Raises:
        PortError: the message lists every difference.
    """
    if changed and source.has_recipe and target.has_recipe:
        said = "\n".join(f"  {change}" for change in changed)
        raise PortError(
            f"{source.name} is trained with another recipe than {target.name}, whose own is the one that trains.\nThe "
            f"source's value -> the target's:\n{said}\nport(..., strict=False) goes on with it; or give the target the "
            "recipe of the source."
        )
