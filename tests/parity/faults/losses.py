"""The losses of the fixture models, right ones and ones with a mistake, for every library. Called by `finding`.

They are written over slices, shapes and `polyamp.losses` alone, so that one text serves all frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import polyamp

PADDED: Final = 0
"""The label that stands for padding where a loss knows of any."""


def _plain(outputs: Any, y: Any, model: Any) -> Any:
    return _loss(outputs, y)


def _sum(outputs: Any, y: Any, model: Any) -> Any:
    return _loss(outputs, y, reduction="sum")


def _padded(outputs: Any, y: Any, model: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(outputs, y, ignore_index=PADDED)


def _padded_over_all(outputs: Any, y: Any, model: Any) -> Any:
    """The mean over padded positions too."""
    total = polyamp.losses.softmax_cross_entropy(outputs, y, ignore_index=PADDED, reduction="sum")
    return total / (int(y.shape[0]) * int(y.shape[1]))


def _next(outputs: Any, y: Any, model: Any) -> Any:
    return _loss(outputs[:, :-1], y[:, 1:])


def _same(outputs: Any, y: Any, model: Any) -> Any:
    """Labels shifted by one."""
    return _loss(outputs[:, :-1], y[:, :-1])


def _all_positions(outputs: Any, y: Any, model: Any) -> Any:
    return _loss(outputs, y)


def _smoothed(outputs: Any, y: Any, model: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(outputs, y, label_smoothing=0.1)


def _half(outputs: Any, y: Any, model: Any) -> Any:
    return 0.5 * _loss(outputs, y)


def _per_row(outputs: Any, y: Any, model: Any) -> Any:
    """The sum over an example, the mean over examples."""
    return _loss(outputs, y, reduction="sum") / int(y.shape[0])


def _doubled(outputs: Any, y: Any, model: Any) -> Any:
    """Each micro-batch's mean, and nobody divides by their number."""
    return 2.0 * _loss(outputs, y)


def _penalised(outputs: Any, y: Any, model: Any) -> Any:
    return _loss(outputs, y) + 1e-4 * polyamp.losses.sum_of_squares(polyamp.parameters(model))


LOSSES: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "plain": _plain,
    "sum": _sum,
    "padded": _padded,
    "mean over padded": _padded_over_all,
    "next": _next,
    "not shifted": _same,
    "all positions": _all_positions,
    "smoothed": _smoothed,
    "half": _half,
    "mean over rows": _per_row,
    "doubled": _doubled,
    "penalised": _penalised,
}
"""Name -> loss of (outputs, labels, model)."""


def loss_fn(name: str) -> Callable[[Any, Any], Any]:
    """A loss function for the models of any library; images in a batch lie as the model takes them.

    Args:
        name: of `LOSSES`.
    """
    made = LOSSES[name]

    def loss_fn(model: Any, batch: Any) -> Any:
        return made(model(batch["x"]), batch["y"], model)

    return loss_fn


def _loss(outputs: Any, y: Any, **others: Any) -> Any:
    if len(y.shape) == 4:
        return polyamp.losses.mean_squared_error(outputs, y, **others)
    return polyamp.losses.softmax_cross_entropy(outputs, y, **others)
