"""Rename rules of the user, `names={"regex": "replacement"}`, for layers whose names do not determine a match.

An entry with fields in braces is a template (`name_templates`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polyamp.errors import PortError, closest_words, describe_value
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.name_templates import PathedLayer, apply_templates, is_template


def check_rename_rules(names: object) -> dict[str, str]:
    """Validate the argument `names` and return it as a dict.

    Raises:
        PortError: `names` is not a mapping of regular expressions to strings.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise PortError(
            'names must map regular expressions over the source\'s paths to replacements: {r"^transformer/": ""}. '
            f"Received: {describe_value(names)}."
        )
    for pattern, replacement in names.items():
        if not isinstance(pattern, str) or not isinstance(replacement, str):
            raise PortError(
                "names must map a regular expression to a replacement, both strings. Received: "
                f"{describe_value(pattern)}: {describe_value(replacement)}."
            )
        if is_template(pattern) != is_template(replacement):
            raise PortError(
                f"names: {pattern!r} and {replacement!r} must both have fields in braces, or neither, such as "
                '{"block{n}": "layers/{n}"}.'
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise PortError(f"names: {pattern!r} is no regular expression: {error}.") from error
    return dict(names)


def apply_rename_rules(
    source: Sequence[NativeLayer], target: Sequence[NativeLayer], names: Mapping[str, str]
) -> tuple[list[PathedLayer], list[PathedLayer]]:
    """Return the layers of both sides with paths renamed by `names`, one expression after the other. Only templates
    rename the target's.

    Raises:
        PortError: an expression matches no path, a replacement refers to a missing group, or two layers get the same
            path.
    """
    templates = {pattern: replacement for pattern, replacement in names.items() if is_template(pattern)}
    names = {pattern: replacement for pattern, replacement in names.items() if pattern not in templates}
    renamed = _renamed_layers(source, names)
    return apply_templates(renamed, [(layer.path, layer) for layer in target], templates)


def _renamed_layers(source: Sequence[NativeLayer], names: Mapping[str, str]) -> list[PathedLayer]:
    found = []
    used = set()
    for layer in source:
        path = layer.path
        for pattern, replacement in names.items():
            try:
                path, count = re.subn(pattern, replacement, path)
            except (re.error, IndexError) as error:
                raise PortError(f"names: {replacement!r} cannot replace {pattern!r}: {error}.") from error
            used |= {pattern} if count else set()
        found.append((path.strip("/"), layer))
    for pattern in names:
        if pattern not in used:
            close = closest_words(pattern, [layer.path for layer in source]) or [layer.path for layer in source][:3]
            raise PortError(
                f"names: {pattern!r} matches no path of the source (paths are divided by '/'). Nearest: "
                f"{', '.join(map(repr, close))}."
            )
    paths: dict[str, str] = {}
    for path, layer in found:
        if path != layer.path and paths.get(path, layer.path) != layer.path:
            raise PortError(f"names: {paths[path]!r} and {layer.path!r} of the source both become {path!r}.")
        paths[path] = layer.path
    return found
