"""The first half of a step: a batch as MLX's arrays, and the loss with its gradients (S6, S8, S23, S24, S26)."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from polyamp.results import Gradients, LossFunction
from polyamp.rules import refusals
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.trees import leaves, map_tree
from polyamp_mlx.arrays import dtype_name, to_device
from polyamp_mlx.precision.bound import Bound, arrays_of, with_arrays
from polyamp_mlx.step.state import Arrays, MLXState

_RANDOM: Final = threading.RLock()


def entered(batch: Any, param: str) -> Any:
    """A batch as it goes into a step: with rows (S24), NumPy's arrays as MLX's, their float64 as float32 (S26)."""
    arrays = (mx.array, np.ndarray)
    check_has_rows(leaf.shape[0] for _, leaf in leaves(batch) if isinstance(leaf, arrays) and leaf.ndim)
    numbers = (np.ndarray, np.generic)
    return map_tree(lambda leaf: to_device(host_array(leaf, param)) if isinstance(leaf, numbers) else leaf, batch)


def differentiated(
    loss_fn: LossFunction, states: Sequence[MLXState], batch: Any, draw: int
) -> tuple[mx.array, Any, list[Gradients]]:
    """The loss in float32, what `loss_fn` returned beside it, and each state's gradients.

    The loss is multiplied by the first state's scale, and so are the gradients, which are float32; `unscaled` divides
    them. A parameter on which the loss does not depend has None (S23).

    Args:
        loss_fn: sees one model, or a tuple of models.
        states: of the models.
        batch: as `entered` gives it.
        draw: number of the random stream (S12).
    """
    found: list[Any] = []

    def run(trees: list[Arrays]) -> mx.array:
        modules = [with_arrays(s.module, {**tree, **s.running}, s.plan) for s, tree in zip(states, trees, strict=True)]
        models = [Bound(module, state.plan) for module, state in zip(modules, states, strict=True)]
        loss, aux = refusals.split_result(loss_fn(models[0] if len(models) == 1 else tuple(models), batch))
        used = _used(loss, trees)
        shapes = [(f"{i}/{path}", array.shape) for i, tree in enumerate(trees) for path, array in tree.items()]
        refusals.check_gradients(shapes, [(path, shape if path in used else None) for path, shape in shapes])
        refusals.check_loss(loss.shape, dtype_name(loss))
        wide = loss.reshape(()).astype(mx.float32)
        found[:] = wide, aux, used, [arrays_of(module)[1] for module in modules]
        return wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide

    with _streams(states[0].seed, draw):
        trees = mx.grad(run)([state.parameters for state in states])
    wide, aux, used, running = found
    values = [
        {path: g.astype(mx.float32) if f"{i}/{path}" in used else None for path, g in tree.items()}
        for i, tree in enumerate(trees)
    ]
    return wide, aux, [Gradients(*pair) for pair in zip(values, running, strict=True)]


def unscaled(grads: Gradients, maker: MLXState) -> Gradients:
    """Gradients divided in float32 by the scale that produced them (S7)."""
    if not maker.recipe.loss_scaler.scales:
        return grads
    scale = maker.scale_state.scale
    return grads._replace(values={path: None if g is None else g / scale for path, g in grads.values.items()})


def _used(loss: Any, trees: list[Arrays]) -> set[str]:
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


def next_seed(seed: int, draw: int = -1) -> int:
    """The seed of a random stream of a state, or of the state's successor (S12)."""
    return int(np.random.SeedSequence((seed, draw + 1)).generate_state(1, np.uint64)[0])


@contextlib.contextmanager
def _streams(seed: int, draw: int) -> Iterator[None]:
    """A block in which MLX's global random numbers are stream `draw` of `seed`; then they go on where they were."""
    with _RANDOM:
        high, low = (int(half) for half in np.array(mx.random.state[0]))
        mx.random.seed(next_seed(seed, draw))
        try:
            yield
        finally:
            mx.random.seed((high << 32) | low)
