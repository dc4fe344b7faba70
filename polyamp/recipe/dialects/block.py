"""`DialectTable`, what each key of a library's options is; `DialectBlock`, the options while they are read;
`DialectReport`, the result.

A key of a block ends in exactly one place of the report: mapped, unmapped or outside.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.display import first_lines
from polyamp.errors import ArgumentError, RecipeError, describe_value, did_you_mean, join_first

ON_LOSS = "of the loss, which is the program's"
"""Why a key of the loss is not mapped."""


class Unmapped(NamedTuple):
    """A key that changes the numbers of a training and that no recipe has.

    Attributes:
        off: its values that change nothing.
        why: why it is not mapped, and what to do.
    """

    off: tuple[Any, ...]
    why: str


class DialectTable(NamedTuple):
    """What each key of a library's block is.

    Attributes:
        library: the block's name in messages.
        defaults: keys that are read into a recipe, with the library's default.
        unmapped: keys that matter and are not read.
        outside: keys and whole sections that have nothing to do with a recipe.
        sections: whether the block has sections, whose keys are written `section.key`.
    """

    library: str
    defaults: Mapping[str, Any]
    unmapped: Mapping[str, Unmapped]
    outside: frozenset[str]
    sections: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of the table."""
        return (*self.defaults, *self.unmapped, *sorted(self.outside))


def key_set(text: str) -> frozenset[str]:
    """Return keys that a text lists with spaces.

    >>> sorted(key_set("seed debug"))
    ['debug', 'seed']
    """
    return frozenset(text.split())


class DialectReport(NamedTuple):
    """What became of every key of a block.

    Attributes:
        library: the block's name.
        fields: arguments of `Recipe`.
        mapped: key -> the part of the recipe that it became.
        defaults: key that the block leaves out -> the part of the recipe that the library's default became.
        unmapped: key -> why it is not mapped. The recipe trains otherwise than the library would.
        outside: key -> why it has no part in a recipe.
        notes: key -> where polyamp's meaning differs from the library's.
    """

    library: str
    fields: dict[str, Any]
    mapped: dict[str, str]
    defaults: dict[str, str]
    unmapped: dict[str, str]
    outside: dict[str, str]
    notes: dict[str, str]

    def __str__(self) -> str:
        lines = [self.library]
        for title in ("mapped", "defaults", "unmapped", "outside", "notes"):
            entries: dict[str, str] = getattr(self, title)
            lines += [f"{title}:", *(f"  {key}: {text}" for key, text in entries.items())] if entries else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def check(self, leave_out: Sequence[str] = ()) -> None:
        """Raise if a key is not mapped that the caller does not leave out by name."""
        if isinstance(leave_out, str):
            raise ArgumentError(f"leave_out must be a list of keys. Received: leave_out={leave_out!r}.")
        for key in leave_out:
            if key not in self.unmapped:
                known = f" Not mapped are: {', '.join(self.unmapped)}." if self.unmapped else " Every key is mapped."
                raise ArgumentError(f"leave_out names keys that are not mapped. Received: {key!r}.{known}")
        lost = {key: why for key, why in self.unmapped.items() if key not in leave_out}
        if lost:
            raise RecipeError(
                f"{self.library}: not every key can be mapped. "
                + join_first([f"{key}: {why}" for key, why in lost.items()], 8, " ")
                + f" To read the rest: leave_out={list(lost)!r}."
            )


class DialectBlock:
    """The options of one block, and what becomes of each.

    Args:
        table: what each key is.
        block: a mapping, or an object with attributes: a dataclass, an argparse namespace.
    """

    def __init__(self, table: DialectTable, block: Any) -> None:
        self.table = table
        self.values = dict(_flat_items(_plain_mapping(block, table.library), table, ""))
        self._report = DialectReport(table.library, {}, {}, {}, {}, {}, {})
        for key, value in self.values.items():
            self._enter(key, value)

    def _enter(self, key: str, value: Any) -> None:
        """Put a key that is not read into the recipe into its place."""
        table, parents = self.table, _prefixes(key)
        row = next((table.unmapped[parent] for parent in parents if parent in table.unmapped), None)
        if key in table.defaults:
            return
        if row is not None:
            if any(value is off or (value == off and type(value) is type(off)) for off in row.off):
                self._report.outside[key] = f"{value!r}: it changes nothing"
            else:
                self._report.unmapped[key] = row.why
        elif any(parent in table.outside for parent in parents):
            self._report.outside[key] = "not of a recipe"
        else:
            self._report.unmapped[key] = f"no key that polyamp knows of {table.library}.{did_you_mean(key, table.keys)}"

    def has(self, key: str) -> bool:
        """Return whether the block says a key itself."""
        return key in self.values

    def read(self, key: str, part: str) -> Any:
        """Return a key's value, or the library's default, and report the part of the recipe that it becomes."""
        value = self.values.get(key, self.table.defaults[key])
        if value == "auto":
            raise RecipeError(
                f"{self.table.library}: {key!r} is 'auto', which another library fills in. Write its value, or leave "
                "the key out."
            )
        place = self._report.mapped if key in self.values else self._report.defaults
        place[key] = f"{part}: {value!r}"
        return value

    def refuse(self, key: str, why: str) -> None:
        """Report a key as not mapped, because of its value."""
        self._report.mapped.pop(key, None)
        self._report.defaults.pop(key, None)
        self._report.unmapped[key] = why

    def note(self, key: str, text: str) -> None:
        """Report where polyamp's meaning of a key differs from the library's."""
        self._report.notes[key] = text

    def report(self, **fields: Any) -> DialectReport:
        """Return the report. Keys that were not read have no effect beside the others."""
        known = (*self._report.mapped, *self._report.unmapped, *self._report.outside)
        for key in self.values:
            if key not in known:
                self._report.outside[key] = "no effect beside the other keys"
        self._report.fields.update({name: value for name, value in fields.items() if value is not None})
        return self._report


def need_total_steps(block: DialectBlock, key: str) -> RecipeError:
    """Return the error of a schedule whose length the block does not say."""
    return RecipeError(
        f"{block.table.library}: {key} needs the number of updates, and the block does not say it. Pass "
        "total_steps=... (or updates_per_epoch=..., if the block counts epochs)."
    )


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _plain_mapping(block: Any, library: str) -> dict[str, Any]:
    section = _section(block)
    if section is not None:
        return dict(section)
    if not isinstance(block, str | bytes | int | float | list | tuple | type | None) and hasattr(block, "__dict__"):
        return dict(vars(block))
    raise ArgumentError(
        f"block must be {library} as a dictionary, or the object. Received: {describe_value(block)}. Of a file, pass "
        "what json.load or tomllib.load returned."
    )


def _flat_items(values: Mapping[str, Any], table: DialectTable, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if not isinstance(name, str):
            raise ArgumentError(f"{table.library}: keys must be strings. Received: {describe_value(name)}.")
        key = prefix + name
        nested = _section(value) if table.sections else None
        if nested is not None and (key not in table.keys or any(row.startswith(key + ".") for row in table.keys)):
            yield from _flat_items(nested, table, key + ".")
            continue
        yield key, value.value if isinstance(value, enum.Enum) else value


def _section(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    fields = getattr(type(value), "__dataclass_fields__", None)
    return None if fields is None else {name: getattr(value, name) for name in fields}
