"""Connectionist temporal classification of one sequence, by the forward-backward algorithm (Graves et al., 2006)."""

from __future__ import annotations

import numpy as np

from polyamp.reference.arrays import Array


def ctc_loss_and_slopes(rows: Array, labels: Array, blank: int) -> tuple[float, Array]:
    """Return the loss and its slope at each log-probability.

    Args:
        rows: log-probabilities, shape (frames, classes).
        labels: shape (length,), without blanks. An alignment exists.
        blank: the class of the blank.
    """
    path = np.full(2 * len(labels) + 1, blank)  # a blank before, between and after the labels
    path[1::2] = labels
    ahead = _alignments(rows, path)
    back = _alignments(rows[::-1], path[::-1])[::-1, ::-1]
    total = np.logaddexp.reduce(ahead[-1, -2:])
    shares = np.exp(ahead + back - rows[:, path] - total)  # how probable each place of the path is at each frame
    slopes = np.zeros_like(rows)
    for place, kind in enumerate(path):
        slopes[:, kind] -= shares[:, place]
    return -float(total), slopes


def _alignments(rows: Array, path: Array) -> Array:
    """Return the log of the probability of all beginnings that reach a place of the path at a frame."""
    places = len(path)
    reached = np.full((len(rows), places), -np.inf)
    reached[0, :2] = rows[0, path[:2]]
    jumps = np.full(places, False)  # over a blank, between different labels
    jumps[2:] = path[2:] != path[:-2]
    for frame in range(1, len(rows)):
        stay, one, two = np.full((3, places), -np.inf)
        stay[:], one[1:], two[2:] = reached[frame - 1], reached[frame - 1, :-1], reached[frame - 1, :-2]
        before = np.logaddexp(np.logaddexp(stay, one), np.where(jumps, two, -np.inf))
        reached[frame] = before + rows[frame, path]
    return reached
