"""`NameTemplate`, one entry of `names=` for many modules: `{"block{n}{l}": "blocks/{n}/{i}"}`.

A field in braces stands for a number, or for a letter if its name begins with "l". Modules of the source that match the
key correspond to modules of the target that match the value: by the fields if both have the same, else in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from polyamp.errors import PortError, closest_words, join_first
from polyamp.porting.layouts.inventory import NativeLayer

Fields = tuple[int | str, ...]
PathedLayer = tuple[str, NativeLayer]
_FIELD: Final = re.compile(r"\{([A-Za-z]\w*)\}")


def is_template(pattern: str) -> bool:
    """Return whether an entry of `names=` has fields.

    >>> is_template("block{n}{l}"), is_template("^h/(a{2})/")
    (True, False)
    """
    return _FIELD.search(pattern) is not None


class _MatchedPath(NamedTuple):
    """A path that a template matches: the module's part, the values of the fields, and the rest of the path."""

    module: str
    fields: Fields
    rest: str


class _Template:
    """One side of an entry.

    Args:
        text: the template.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.names = tuple(_FIELD.findall(text))
        pieces = _FIELD.split(text)  # literal, field, literal, ...
        made = [re.escape(piece) if not number % 2 else _field_pattern(piece) for number, piece in enumerate(pieces)]
        self._pattern = re.compile(rf"(?:^|(?<=/)){''.join(made)}(?=[/_.]|$)")

    def match(self, path: str) -> _MatchedPath | None:
        """Return what of a path matches; None if nothing does."""
        found = self._pattern.search(path)
        if found is None:
            return None
        fields = tuple(int(value) if value.isdigit() else value for value in found.groups())
        return _MatchedPath(path[: found.end()], fields, path[found.end() :].lstrip("/_."))


def _field_pattern(name: str) -> str:
    return "([A-Za-z])" if name.startswith("l") else r"(\d+)"


def apply_templates(
    ours: Sequence[PathedLayer], theirs: Sequence[PathedLayer], templates: Mapping[str, str]
) -> tuple[list[PathedLayer], list[PathedLayer]]:
    """Return the layers of both sides with new paths, in which modules that correspond have one name.

    Raises:
        PortError: a template matches no path or two modules with the same fields, or the numbers of modules differ.
    """
    for key, value in templates.items():
        source, target = _Template(key), _Template(value)
        if len(set(source.names)) != len(source.names) or len(set(target.names)) != len(target.names):
            raise PortError(f"names: a field occurs twice in {key!r} or {value!r}. Give each its own name.")
        sides = [
            _modules(template, [path for path, _ in layers], side)
            for template, layers, side in ((source, ours, "source"), (target, theirs, "target"))
        ]
        names = _common_names(source, target, *sides)
        ours, theirs = (
            list(_renamed(template, layers, side_names))
            for template, layers, side_names in zip((source, target), (ours, theirs), names, strict=True)
        )
    return list(ours), list(theirs)


def _modules(template: _Template, paths: Sequence[str], side: str) -> dict[Fields, str]:
    """Return the modules that a template matches, by their fields."""
    found: dict[Fields, str] = {}
    for path in paths:
        matched = template.match(path)
        if matched is not None and found.setdefault(matched.fields, matched.module) != matched.module:
            raise PortError(
                f"names: {template.text!r} matches both {found[matched.fields]!r} and {matched.module!r} of the "
                f"{side}. Write more of the path."
            )
    if not found:
        close = closest_words(_FIELD.sub("0", template.text), paths) or paths[:3]
        raise PortError(
            f"names: {template.text!r} matches no path of the {side} (a field is a number, one whose name begins with "
            f"'l' a letter). Nearest: {', '.join(map(repr, close))}."
        )
    return found


def _common_names(
    source: _Template, target: _Template, ours: Mapping[Fields, str], theirs: Mapping[Fields, str]
) -> tuple[dict[Fields, str], dict[Fields, str]]:
    """Return the common name of each module, by the fields of each side: the target's name."""
    if len(ours) != len(theirs):
        listed = [join_first([*map(repr, side.values())], 4) for side in (ours, theirs)]
        raise PortError(
            f"names: {source.text!r} matches {len(ours)} modules of the source ({listed[0]}), and {target.text!r} "
            f"{len(theirs)} of the target ({listed[1]})."
        )
    if sorted(source.names) == sorted(target.names):
        order = [target.names.index(name) for name in source.names]
        by_source = {tuple(fields[number] for number in order): module for fields, module in theirs.items()}
        if missing := [module for fields, module in ours.items() if fields not in by_source]:
            raise PortError(
                f"names: {target.text!r} matches nothing in the target for {missing[0]!r} of the source. Give its "
                "fields other names than the source's, and modules correspond in their order."
            )
        return by_source, dict(theirs)
    pairs = zip(sorted(ours), sorted(theirs), strict=True)  # one template's fields have the same types
    return {mine: theirs[yours] for mine, yours in pairs}, dict(theirs)


def _renamed(template: _Template, layers: Sequence[PathedLayer], names: Mapping[Fields, str]) -> Iterator[PathedLayer]:
    for path, layer in layers:
        matched = template.match(path)
        yield (path if matched is None else f"{names[matched.fields]}/{matched.rest}".strip("/")), layer
