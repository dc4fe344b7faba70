"""S5: recipe aliases for modules whose paths differ between frameworks.

`{"blocks/*": {"torch": "transformer/h/*", "jax": "h_*"}}` gives `transformer/h/0/attn` of torch the second name
`blocks/0/attn`. A glob over paths matches either name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyamp.errors import PolicyError, closest_words

Aliases = Mapping[str, Mapping[str, str]]
"""Alias -> backend name -> path of the module in that framework."""


def parse_aliases(aliases: Any) -> dict[str, dict[str, str]]:
    """Convert aliases to plain dicts.

    Raises:
        PolicyError: names the entry that is no alias or no path.
    """
    if not isinstance(aliases, Mapping):
        raise PolicyError(
            "aliases must map a name to its path in each framework: {'blocks/*': {'torch': 'transformer/h/*', "
            f"'jax': 'h_*'}}. Received: {aliases!r}."
        )
    found: dict[str, dict[str, str]] = {}
    for alias, paths in aliases.items():
        _check_alias_path(alias, "aliases")
        if not isinstance(paths, Mapping):
            raise PolicyError(
                f"aliases[{alias!r}] must map a backend's name to a path: {{'torch': 'transformer/h/*'}}. "
                f"Received: {paths!r}."
            )
        for backend, path in paths.items():
            where = f"aliases[{alias!r}][{backend!r}]"
            _check_alias_path(path, where)
            if path.count("*") != alias.count("*"):
                raise PolicyError(
                    f"{where}: an alias and its path have one '*' each, which stands for the same text, or none. "
                    f"Received: {path!r}."
                )
        found[alias] = {str(backend): str(path) for backend, path in paths.items()}
    return found


def expand_aliases(
    aliases: Aliases,
    backend: str | None,
    places: Iterable[Sequence[str]],
    elsewhere: Callable[[], Iterable[str]] = tuple,
) -> list[tuple[str, ...]]:
    """Return all names of each module or parameter: its paths, then its aliases.

    Args:
        aliases: as `parse_aliases` returns them.
        backend: backend whose spelling the paths have. An alias without an entry for it is used as a path.
        places: the paths of each module or parameter; several if it is shared between modules.
        elsewhere: returns further paths that an alias may match.

    Raises:
        PolicyError: an alias matches no path, equals the path of something else, or names two things.

    >>> expand_aliases({"blocks/*": {"torch": "h/*"}}, "torch", [("h/0/attn",), ("head",)])
    [('h/0/attn', 'blocks/0/attn'), ('head',)]
    """
    found = [dict.fromkeys(paths) for paths in places]
    if not aliases:
        return [tuple(names) for names in found]
    if backend is None:
        raise PolicyError("a policy with aliases resolves them for one backend: policy.plan(paths, backend='torch').")
    owner = {path: number for number, names in enumerate(found) for path in names}
    known = list(owner)
    for alias, entries in aliases.items():
        own = entries.get(backend)
        if own is None:
            continue
        pairs = [(path, name) for path in known if (name := _alias_path(path, own, alias)) is not None]
        if not pairs and not any(_alias_path(path, own, alias) for path in elsewhere()):
            close = closest_words(own, known) or [path for path in known if path][:5]
            raise PolicyError(
                f"aliases: {alias!r} is {own!r} on the {backend} backend, which matches no path of this model. "
                f"Nearest: {', '.join(map(repr, close))}."
            )
        for path, name in pairs:
            if owner.setdefault(name, owner[path]) != owner[path]:
                other = next(iter(found[owner[name]]))
                raise PolicyError(
                    f"aliases: {alias!r} gives {path!r} the name {name!r}, which is already a name of {other!r} in "
                    "this model. Choose another alias."
                )
            found[owner[path]][name] = None
    return [tuple(names) for names in found]


def _alias_path(path: str, own: str, alias: str) -> str | None:
    """Return the name of `path` under an alias for `own`, or None if `path` is not within the module `own`.

    >>> _alias_path("block_3/dense/kernel", "block_*", "blocks/*")
    'blocks/3/dense/kernel'
    """
    segments, wanted = path.split("/"), own.split("/")
    if len(segments) < len(wanted):
        return None
    star = ""
    for segment, want in zip(segments, wanted, strict=False):
        before, has_star, after = want.partition("*")
        if not has_star:
            if segment != want:
                return None
            continue
        if not (segment.startswith(before) and segment.endswith(after) and len(segment) > len(before) + len(after)):
            return None
        star = segment[len(before) : len(segment) - len(after)]
    return "/".join([alias.replace("*", star), *segments[len(wanted) :]])


def _check_alias_path(path: Any, where: str) -> None:
    fits = isinstance(path, str) and path and "." not in path and path == path.strip("/")
    if not fits or path.count("*") > 1 or any(mark in path for mark in "?["):
        raise PolicyError(
            f"{where}: a module's path is separated by '/', with no '/' at its ends, no '.', and at most one '*', "
            f"which stands for a part of one segment. Received: {path!r}."
        )
