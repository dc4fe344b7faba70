"""Trees of nested mappings, sequences and dataclasses: mapping and paths, for frameworks that have no trees.

JAX and Keras have their own, which their backends use. A leaf is any value that is not one of these containers.
Subclasses keep their type: `defaultdict`, `UserDict`, named tuples.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def map_tree(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `function` to corresponding leaves of one or several trees; the containers are those of the first.

    >>> map_tree(lambda leaf: leaf + 1, {"a": [1, (2, 3)]})
    {'a': [2, (3, 4)]}
    >>> map_tree(max, {"a": 1}, {"a": 2})
    {'a': 2}
    """
    if isinstance(tree, Mapping):
        mapped = {}
        for key in tree:  # Python 3.11 calls a comprehension like a function
            mapped[key] = map_tree(function, tree[key], *([other[key] for other in rest] if rest else ()))
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return mapped
        new = copy.copy(tree)  # a subclass's own __init__ may take other arguments
        for key, value in mapped.items():
            new[key] = value
        return new
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        parts = {name: map_tree(function, *[getattr(each, name) for each in (tree, *rest)]) for name in names}
        return dataclasses.replace(tree, **parts)
    if isinstance(tree, (list, tuple)):
        items = [map_tree(function, *row) for row in zip(tree, *rest, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree, *rest)


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
