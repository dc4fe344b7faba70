"""S5: names that a recipe gives to modules whose paths differ between frameworks.

`{"blocks/*": {"torch": "transformer/h/*", "jax": "h_*"}}` gives `transformer/h/0/attn` of torch the second name
`blocks/0/attn`. A glob over paths matches either. Called by `Policy.plan` and by the resolution of parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from polyamp.errors import PolicyError, nearest

Aliases = Mapping[str, Mapping[str, str]]
"""Alias -> name of a backend -> the module's path there."""


def checked(aliases: Any) -> dict[str, dict[str, str]]:
    """Aliases as plain data.

    Raises:
        PolicyError: says which is not an alias, or not a path.
    """
    if not isinstance(aliases, Mapping):
        raise PolicyError(
            "aliases must map a name to its path in each framework: {'blocks/*': {'torch': 'transformer/h/*', "
            f"'jax': 'h_*'}}. Received: {aliases!r}."
        )
    found: dict[str, dict[str, str]] = {}
    for alias, paths in aliases.items():
        _check(alias, "aliases")
        if not isinstance(paths, Mapping):
            raise PolicyError(
                f"aliases[{alias!r}] must map a backend's name to a path: {{'torch': 'transformer/h/*'}}. "
                f"Received: {paths!r}."
            )
        for backend, path in paths.items():
            where = f"aliases[{alias!r}][{backend!r}]"
            _check(path, where)
            if path.count("*") != alias.count("*"):
                raise PolicyError(
                    f"{where}: an alias and its path have one '*' each, which stands for the same text, or none. "
                    f"Received: {path!r}."
                )
        found[alias] = {str(backend): str(path) for backend, path in paths.items()}
    return found


def named(
    aliases: Aliases,
    backend: str | None,
    places: Iterable[Sequence[str]],
    elsewhere: Callable[[], Iterable[str]] = tuple,
) -> list[tuple[str, ...]]:
    """All names of each place: its paths, then those that aliases give it.

    Args:
        aliases: as `checked` returns them.
        backend: whose spelling the paths have. An alias without an entry for it is a path of its own.
        places: the paths of each module or parameter; several where it lies in several modules.
        elsewhere: tells paths of which no names are asked, but which an alias may match.

    Raises:
        PolicyError: an alias matches no path, or is a path of something else, or of two things.

    >>> named({"blocks/*": {"torch": "h/*"}}, "torch", [("h/0/attn",), ("head",)])
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
        pairs = [(path, name) for path in known if (name := _renamed(path, own, alias)) is not None]
        if not pairs and not any(_renamed(path, own, alias) for path in elsewhere()):
            close = nearest(own, known) or [path for path in known if path][:5]
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


def _renamed(path: str, own: str, alias: str) -> str | None:
    """The name of `path` under an alias for `own`, or None where `own` is no module that it lies in.

    >>> _renamed("block_3/dense/kernel", "block_*", "blocks/*")
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


def _check(path: Any, where: str) -> None:
    fits = isinstance(path, str) and path and "." not in path and path == path.strip("/")
    if not fits or path.count("*") > 1 or any(mark in path for mark in "?["):
        raise PolicyError(
            f"{where}: a module's path is separated by '/', with no '/' at its ends, no '.', and at most one '*', "
            f"which stands for a part of one segment. Received: {path!r}."
        )
