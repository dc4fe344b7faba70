"""Trees of nested mappings, sequences and dataclasses: mapping and paths, for frameworks that have no trees.

JAX and Keras have their own, which their backends use. A leaf is any value that is not one of these containers.
Subclasses keep their type: `defaultdict`, `UserDict`, named tuples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to the leaves and rebuild the containers, (named) tuples and dict subclasses included.

    >>> map_tree(lambda leaf: leaf + 1, {"a": [1, (2, 3)]})
    {'a': [2, (3, 4)]}
    """
    return map_trees(lambda leaves: function(leaves[0]), [tree])


def map_trees(function: Callable[[list[Any]], Any], trees: Sequence[Any]) -> Any:
    """Apply `function` to lists of corresponding leaves of several trees; the structure is that of the first.

    >>> map_trees(sum, [{"a": 1}, {"a": 2}])
    {'a': 3}
    """
    first = trees[0]
    if isinstance(first, Mapping):
        mapped = {key: map_trees(function, [tree[key] for tree in trees]) for key in first}
        if type(first) is dict or not isinstance(first, MutableMapping):
            return mapped
        new = copy.copy(first)  # a subclass's own __init__ may take other arguments
        for key, value in mapped.items():
            new[key] = value
        return new
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        parts = {name: map_trees(function, [getattr(tree, name) for tree in trees]) for name in names}
        return dataclasses.replace(first, **parts)
    if isinstance(first, (list, tuple)):
        items = [map_trees(function, list(row)) for row in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return function(list(trees))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over (path, leaf) pairs, with paths written as Python indexing.

    >>> list(leaves({"x": [10, 20]}))
    [("['x'][0]", 10), ("['x'][1]", 20)]
    """
    parts = children(tree, path)
    if parts is None:
        yield path, tree
    else:
        for own_path, part in parts:
            yield from leaves(part, own_path)


def children(tree: Any, path: str = "") -> list[tuple[str, Any]] | None:
    """Return the (path, part) pairs of a container itself, with paths as those of `leaves`; None for a leaf.

    >>> children({"x": [10, 20]}), children(10)
    ([("['x']", [10, 20])], None)
    """
    if isinstance(tree, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f"{path}.{field.name}", getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
    if isinstance(tree, (list, tuple)):
        return [(f"{path}[{index}]", value) for index, value in enumerate(tree)]
    return None
