"""Paths that differ in their separators alone: `blocks/0/q_proj` and `blocks_0_q_proj` are one name."""

from __future__ import annotations

from collections.abc import Sequence

from polyamp.porting.layouts.inventory import NativeLayer

PathLayers = list[tuple[str, NativeLayer]]


def share_spelling(
    source: Sequence[tuple[str, NativeLayer]], target: Sequence[tuple[str, NativeLayer]]
) -> tuple[PathLayers, PathLayers]:
    """Return both sides with one spelling of their paths, that with more modules, if each path of a side is one of the
    other's but for its separators; else both as they are."""
    ours, theirs = ({_flatten(path): path for path, _ in side} for side in (source, target))
    if ours.keys() != theirs.keys() or len(ours) != len(source) or len(theirs) != len(target):
        return list(source), list(target)
    shared = {flat: max(ours[flat], theirs[flat], key=lambda path: path.count("/")) for flat in ours}
    return [(shared[_flatten(path)], layer) for path, layer in source], [
        (shared[_flatten(path)], layer) for path, layer in target
    ]


def _flatten(path: str) -> str:
    """Return a path with one separator.

    >>> _flatten("blocks/0/q_proj")
    'blocks_0_q_proj'
    """
    return path.replace("/", "_").replace(".", "_")
