"""`StepHistory`: gradients, slots and parameters of both sides before and after an update, as stored samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.parity.trace.sketch import Sketch
from polyamp.parity.trace.trace import NOT_SLOTS, Entry

Array = np.ndarray[Any, Any]
ParameterKey = tuple[str, str]
"""Path of a layer, name of an array in it."""
Samples = Mapping[ParameterKey, "Array"]
_MAX_CHANNEL_PARAMETERS: Final = 24
_MIN_GRADIENT_SHARE: Final = 1e-4
"""Least root mean square of a gradient, relative to the largest, that is not taken for rounding."""


class SideUpdate(NamedTuple):
    """What one side's update started from and what it made, for the parameters whose gradient is not rounding.

    Attributes:
        gradients: of the recorded pass, unscaled and not clipped.
        earlier_gradients: of the step before; empty at the first step.
        before, after: the parameters.
        slots: slot -> its arrays after the update.
        earlier_slots: slot -> its arrays before it; empty at the first step.
        norms: norm of each gradient.
        numbers: what the step reported: "scale", "loss", "grad_norm".
    """

    gradients: Samples
    earlier_gradients: Samples
    before: Samples
    after: Samples
    slots: Mapping[str, Samples]
    earlier_slots: Mapping[str, Samples]
    norms: Mapping[ParameterKey, float]
    numbers: Mapping[str, float]

    @property
    def global_norm(self) -> float:
        """Norm of all gradients."""
        return math.sqrt(sum(norm * norm for norm in self.norms.values()))


class StepHistory:
    """Entries of the current step and of the one before it, of both sides."""

    def __init__(self) -> None:
        self._now: tuple[Mapping[Any, Entry], Mapping[Any, Entry]] = ({}, {})
        self._earlier: tuple[list[Entry], list[Entry]] = ([], [])

    def advance(self, ours: Mapping[Any, Entry], theirs: Mapping[Any, Entry]) -> None:
        """Store the entries of a new step; of the last one only arrays of parameters remain."""
        one, two = (
            [e for e in step.values() if e.sketch is not None and (e.stage == "update" or e.what == "gradient")]
            for step in self._now
        )
        self._earlier = (one, two)
        self._now = (ours, theirs)

    def entries(self, side: int) -> Mapping[Any, Entry]:
        """Return the entries of a side's current step: 0 for the first side, 1 for the other."""
        return self._now[side]

    def both(self) -> tuple[Mapping[Any, Entry], Mapping[Any, Entry]]:
        """Return the entries of both sides' current step."""
        return self._now

    def output(self, module: str) -> Sketch | None:
        """Return the first side's output of a module in this step; None if there is none."""
        found = (e for e in self._now[0].values() if (e.module, e.stage, e.what) == (module, "forward", "output"))
        return next((entry.sketch for entry in found), None)

    def channel_parameters(self, module: str, width: int) -> dict[ParameterKey, Array]:
        """Return the first side's parameters of some width before this step, of the layers nearest to a module by path.

        Args:
            module: path of the module.
            width: number of elements, one for each channel.
        """
        found = _samples(self._earlier[0], lambda e: e.what == "parameter")
        keys = [key for key, array in found.items() if array.size == width]
        keys.sort(key=lambda key: -_shared_parts(key[0], module))
        return {key: found[key] for key in keys[:_MAX_CHANNEL_PARAMETERS]}

    def updates(self) -> tuple[SideUpdate, SideUpdate]:
        """Return the update of both sides, with the parameters that both have."""
        one, two = (
            _side_update(list(now.values()), earlier) for now, earlier in zip(self._now, self._earlier, strict=True)
        )
        common = one.gradients.keys() & two.gradients.keys()
        return _restrict(one, common), _restrict(two, common)


def _shared_parts(one: str, other: str) -> int:
    """Return the number of leading parts that two paths share."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _side_update(now: list[Entry], earlier: list[Entry]) -> SideUpdate:
    gradients = _samples(now, lambda e: e.what == "gradient")
    before, after = (_samples(entries, lambda e: e.what == "parameter") for entries in (earlier, now))
    sizes = {key: array.size for key, array in gradients.items()}
    roots = {
        (e.module, e.name): (e.sketch.rms, e.sketch.norm) for e in now if e.what == "gradient" and e.sketch is not None
    }
    least = _MIN_GRADIENT_SHARE * max((rms for rms, _ in roots.values()), default=0.0)
    usable = {
        key
        for key, size in sizes.items()
        if roots[key][0] > least and all(key in each and each[key].size == size for each in (before, after))
    }
    numbers = {e.what: e.number for e in now if e.stage == "step" and e.number is not None}
    side = SideUpdate(
        gradients,
        _samples(earlier, lambda e: e.what == "gradient"),
        before,
        after,
        {slot: _samples(now, _slot_test(slot)) for slot in _slot_names(now)},
        {slot: _samples(earlier, _slot_test(slot)) for slot in _slot_names(earlier)},
        {key: norm for key, (_, norm) in roots.items()},
        numbers,
    )
    return _restrict(side, usable)


def _slot_names(entries: list[Entry]) -> list[str]:
    return sorted({e.what for e in entries if e.stage == "update"} - set(NOT_SLOTS))


def _slot_test(slot: str) -> Callable[[Entry], bool]:
    return lambda entry: entry.stage == "update" and entry.what == slot


def _samples(entries: list[Entry], condition: Callable[[Entry], bool]) -> dict[ParameterKey, Array]:
    return {(e.module, e.name): e.sketch.samples() for e in entries if e.sketch is not None and condition(e)}


def _restrict(side: SideUpdate, keys: set[ParameterKey]) -> SideUpdate:
    """Return a side's update with some parameters; the norms stay those of all."""

    def chosen(arrays: Samples) -> dict[ParameterKey, Array]:
        return {key: array for key, array in arrays.items() if key in keys}

    return side._replace(
        gradients=chosen(side.gradients),
        earlier_gradients=chosen(side.earlier_gradients),
        before=chosen(side.before),
        after=chosen(side.after),
        slots={slot: chosen(arrays) for slot, arrays in side.slots.items()},
        earlier_slots={slot: chosen(arrays) for slot, arrays in side.earlier_slots.items()},
    )
