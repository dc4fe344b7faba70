"""`TrainingState`, the canonical layout of a training state, and conversion from and to a `TrainingSide`.

It has masters, moments, averages, counts, loss scale and steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.matching.flatten_order import ChannelOrder
from polyamp.porting.states.training_side import TrainingSide
from polyamp.recipe.scaler import LossScaleState

SlotArrays = dict[str, dict[str, Lazy]]


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """Framework-independent training state in canonical layout.

    Attributes:
        parameters: "path/array" -> values, of masters and running statistics.
        slots: slot in the names of polyamp's specs ("exp_avg", "momentum") -> "path/array" -> values, in the layout
            of gradients: if a framework adds two biases, each has the moments of the sum. A slot with fewer elements
            than its parameter, such as a row's mean, is repeated to the parameter's shape.
        counts: "path/array" -> number of updates it received (S23); empty if the optimizer does not count.
        optimizer: kind of optimizer, as in a recipe file.
        loss_scale: the known fields of `LossScaleState`, as numbers.
        step: number of applied updates.
        averages: "path/array" -> moving average of a parameter or of a running statistic (S34).
    """

    parameters: Mapping[str, Lazy]
    slots: Mapping[str, Mapping[str, Lazy]]
    counts: Mapping[str, int]
    optimizer: str
    loss_scale: Mapping[str, float]
    step: int
    averages: Mapping[str, Lazy] = dataclasses.field(default_factory=dict)


class ArrayMapping(NamedTuple):
    """Layer to be moved, on one of the sides.

    Attributes:
        path: its path in canonical layout, the same on both sides.
        layer: the layer.
        form: conversion of its arrays to canonical ones.
        order: for the source's layer: the target's order of its rows after a flatten.
    """

    path: str
    layer: NativeLayer
    form: Form
    order: ChannelOrder | None = None


def canonical_state(side: TrainingSide, mappings: Sequence[ArrayMapping]) -> TrainingState:
    """Convert a side to canonical layout."""
    parameters: dict[str, Lazy] = {}
    slots: SlotArrays = {slot: {} for slot in side.optimizer.slots}
    counts: dict[str, int] = {}
    averages: dict[str, Lazy] = {}
    for mapping in mappings:
        averages |= _named_arrays(mapping, canonical_averages(side, mapping))
        parameters |= _named_arrays(mapping, canonical_parameters(side, mapping))
        for slot in slots:
            slots[slot] |= _named_arrays(mapping, canonical_slot(side, slot, mapping))
        for rule in mapping.form.rules:
            known = [
                _update_count(side, leaf.tied or leaf.name)
                for leaf in (mapping.layer.leaves[name] for name in rule.native)
            ]
            counted = [number for number in known if number is not None]
            if counted:
                counts |= {f"{mapping.path}/{name}": max(counted) for name in rule.canonical}
    fields = {name: f"loss_scale/{name}" for name in LossScaleState._fields}
    scale = {name: side.arrays[array].item() for name, array in fields.items() if array in side.arrays}
    return TrainingState(parameters, slots, counts, side.optimizer.type, scale, side.step or 0, averages)


def canonical_parameters(side: TrainingSide, mapping: ArrayMapping) -> dict[str, Lazy]:
    """Return the parameters and running statistics of one layer by canonical array, in the side's own order."""
    return mapping.form.arrays(
        {name: Lazy.of(side.arrays[side.leaves[leaf.name]]) for name, leaf in mapping.layer.leaves.items()}
    )


def canonical_slot(side: TrainingSide, slot: str, mapping: ArrayMapping) -> dict[str, Lazy]:
    """Return an optimizer's slot of one layer by canonical array, in the side's own order."""
    if slot in side.optimizer.number_slots:
        return _canonical_numbers(side, slot, mapping)
    found = {own: _slot_arrays(side, own, mapping) for own in _slot_and_partner(side, slot)}
    if len(found) == 1:
        return found[slot]
    one, other = found.values()
    return {
        name: (
            choose_rows_and_columns(one[name], other[name], -1)[slot != next(iter(found))] if name in other else array
        )
        for name, array in found[slot].items()
    }


def _slot_arrays(side: TrainingSide, slot: str, mapping: ArrayMapping) -> dict[str, Lazy]:
    kept = {name: _read_slot(side, slot, leaf) for name, leaf in mapping.layer.leaves.items()}
    there = {name: array for name, array in kept.items() if array is not None}
    return _available_native_rules(mapping.form, there).arrays(there, gradients=True)


def _slot_and_partner(side: TrainingSide, slot: str) -> tuple[str, ...]:
    """Return a slot, or the two of rows and columns if it is one of them."""
    spec = side.optimizer.spec_at("")
    pair = () if spec is None else spec.row_and_column_slots
    return pair if slot in pair else (slot,)


def choose_rows_and_columns(rows: Lazy, columns: Lazy, axis: int) -> tuple[Lazy, Lazy]:
    """Return means of rows and of columns in this order: the former do not change along an axis. A transposed kernel
    exchanges them.

    Args:
        rows, columns: the means, repeated to the parameter's shape.
        axis: the axis of the columns.

    >>> import numpy as np
    >>> one, other = (Lazy.of(np.broadcast_to(mean, (2, 2))) for mean in ([[1.0], [2.0]], [[3.0, 4.0]]))
    >>> choose_rows_and_columns(other, one, 1)[0] is one
    True
    """
    if rows.ndim < 2:
        return rows, columns
    changes = [bool(np.ptp(array.read(), axis=axis).any()) for array in (rows, columns)]
    return (columns, rows) if changes == [True, False] else (rows, columns)


def canonical_averages(side: TrainingSide, mapping: ArrayMapping) -> dict[str, Lazy]:
    """Return the averages of one layer by canonical array, as far as all that make it have one."""
    names = {name: f"average/{side.leaves[leaf.name]}" for name, leaf in mapping.layer.leaves.items()}
    there = {name: Lazy.of(side.arrays[array]) for name, array in names.items() if array in side.arrays}
    return _available_native_rules(mapping.form, there).arrays(there)


def native_state_arrays(
    given: TrainingState, side: TrainingSide, mappings: Sequence[ArrayMapping]
) -> tuple[dict[str, Array], list[str]]:
    """Return a side's arrays with the values of a canonical state, and notes for the report."""
    new = dict(side.arrays)
    fresh: list[str] = []
    counts = {
        leaf: _update_count(side, leaf) or 0 for leaf in side.optimizer.counts
    }  # own values for leaves that nothing is moved to
    for mapping in mappings:
        like = mapping.layer.arrays
        values = transfer_arrays(mapping, given.parameters)
        for name, array in _available_canonical_rules(mapping.form, values).leaves(values, like).items():
            _write_values(new, side, mapping.layer.leaves[name], side.leaves[mapping.layer.leaves[name].name], array)
        for slot, names in side.optimizer.slots.items():
            values = transfer_arrays(mapping, given.slots.get(slot, {}))
            if slot in side.optimizer.number_slots:
                fresh += _write_slot_numbers(new, side, slot, mapping, values, given.counts)
                continue
            made = _native_slot(given, side, slot, mapping)
            for name, leaf in mapping.layer.leaves.items():
                if leaf.tied is None and leaf.name in names:
                    array = made.get(name) or _initial_slot(side, slot, leaf)
                    fresh += [leaf.name] if name not in made else []
                    _write_values(
                        new, side, leaf, names[leaf.name], array, 1.0 / side.optimizer.factors.get(slot, 1.0), 4
                    )
                    new[names[leaf.name]] = _reduce_slot(side, slot, leaf, new[names[leaf.name]])
        for rule in mapping.form.rules:
            known = [given.counts.get(f"{mapping.path}/{name}") for name in rule.canonical]
            number = max((count for count in known if count is not None), default=given.step)
            for name in rule.native:
                leaf = mapping.layer.leaves[name]
                counts[leaf.name] = 0 if leaf.name in fresh else number
    said = _write_counts(new, side, counts, given.step) + _write_averages(new, given, side, mappings)
    if fresh:
        named = ", ".join(dict.fromkeys(fresh))
        said.append(f"trained in the target alone, so that the optimizer's state of it begins anew: {named}")
    return new, said


def _native_slot(given: TrainingState, side: TrainingSide, slot: str, mapping: ArrayMapping) -> dict[str, Lazy]:
    """Return a slot of one layer by leaf, in the parameters' shapes."""
    found = {}
    for own in _slot_and_partner(side, slot):
        values = transfer_arrays(mapping, given.slots.get(own, {}))
        form = _available_canonical_rules(mapping.form, values)
        found[own] = form.leaves(values, mapping.layer.arrays, moments=True)
    if len(found) == 1:
        return found[slot]
    one, other = found.values()
    chosen = {}
    for name, array in found[slot].items():
        spec = side.optimizer.spec_at(mapping.layer.leaves[name].name)
        assert spec is not None
        first = next(iter(found))
        axes = [n for n, size in enumerate(spec.slot_shape(first, array.shape)) if size != array.shape[n]]
        pair = choose_rows_and_columns(one[name], other[name], axes[0]) if axes else (one[name], other[name])
        chosen[name] = pair[slot != first]
    return chosen


def _named_arrays(mapping: ArrayMapping, arrays: dict[str, Lazy]) -> dict[str, Lazy]:
    if mapping.order is not None:
        arrays = mapping.order.apply(arrays)
    return {f"{mapping.path}/{name}": array for name, array in arrays.items()}


def transfer_arrays(mapping: ArrayMapping, arrays: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the canonical arrays of one layer, as far as they exist."""
    names = [name for rule in mapping.form.rules for name in rule.canonical]
    return {name: arrays[key] for name in names if (key := f"{mapping.path}/{name}") in arrays}


def _available_native_rules(form: Form, natives: Mapping[str, Any]) -> Form:
    """Return the form with only the rules whose native arrays all exist: running statistics have no slots."""
    return dataclasses.replace(form, rules=tuple(r for r in form.rules if all(name in natives for name in r.native)))


def _available_canonical_rules(form: Form, arrays: Mapping[str, Any]) -> Form:
    """Return the form with only the rules whose canonical arrays all exist."""
    return dataclasses.replace(form, rules=tuple(r for r in form.rules if all(name in arrays for name in r.canonical)))


def _read_slot(side: TrainingSide, slot: str, leaf: InventoryLeaf) -> Lazy | None:
    """Return a leaf's slot in the scaling of polyamp's formulas; None if the leaf is not trained."""
    name = side.optimizer.slots[slot].get(leaf.tied or leaf.name)
    if name is None:
        return None
    array = side.arrays.get(name)
    if array is None:  # the optimizer has not created it yet
        return _initial_slot(side, slot, leaf)
    factor = side.optimizer.factors.get(slot, 1.0)
    if slot not in side.optimizer.number_slots and array.shape != leaf.array.shape:
        shape = leaf.array.shape
        return Lazy(shape, array.dtype, lambda: np.broadcast_to(array, shape))
    if factor == 1.0:
        return Lazy.of(array)
    return Lazy(array.shape, array.dtype, lambda: array * array.dtype.type(factor))


def _canonical_numbers(side: TrainingSide, slot: str, mapping: ArrayMapping) -> dict[str, Lazy]:
    """Return a slot that is a number, by canonical array: of several native arrays that of the most updates."""
    found: dict[str, Lazy] = {}
    for rule in mapping.form.rules:
        known: list[tuple[int, Lazy]] = []
        for leaf in (mapping.layer.leaves[name] for name in rule.native):
            array = _read_slot(side, slot, leaf)
            if array is not None:
                known.append((_update_count(side, leaf.tied or leaf.name) or 0, array))
        if known:
            latest = max(known, key=lambda pair: pair[0])[1]
            found |= dict.fromkeys(rule.canonical, latest)
    return found


def _write_slot_numbers(
    new: dict[str, Array],
    side: TrainingSide,
    slot: str,
    mapping: ArrayMapping,
    values: Mapping[str, Lazy],
    counts: Mapping[str, int],
) -> list[str]:
    """Write a slot that is a number, and return the leaves for which there is none.

    Args:
        new: the target's arrays.
        side: the target.
        slot: the slot.
        mapping: the layer.
        values: canonical array -> its number.
        counts: canonical array with its path -> number of its updates.
    """
    fresh = []
    for rule in mapping.form.rules:
        known = [(counts.get(f"{mapping.path}/{name}", 0), values[name]) for name in rule.canonical if name in values]
        for leaf in (mapping.layer.leaves[name] for name in rule.native):
            array = side.optimizer.slots[slot].get(leaf.name)
            if array is None or leaf.tied is not None:
                continue
            fresh += [] if known else [leaf.name]
            number = max(known, key=lambda pair: pair[0])[1] if known else _initial_slot(side, slot, leaf)
            _write_number(new, side, array, number.read().item())
    return fresh


def _initial_slot(side: TrainingSide, slot: str, leaf: InventoryLeaf) -> Lazy:
    """Return the initial value of a slot."""
    spec = side.optimizer.spec_at(leaf.tied or leaf.name)
    start = 0.0 if spec is None else spec.initial(slot)
    shape = () if slot in side.optimizer.number_slots else leaf.array.shape
    dtype = np.dtype(np.float32)
    return Lazy(shape, dtype, lambda: np.full(shape, start, dtype))


def _reduce_slot(side: TrainingSide, slot: str, leaf: InventoryLeaf, values: Array) -> Array:
    """Return a slot of the parameter's shape in its own, as the means over what it does not have."""
    spec = side.optimizer.spec_at(leaf.tied or leaf.name)
    shape = values.shape if spec is None else spec.slot_shape(slot, values.shape)
    if shape == values.shape:
        return values
    kept = shape or (1,) * values.ndim
    axes = tuple(axis for axis, size in enumerate(kept) if size != values.shape[axis])
    return np.asarray(values.mean(axes, keepdims=True, dtype=np.float64), values.dtype).reshape(shape)


def _update_count(side: TrainingSide, leaf: str) -> int | None:
    place = side.optimizer.counts.get(leaf)
    if place is None:
        return None
    if place.array not in side.arrays:  # the optimizer has not created it yet
        return 0
    missed = int(side.arrays[place.missed][place.index]) if place.missed else 0
    return int(side.arrays[place.array].reshape(-1)[-1]) - missed


def _write_values(
    new: dict[str, Array],
    side: TrainingSide,
    leaf: InventoryLeaf,
    name: str,
    values: Lazy,
    factor: float = 1.0,
    least: int = 0,
) -> None:
    """Write values into an array of the target, which keeps its dtype. Elements of an array that does not exist yet
    have at least `least` bytes."""
    if leaf.tied is not None:
        return
    read = values.read()
    if read.shape != leaf.array.shape:
        raise PortError(f"{leaf.name}: {list(leaf.array.shape)} in {side.name}. Received: {list(read.shape)}.")
    dtype = side.arrays[name].dtype if name in side.arrays else leaf.array.dtype
    if name not in side.arrays and dtype.itemsize < least:
        dtype = np.dtype(np.float32)
    scaled = read if factor == 1.0 else read * read.dtype.type(factor)
    new[name] = np.array(scaled, dtype, order="C")


def _write_counts(new: dict[str, Array], side: TrainingSide, counts: Mapping[str, int], step: int) -> list[str]:
    """Write the counts into the target's arrays, and the number of applied updates to all of its locations."""
    shared: dict[str, dict[str, int]] = {}
    for leaf, number in counts.items():
        place = side.optimizer.counts.get(leaf)
        if place is None:
            continue
        if place.missed:
            missed = new[place.missed]
            if missed is side.arrays[place.missed]:
                missed = new[place.missed] = np.array(missed)
            missed[place.index] = step - number
            _write_number(new, side, place.array, step)
        else:
            shared.setdefault(place.array, {})[leaf] = number
    for name in {*side.optimizer.positions, "step"} & set(side.arrays):
        _write_number(new, side, name, step)
    said = []
    for name, numbers in shared.items():
        _write_number(new, side, name, max(numbers.values()))
        late = [leaf for leaf, number in numbers.items() if number != max(numbers.values())]
        if late:
            said.append(
                f"the target counts updates of all parameters together, where {', '.join(late[:3])} took fewer: its "
                "bias correction goes on with the larger number"
            )
    return said


def _write_averages(
    new: dict[str, Array], given: TrainingState, side: TrainingSide, mappings: Sequence[ArrayMapping]
) -> list[str]:
    """Write the averages into the target's arrays, and return notes. Without one, an average is its parameter (S34)."""
    alone: list[str] = []
    for mapping in mappings:
        values = transfer_arrays(mapping, given.averages)
        made = _available_canonical_rules(mapping.form, values).leaves(values, mapping.layer.arrays)
        for name, leaf in mapping.layer.leaves.items():
            array = f"average/{side.leaves[leaf.name]}"
            if array in side.arrays:
                alone += [] if name in made else [leaf.name]
                _write_values(new, side, leaf, array, made.get(name) or Lazy.of(new[side.leaves[leaf.name]]))
    if given.averages and not any(name.startswith("average/") for name in side.arrays):
        return ["the source's averages of parameters are not moved: the target's recipe has no ema"]
    if alone:
        return [f"without an average in the source, so that its average begins at what was moved: {', '.join(alone)}"]
    return []


def _write_number(new: dict[str, Array], side: TrainingSide, name: str, number: float) -> None:
    old = side.arrays.get(name)
    new[name] = np.full((), number, np.float32) if old is None else np.full(old.shape, number, old.dtype)
