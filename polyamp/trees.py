"""Trees of nested dicts, lists and tuples: mapping, paths, micro-batches. For backends whose framework has no trees.

A leaf is whatever is not one of these containers. JAX and Keras bring their own trees, which their backends use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyamp.checks import check_micro_batches, micro_batch_size


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` over the leaves; the containers are built anew, (named) tuples and dict subclasses included.

    >>> map_tree(lambda leaf: leaf + 1, {"a": [1, (2, 3)]})
    {'a': [2, (3, 4)]}
    """
    return map_trees(lambda leaves: function(leaves[0]), [tree])


def map_trees(function: Callable[[list[Any]], Any], trees: Sequence[Any]) -> Any:
    """`function` over the lists of corresponding leaves of several trees; the structure is that of the first.

    >>> map_trees(sum, [{"a": 1}, {"a": 2}])
    {'a': 3}
    """
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((key, map_trees(function, [tree[key] for tree in trees])) for key in first)
    if isinstance(first, (list, tuple)):
        parts = [map_trees(function, list(items)) for items in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return function(list(trees))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) pairs, with paths that read as one would index the tree.

    >>> list(leaves({"x": [10, 20]}))
    [("['x'][0]", 10), ("['x'][1]", 20)]
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def micro_batches(batch: Any, count: int) -> list[Any]:
    """A batch as a list of `count` equal micro-batches, from a batch to split along axis 0 or from such a list (S8).

    Raises:
        BatchError: it cannot be split equally.
    """
    if count == 1:
        return [batch]
    if isinstance(batch, list):
        check_micro_batches([_shapes(part) for part in batch], count)
        return batch
    size = micro_batch_size(_shapes(batch), count)
    return [map_tree(operator.itemgetter(slice(i * size, (i + 1) * size)), batch) for i in range(count)]


def _shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(getattr(leaf, "shape", ()))) for path, leaf in leaves(batch)]
