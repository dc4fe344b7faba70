"""S5: which dtype the overrides of a policy give a module, by its `/`-separated path.

`*` stays inside one segment of a path, `**` crosses segments, and a glob that matches a module covers what is inside
it. The longest matching glob wins; of two equally long ones, the last in alphabetical order. Called by `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyamp.errors import PolicyError, PolyampError, nearest


def covers(glob: str, path: str) -> bool:
    """Whether `glob` matches the module at `path` or one of the modules it lies in.

    >>> covers("encoder/norm*", "encoder/norm1/scale"), covers("*/head", "a/b/head")
    (True, False)
    """
    return _covers(glob.split("/"), path.split("/"))


def _covers(globs: list[str], segments: list[str]) -> bool:
    from fnmatch import fnmatchcase  # brings `re`, which a program without overrides does not need

    if not globs:
        return True
    if globs[0] == "**":
        return any(_covers(globs[1:], segments[start:]) for start in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], globs[0]) and _covers(globs[1:], segments[1:])


def precedence(glob: str) -> tuple[int, str]:
    """Sorts globs so that of those which cover a path the last one decides.

    >>> sorted(["encoder/*", "encoder", "norm*"], key=precedence)
    ['norm*', 'encoder', 'encoder/*']
    """
    return len(glob), glob


def winner(overrides: Mapping[str, str], *paths: str) -> str | None:
    """The glob that decides about a module with these paths (it may be reached by several), or None.

    >>> winner({"encoder": "float32", "encoder/*": "bfloat16"}, "encoder/norm")
    'encoder/*'
    """
    matching = [glob for glob in overrides if any(covers(glob, path) for path in paths)]
    return max(matching, key=precedence) if matching else None


def dtype_at(overrides: Mapping[str, str], *paths: str) -> str | None:
    """The dtype that the overrides give a module with these paths, or None where none applies."""
    glob = winner(overrides, *paths)
    return None if glob is None else overrides[glob]


def check_all_match(
    globs: Iterable[str],
    paths: Iterable[str],
    *,
    argument: str = "overrides",
    what: str = "module path",
    error: type[PolyampError] = PolicyError,
) -> None:
    """Refuse a glob that matches nothing.

    Args:
        globs: the globs.
        paths: every path that there is, under each of its names.
        argument: what the user wrote them into.
        what: of what the paths are.
        error: what is raised.

    Raises:
        PolyampError: names the glob and the nearest of `paths`.
    """
    known = sorted(set(paths))
    for glob in globs:
        if not any(covers(glob, path) for path in known):
            close = nearest(glob, known) or [path for path in known if path][:5]
            raise error(
                f"{argument}: the glob {glob!r} matches no {what}. Nearest: {', '.join(map(repr, close))}. "
                "Paths are separated by '/', and '*' stays inside one segment."
            )


def check_glob(glob: Any, *, argument: str, error: type[PolyampError] = PolicyError) -> None:
    """Refuse what is no glob over paths.

    Raises:
        PolyampError: of the kind `error`; says what one looks like.
    """
    if not isinstance(glob, str) or not glob or "." in glob or glob != glob.strip("/"):
        raise error(
            f"{argument} is a module-path glob such as 'encoder/norm*', separated by '/' in every framework, "
            f"with no '/' at its ends and no '.'. Received: {glob!r}."
            + (f" Did you mean {glob.replace('.', '/').strip('/')!r}?" if isinstance(glob, str) and glob else "")
        )


def resolved(overrides: Mapping[str, str], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Module path -> dtype for every path that an override covers.

    Args:
        overrides: glob -> dtype.
        names: module path -> all of its names: the path itself and its aliases, as `aliases.named` finds them.

    Raises:
        PolicyError: a glob matches nothing; the message lists the nearest paths.

    >>> resolved({"head": "float32"}, {path: [path] for path in ("", "body", "head", "head/dense")})
    {'head': 'float32', 'head/dense': 'float32'}
    """
    if not overrides:
        return {}
    check_all_match(overrides, (name for own in names.values() for name in own))
    found = {path: dtype_at(overrides, *names[path]) for path in sorted(names)}
    return {path: dtype for path, dtype in found.items() if dtype is not None}
