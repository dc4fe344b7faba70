"""`TrainingState`: masters, moments, counts, loss scale and steps in canonical layout, made of a `Side` and written to
one. Called by `port_state`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp.errors import PortError
from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.inventory import Leaf, NativeLayer
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.matching.flatten import Order
from polyamp.porting.states.sides import Side
from polyamp.rules.scale import LossScaleState

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Slots = dict[str, dict[str, Lazy]]


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """A training state in canonical layout, of no framework.

    Attributes:
        parameters: "path/array" -> values, of masters and running statistics.
        slots: slot, as polyamp's specs call it ("exp_avg", "momentum"), -> "path/array" -> values. They lie as
            gradients do: where a framework adds two biases, either has the moments of the sum.
        counts: "path/array" -> how many updates it took (S23); nothing where the optimizer does not count.
        optimizer: the optimizer's kind, as a recipe file calls it.
        loss_scale: the fields of `LossScaleState` that are known, as numbers.
        step: number of applied updates.
    """

    parameters: Mapping[str, Lazy]
    slots: Mapping[str, Mapping[str, Lazy]]
    counts: Mapping[str, int]
    optimizer: str
    loss_scale: Mapping[str, float]
    step: int


class Way(NamedTuple):
    """A layer that moves, on one of the sides.

    Attributes:
        path: what it is called in canonical layout, the same on both sides.
        layer: the layer.
        form: how its arrays lead to canonical ones.
        order: of the source's layer: how the target has its rows, behind a flatten.
    """

    path: str
    layer: NativeLayer
    form: Form
    order: Order | None = None


def canonical(own: Side, ways: Sequence[Way]) -> TrainingState:
    """What a side holds, in canonical layout."""
    parameters: dict[str, Lazy] = {}
    slots: Slots = {slot: {} for slot in own.optimizer.slots}
    counts: dict[str, int] = {}
    for way in ways:
        held = {name: Lazy.of(own.arrays[own.leaves[leaf.name]]) for name, leaf in way.layer.leaves.items()}
        parameters |= _named(way, way.form.arrays(held))
        for slot in slots:
            kept = {name: _slot(own, slot, leaf) for name, leaf in way.layer.leaves.items()}
            there = {name: array for name, array in kept.items() if array is not None}
            slots[slot] |= _named(way, _part(way.form, there).arrays(there, gradients=True))
        for rule in way.form.rules:
            known = [_count(own, leaf.tied or leaf.name) for leaf in (way.layer.leaves[name] for name in rule.native)]
            counted = [number for number in known if number is not None]
            if counted:
                counts |= {f"{way.path}/{name}": max(counted) for name in rule.canonical}
    fields = {name: f"loss_scale/{name}" for name in LossScaleState._fields}
    scale = {name: own.arrays[array].item() for name, array in fields.items() if array in own.arrays}
    return TrainingState(parameters, slots, counts, own.optimizer.type, scale, own.step or 0)


def native(given: TrainingState, own: Side, ways: Sequence[Way]) -> tuple[dict[str, Array], list[str]]:
    """A side's arrays with the values of a canonical state, and what is to be said of them."""
    new = dict(own.arrays)
    fresh: list[str] = []
    counts = {leaf: _count(own, leaf) or 0 for leaf in own.optimizer.counts}  # of what nothing is moved to, its own
    for way in ways:
        like = way.layer.arrays
        values = of_way(way, given.parameters)
        for name, array in _whole(way.form, values).leaves(values, like).items():
            _put(new, own, way.layer.leaves[name], own.leaves[way.layer.leaves[name].name], array)
        for slot, names in own.optimizer.slots.items():
            values = of_way(way, given.slots.get(slot, {}))
            made = _whole(way.form, values).leaves(values, like, moments=True)
            for name, leaf in way.layer.leaves.items():
                if leaf.tied is None and leaf.name in names:
                    array = made.get(name) or _initial(own, slot, leaf)
                    fresh += [leaf.name] if name not in made else []
                    _put(new, own, leaf, names[leaf.name], array, 1.0 / own.optimizer.factors.get(slot, 1.0), 4)
        for rule in way.form.rules:
            known = [given.counts.get(f"{way.path}/{name}") for name in rule.canonical]
            number = max((count for count in known if count is not None), default=given.step)
            for name in rule.native:
                leaf = way.layer.leaves[name]
                counts[leaf.name] = 0 if leaf.name in fresh else number
    said = _put_counts(new, own, counts, given.step)
    if fresh:
        named = ", ".join(dict.fromkeys(fresh))
        said.append(f"trained in the target alone, so that the optimizer's state of it begins anew: {named}")
    return new, said


def _named(way: Way, arrays: dict[str, Lazy]) -> dict[str, Lazy]:
    if way.order is not None and (not way.order.rows or "kernel" in arrays):
        arrays = way.order.apply(arrays)
    return {f"{way.path}/{name}": array for name, array in arrays.items()}


def of_way(way: Way, arrays: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The canonical arrays of one layer, as far as they are there."""
    names = [name for rule in way.form.rules for name in rule.canonical]
    return {name: arrays[key] for name in names if (key := f"{way.path}/{name}") in arrays}


def _part(form: Form, natives: Mapping[str, Any]) -> Form:
    """The rules whose native arrays are all there: running statistics have no slots."""
    return dataclasses.replace(form, rules=tuple(r for r in form.rules if all(name in natives for name in r.native)))


def _whole(form: Form, arrays: Mapping[str, Any]) -> Form:
    """The rules whose canonical arrays are all there."""
    return dataclasses.replace(form, rules=tuple(r for r in form.rules if all(name in arrays for name in r.canonical)))


def _slot(own: Side, slot: str, leaf: Leaf) -> Lazy | None:
    """A leaf's slot, as polyamp's formulas keep it; None of what is not trained."""
    name = own.optimizer.slots[slot].get(leaf.tied or leaf.name)
    if name is None:
        return None
    array = own.arrays.get(name)
    if array is None:  # the optimizer has not made it yet
        return _initial(own, slot, leaf)
    factor = own.optimizer.factors.get(slot, 1.0)
    if factor == 1.0:
        return Lazy.of(array)
    return Lazy(array.shape, array.dtype, lambda: array * array.dtype.type(factor))


def _initial(own: Side, slot: str, leaf: Leaf) -> Lazy:
    """What an optimizer begins with."""
    import numpy as np

    number = own.optimizer.numbers.get(leaf.tied or leaf.name, 0)
    start = own.optimizer.distinct[number].get("initial_accumulator_value", 0.0) if slot == "sum" else 0.0
    shape, dtype = leaf.array.shape, np.dtype(np.float32)
    return Lazy(shape, dtype, lambda: np.full(shape, start, dtype))


def _count(own: Side, leaf: str) -> int | None:
    place = own.optimizer.counts.get(leaf)
    if place is None:
        return None
    if place.array not in own.arrays:  # the optimizer has not made it yet
        return 0
    missed = int(own.arrays[place.missed][place.index]) if place.missed else 0
    return int(own.arrays[place.array].reshape(-1)[-1]) - missed


def _put(
    new: dict[str, Array], own: Side, leaf: Leaf, name: str, values: Lazy, factor: float = 1.0, least: int = 0
) -> None:
    """Values into an array of the target, which keeps its dtype; one that is not there yet has at least `least` bytes
    a number."""
    import numpy as np

    if leaf.tied is not None:
        return
    read = values.read()
    if read.shape != leaf.array.shape:
        raise PortError(f"{leaf.name}: {list(leaf.array.shape)} in {own.name}. Received: {list(read.shape)}.")
    dtype = own.arrays[name].dtype if name in own.arrays else leaf.array.dtype
    if name not in own.arrays and dtype.itemsize < least:
        dtype = np.dtype(np.float32)
    scaled = read if factor == 1.0 else read * read.dtype.type(factor)
    new[name] = np.array(scaled, dtype, order="C")


def _put_counts(new: dict[str, Array], own: Side, counts: Mapping[str, int], step: int) -> list[str]:
    """The counts into the target's arrays, and the number of applied updates wherever it lies."""
    import numpy as np

    shared: dict[str, dict[str, int]] = {}
    for leaf, number in counts.items():
        place = own.optimizer.counts.get(leaf)
        if place is None:
            continue
        if place.missed:
            missed = new[place.missed]
            if missed is own.arrays[place.missed]:
                missed = new[place.missed] = np.array(missed)
            missed[place.index] = step - number
            _number(new, own, place.array, step)
        else:
            shared.setdefault(place.array, {})[leaf] = number
    for name in {*own.optimizer.positions, "step"} & set(own.arrays):
        _number(new, own, name, step)
    said = []
    for name, numbers in shared.items():
        _number(new, own, name, max(numbers.values()))
        late = [leaf for leaf, number in numbers.items() if number != max(numbers.values())]
        if late:
            said.append(
                f"the target counts updates of all parameters together, where {', '.join(late[:3])} took fewer: its "
                "bias correction goes on with the larger number"
            )
    return said


def _number(new: dict[str, Array], own: Side, name: str, number: int) -> None:
    import numpy as np

    old = own.arrays.get(name)
    new[name] = np.full((), number, np.float32) if old is None else np.full(old.shape, number, old.dtype)
