"""`replay`: runs a step twice from one state and compares the bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from polyamp.display import first_lines


class LeafDifference(NamedTuple):
    """An array that differs between two runs of a step. Attributes: its name; how many of its elements differ; the
    largest difference, inf if one side is not finite."""

    name: str
    elements: int
    largest: float


class ReplayReport(NamedTuple):
    """What `polyamp.replay` found; `print` it.

    Attributes:
        differences: arrays of the state after the step that differ; empty if both runs gave the same bits.
        losses: those of the two runs.
    """

    differences: tuple[LeafDifference, ...]
    losses: tuple[float, float]

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same bits."""
        one, two = (np.float64(loss).tobytes() for loss in self.losses)
        return not self.differences and one == two

    def __str__(self) -> str:
        if self.equal:
            return "Both runs of the step gave the same bits."
        lines = [f"Two runs of the step differ: losses {self.losses[0]!r} and {self.losses[1]!r}."]
        lines += [f"  {each.name}: {each.elements} elements, by up to {each.largest:.3g}" for each in self.differences]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))


def replay(step: Any, state: Any, batch: Any) -> ReplayReport:
    """Run a step twice from the same state and compare the bits of loss and state.

    A difference is an operation that is not deterministic (atomic additions on a GPU, a loss function with a state of
    its own), or a device that computes wrongly. The state is afterwards as it was. Two copies of it are on the host.

    Args:
        step: what `polyamp.train_step` returned. In JAX a step that is compiled, as by default.
        state: the state, which the call leaves as it is.
        batch: the batch.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
        >>> step = polyamp.train_step(lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]), recipe)
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), recipe)
        >>> print(polyamp.replay(step, state, np.ones((2, 4), "f4")))
        Both runs of the step gave the same bits.
    """
    backend = state.backend
    before = {name: np.array(value) for name, value in backend.export_state(state).items()}
    found: list[dict[str, Any]] = []
    losses = []
    try:
        for _ in range(2):
            after, result = step(backend.import_state(state, before), batch)
            losses.append(float(backend.to_numpy(result.loss)))
            found.append({name: np.array(value) for name, value in backend.export_state(after).items()})
    finally:
        backend.import_state(state, before)
    one, two = found
    differences = [_difference(name, value, two[name]) for name, value in one.items()]
    return ReplayReport(tuple(each for each in differences if each is not None), (losses[0], losses[1]))


def _difference(name: str, one: Any, two: Any) -> LeafDifference | None:
    if one.tobytes() == two.tobytes():
        return None
    flat = [np.asarray(each).reshape(-1) for each in (one, two)]
    size = flat[0].dtype.itemsize
    bits = [each.view(np.uint8).reshape(-1, size) for each in flat]
    count = int(np.count_nonzero((bits[0] != bits[1]).any(axis=1)))
    with np.errstate(all="ignore"):
        apart = np.abs(flat[0].astype(np.float64) - flat[1].astype(np.float64))
    largest = float(apart.max()) if np.isfinite(apart).all() else float("inf")
    return LeafDifference(name, count, largest)
