"""Tables of the optimizers and schedules: arguments, defaults, slots and native classes, read from the specs.

The pages `reference/optimizers.md` and `reference/schedules.md` have the formulas, and a comment such as
`<!-- optimizer: adam -->` where a table belongs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from polyamp.recipe.optimizer_spec import NativeOptimizer, Spec
from polyamp.recipe.optimizers import SPECS
from polyamp.records import Record
from polyamp.schedules import Schedule
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES

LIBRARIES: Final = {"torch": "torch", "keras": "Keras", "optax": "optax"}
"""Key of `Spec.native` -> the heading of its column."""
_PLACE: Final = re.compile(r"^<!-- (.+) -->$", re.MULTILINE)


def tables() -> dict[str, str]:
    """Return the text of the comment that marks a place -> the table that belongs there."""
    found = {f"optimizer: {spec.tag}": _optimizer(spec) for spec in SPECS}
    found |= {f"schedule: {kind.tag}": _arguments(kind) for kind in get_args(Schedule)}
    return {**found, "optimizers": _native_classes(), "schedules of libraries": _library_schedules()}


def fill_tables(pages: Iterable[Path]) -> None:
    """Put every table into its place.

    Raises:
        LookupError: a place without a table, or a table without exactly one place.
    """
    left = tables()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        unknown = [mark for mark in _PLACE.findall(text) if mark not in left]
        if unknown:
            raise LookupError(f"{page.name} has places for tables that are not left: {unknown}")
        page.write_text(_PLACE.sub(lambda place: left.pop(place[1]), text), encoding="utf-8")
    if left:
        raise LookupError(f"tables without a place: {sorted(left)}")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _arguments(kind: type[Record]) -> str:
    """Return the table of a record's arguments; groups are those of every optimizer."""
    choices = getattr(kind, "choices", {})
    rows = []
    for name in kind.field_names:
        if name != "groups":
            default = f"`{_number(kind.defaults[name])}`" if name in kind.defaults else "required"
            words = ", ".join(f"`{word!r}`" for word in choices.get(name, ()))
            rows.append((f"`{name}`", default, words))
    if not choices:
        return _table(("argument", "default"), [row[:2] for row in rows])
    return _table(("argument", "default", "one of"), rows)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"({', '.join(map(_number, value))})" if isinstance(value, tuple) else repr(value)


def _optimizer(spec: type[Spec]) -> str:
    parts = [_arguments(spec)]
    rows = [
        (f"`{native.name}`", _names(native.slots), _names(native.options), native.note)
        for natives in spec.native.values()
        for native in natives
    ]
    if rows:
        parts.append(_table(("class with this state", "its slots", "its options", "another formula"), rows))
    return "\n\n".join(parts)


def _names(names: Any) -> str:
    """Return "theirs = ours" for each name that differs."""
    return ", ".join(f"`{theirs}` = `{ours}`" for theirs, ours in names.items() if theirs != ours)


def _native_classes() -> str:
    def cell(natives: Sequence[NativeOptimizer]) -> str:
        return ", ".join(f"`{native.name.rpartition('.')[2]}`" for native in natives)

    rows = []
    for spec in SPECS:
        scope = "each element alone" if spec.is_elementwise else "a parameter as a whole"
        decay = "from the parameter" if spec().decouples_decay else "to the gradient"
        own = [cell(spec.native.get(library, ())) for library in LIBRARIES]
        rows.append((f"[`{spec.tag}`](#{spec.tag})", *own, decay, scope))
    return _table(("optimizer", *LIBRARIES.values(), "weight decay", "depends on"), rows)


def _library_schedules() -> str:
    def row(name: str, make: Callable[..., Any]) -> tuple[str, str]:
        return f"`{name}`", ", ".join(f"`{each}`" for each in inspect.signature(make).parameters)

    return _table(("name", "arguments"), [row(*each) for each in LIBRARY_SCHEDULES.items()])
