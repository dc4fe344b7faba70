"""`PhaseTrace` and the entries of one step of it: read step by step, indexed by key, and in program order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from polyamp.parity.trace.trace import NOT_SLOTS, Entry, Trace, entry_key
from polyamp.parity.verdict import hidden_modules
from polyamp.parity.verdict.alignment import Alignment

StepEntries = Mapping[tuple[Any, ...], Entry]


class PhaseTrace(NamedTuple):
    """One side's run of one phase.

    Attributes:
        trace: the run without its entries.
        entries: returns a new iterator over its entries, in recorded order.
    """

    trace: Trace
    entries: Callable[[], Iterable[Entry]]


def entries_by_step(run: PhaseTrace) -> Iterator[dict[tuple[Any, ...], Entry]]:
    """Yield the entries of each step by their keys, one step at a time."""
    return map(_index_entries, _split_steps(run.entries()))


def _split_steps(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Yield the entries of each step as a list, in order."""
    number, found = 0, list[Entry]()
    for entry in entries:
        while entry.step > number:
            yield found
            number, found = number + 1, []
        found.append(entry)
    yield found


def _index_entries(entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
    return {entry_key(entry): entry for entry in entries}


def module_path(module: str) -> str:
    """Return the path of an entry's module without the number of its call.

    >>> module_path("block/attention#2")
    'block/attention'
    """
    return module.partition("#")[0]


def order_entries(step: StepEntries, alignment: Alignment) -> list[Entry]:
    """Return entries in program order; gradients follow their module's cotangents, slots precede parameters."""
    entries = list(step.values())
    forward = [entry for entry in entries if entry.stage == "forward"]
    place: dict[str, float] = {}
    for number, entry in enumerate(forward):
        place.setdefault(entry.module.partition("#")[0], number)
    place |= hidden_modules.recurrent_cell_positions(alignment, place)
    back = [entry for entry in entries if entry.stage == "backward"]
    order = {id(entry): number for number, entry in enumerate(back)}

    def backward(entry: Entry) -> tuple[float, int, int]:
        module = entry.module.partition("#")[0]
        return (-place.get(module, -1), int(entry.what == "gradient"), order[id(entry)])

    metrics = [entry for entry in entries if entry.stage == "step"]
    update = [entry for entry in entries if entry.stage == "update"]
    slots = [entry for entry in update if entry.what not in NOT_SLOTS]
    return [*forward, *sorted(back, key=backward), *metrics, *slots, *(e for e in update if e not in slots)]


def is_downstream_of_output(entry: Entry) -> bool:
    """Return whether an entry depends on the model's output through the loss."""
    return entry.what == "loss" or (entry.stage == "backward" and bool(entry.module))


def has_overflow(ours: StepEntries, theirs: StepEntries) -> bool:
    """Return whether the gradients of this step are non-finite on both sides.

    A user's loop reports no norm: its recorded gradients are looked at, where the other side reports one.
    """
    norms = [
        [e.number for e in step.values() if e.what == "grad_norm" and e.number is not None] for step in (ours, theirs)
    ]
    return any(norms) and all(
        not any(map(math.isfinite, found)) if found else _has_nonfinite_gradient(step)
        for found, step in zip(norms, (ours, theirs), strict=True)
    )


def _has_nonfinite_gradient(step: StepEntries) -> bool:
    return any(e.what == "gradient" and e.sketch is not None and e.sketch.nonfinite for e in step.values())
