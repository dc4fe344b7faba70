"""The CTC loss of one sequence and its gradient in NumPy, by the forward and backward variables, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyamp.reference.arrays import Array


def ctc_loss(logits: Array, labels: Array, steps: Any, length: Any, blank: int) -> tuple[float, Array]:
    """Return the loss, and its gradient with respect to the logits.

    Args:
        logits: shape (steps, classes).
        labels: shape (length,).
        steps, length: how many of the steps and of the labels count.
        blank: class that separates labels.
    """
    wide = logits[: int(steps)].astype(np.float64)
    logs = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    states = np.full(2 * int(length) + 1, blank)
    states[1::2] = labels[: int(length)]
    forward = _path_logs(logs, states, blank)
    backward = _path_logs(logs[::-1], states[::-1], blank)[::-1, ::-1]
    through = forward + backward - logs[:, states]  # both count the step itself
    total = np.logaddexp.reduce(through, axis=-1)
    slopes = np.zeros(logits.shape)
    slopes[: int(steps)] = np.exp(logs)
    for state, label in enumerate(states):
        slopes[: int(steps), label] -= np.exp(through[:, state] - total)
    return float(-total[0]), slopes


def _path_logs(logs: Array, states: Array, blank: int) -> Array:
    """Return the logarithm of the probability of all beginnings that are in a state after a step: (steps, states)."""
    found = np.full((len(logs), len(states)), -np.inf)
    found[0, :2] = logs[0, states[:2]]
    for step in range(1, len(logs)):
        for state, label in enumerate(states):
            before = [found[step - 1, state]]
            if state > 0:
                before.append(found[step - 1, state - 1])
            if state > 1 and label not in (blank, states[state - 2]):
                before.append(found[step - 1, state - 2])
            found[step, state] = np.logaddexp.reduce(before) + logs[step, label]
    return found
