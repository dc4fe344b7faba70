"""Detection of the parameters on which a loss depends (S23), from MLX's graph."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx


def find_used_parameters(loss: Any, trees: Sequence[Mapping[str, mx.array]]) -> set[str]:
    """Return <number of the tree>/<path> of every parameter with a path to the loss in the graph.

    MLX returns zeros for a gradient that does not exist, like for one that is zero. Only its graph distinguishes them,
    which MLX exports in DOT, with arrays and operations as nodes. Paths through `StopGradient` do not count.
    """
    if not isinstance(loss, mx.array):
        return set()
    names = {f"p{i}_{j}": (tree, i, path) for i, tree in enumerate(trees) for j, path in enumerate(tree)}
    drawing = io.StringIO()
    mx.export_to_dot(drawing, loss=loss, **{name: tree[path] for name, (tree, _, path) in names.items()})
    text = drawing.getvalue()
    seen = set(re.findall(r'(\d+) \[label ="StopGradient"', text))
    sources: dict[str, list[str]] = defaultdict(list)
    for source, target in re.findall(r'^"?(\w+)"? -> "?(\w+)"?$', text, re.MULTILINE):
        sources[target].append(source)
    todo = ["loss"]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += sources[node]
    return {f"{i}/{path}" for name, (_, i, path) in names.items() if name in seen}
