"""On which parameters a loss depends (S23), read off MLX's graph of it."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx


def used_by(loss: Any, trees: Sequence[Mapping[str, mx.array]]) -> set[str]:
    """<number of the tree>/<path> of every parameter from which a way leads to the loss.

    MLX gives zeros for a gradient that does not exist, and a gradient that is zero looks the same. Its graph tells them
    apart, and what it offers of it is a drawing: arrays and operations as nodes, in DOT. A way through `StopGradient`
    is none.
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
