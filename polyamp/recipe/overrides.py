"""S5: dtype overrides of a policy, matched against `/`-separated module paths.

`*` stays inside one segment of a path, `**` crosses segments, and a glob that matches a module covers its submodules.
The longest matching glob wins; of two equally long ones, the last in alphabetical order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyamp.errors import PolicyError, PolyampError, closest_words


def covers(glob: str, path: str) -> bool:
    """Whether `glob` matches the module at `path` or one of its parents.

    >>> covers("encoder/norm*", "encoder/norm1/scale"), covers("*/head", "a/b/head")
    (True, False)
    """
    return _covers_segments(glob.split("/"), path.split("/"))


def _covers_segments(globs: list[str], segments: list[str]) -> bool:
    from fnmatch import fnmatchcase  # imports `re`, which a program without overrides does not need

    if not globs:
        return True
    if globs[0] == "**":
        return any(_covers_segments(globs[1:], segments[start:]) for start in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], globs[0]) and _covers_segments(globs[1:], segments[1:])


def glob_precedence(glob: str) -> tuple[int, str]:
    """Return a sort key: of the globs that cover a path, the last one in this order decides.

    >>> sorted(["encoder/*", "encoder", "norm*"], key=glob_precedence)
    ['norm*', 'encoder', 'encoder/*']
    """
    return len(glob), glob


def deciding_glob(overrides: Mapping[str, str], *paths: str) -> str | None:
    """Return the glob that decides about a module with these paths (one for each use), or None.

    >>> deciding_glob({"encoder": "float32", "encoder/*": "bfloat16"}, "encoder/norm")
    'encoder/*'
    """
    matching = [glob for glob in overrides if any(covers(glob, path) for path in paths)]
    return max(matching, key=glob_precedence) if matching else None


def dtype_at(overrides: Mapping[str, str], *paths: str) -> str | None:
    """Return the dtype that the overrides give a module with these paths, or None if no override applies."""
    glob = deciding_glob(overrides, *paths)
    return None if glob is None else overrides[glob]


def check_all_match(
    globs: Iterable[str],
    paths: Iterable[str],
    *,
    argument: str = "overrides",
    what: str = "module path",
    error: type[PolyampError] = PolicyError,
) -> None:
    """Raise if a glob matches nothing.

    Args:
        globs: the globs.
        paths: all existing paths, under each of their names.
        argument: the user's argument that contains the globs.
        what: description of a path.
        error: class of the error.

    Raises:
        PolyampError: names the glob and the closest `paths`.
    """
    known = sorted(set(paths))
    for glob in globs:
        if not any(covers(glob, path) for path in known):
            close = closest_words(glob, known) or [path for path in known if path][:5]
            raise error(
                f"{argument}: the glob {glob!r} matches no {what}. Nearest: {', '.join(map(repr, close))}. "
                "Paths are separated by '/', and '*' stays inside one segment."
            )


def check_glob(glob: Any, *, argument: str, error: type[PolyampError] = PolicyError) -> None:
    """Raise if a value is not a glob over paths.

    Raises:
        PolyampError: of the class `error`; shows an example of a glob.
    """
    if not isinstance(glob, str) or not glob or "." in glob or glob != glob.strip("/"):
        raise error(
            f"{argument} is a module-path glob such as 'encoder/norm*', separated by '/' in every framework, "
            f"with no '/' at its ends and no '.'. Received: {glob!r}."
            + (f" Did you mean {glob.replace('.', '/').strip('/')!r}?" if isinstance(glob, str) and glob else "")
        )


def resolve_overrides(overrides: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return module path -> dtype for every path that an override covers.

    Args:
        overrides: glob -> dtype.
        names: module path -> all of its names, the path itself and its aliases, from `module_aliases.expand_aliases`.

    Raises:
        PolicyError: a glob matches nothing; the message lists the closest paths.

    >>> resolve_overrides({"head": "float32"}, {path: [path] for path in ("", "body", "head", "head/dense")})
    {'head': 'float32', 'head/dense': 'float32'}
    """
    if not overrides:
        return {}
    check_all_match(overrides, (name for own in names.values() for name in own))
    found = {path: dtype_at(overrides, *names[path]) for path in sorted(names)}
    return {path: dtype for path, dtype in found.items() if dtype is not None}
