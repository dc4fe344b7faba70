"""Causes in the backward pass: gradients that are cut off, arrays whose uses differ, and where the pass agrees last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import join_first
from polyamp.parity.trace.trace import Entry
from polyamp.parity.verdict.causes.cause import Cause
from polyamp.parity.verdict.causes.known_arrays import agreed_before
from polyamp.parity.verdict.step_entries import is_absent

_EQUAL: Final = 1e-4
_MAX_NAMED: Final = 4


def missing_gradient(
    labels: tuple[str, str], entries: tuple[Entry, Entry], sides: tuple[Mapping[Any, Entry], Mapping[Any, Entry]]
) -> Cause:
    """Return that one side's loss does not depend on an array, and on which others.

    Args:
        labels: of both sides.
        entries: of the gradient, of both sides.
        sides: all entries of the step, of both sides.
    """
    number = 0 if is_absent(entries[0]) else 1
    without, other = labels[number], labels[1 - number]
    entry = entries[1 - number]
    text = f"Of {entry.name!r} of {entry.module!r} the loss of {without} does not know; that of {other} does."
    evidence = [f"{other} has a gradient of root mean square {entry.array_sketch.rms:.3g}; {without} has none."]
    absent = {key for key, each in sides[number].items() if is_absent(each)}
    modules = list(dict.fromkeys(key[2] for key in absent if not is_absent(sides[1 - number].get(key, entry))))
    order = list(
        dict.fromkeys(each.module.partition("#")[0] for each in sides[1 - number].values() if each.stage == "forward")
    )
    modules.sort(key=lambda path: order.index(path) if path in order else -1)
    if len(modules) > 1:
        last = f" The last of them in the forward pass is {modules[-1]!r}: cut off (detached) behind it." * (
            modules[-1] in order
        )
        named = join_first(modules[::-1], _MAX_NAMED)
        evidence.insert(0, f"{without} has no gradient of {len(absent)} arrays, those of {named}.{last}")
    else:
        evidence.insert(0, f"All other arrays of {without} have one: is this one frozen, or detached where it is used?")
    return Cause("missing", text, evidence)


def backward_evidence(entry: Entry, sides: tuple[Mapping[Any, Entry], Mapping[Any, Entry]]) -> list[str]:
    """Return up to where the backward pass agrees.

    Args:
        entry: the gradient that differs, of the first side.
        sides: all entries of the step, of both sides.
    """
    agreed = ""
    for each in agreed_before(entry, *sides, ("cotangent",), _EQUAL):
        agreed = each.module
        if entry.what == "gradient" and each.module.partition("#")[0] == entry.module:
            return [
                f"The gradient that reaches the output of {entry.module!r} agrees. Is {entry.name!r} used elsewhere "
                "too (tied), and detached there in one side, or counted twice?"
            ]
    return [f"The gradient that reaches the output of {agreed!r} agrees: between the two."] if agreed else []
