"""The task: an arm of two joints reaches for a dot. Images, joints and the expert's actions, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

PIXELS: Final = 16
"""Height and width of an image."""
CHUNK: Final = 8
"""Actions that are predicted at once."""
JOINTS: Final = 2
LINKS: Final = (0.55, 0.45)
REACHED: Final = 0.1
"""The hand has reached the dot at this distance; the whole arm is 1 long."""
_LOW, _HIGH = np.array([-0.3, 0.3]), np.array([1.5, 2.3])
_STEPS: Final = np.diff((1 - np.cos(np.pi * np.linspace(0, 1, CHUNK + 1))) / 2)
"""The share of the way that each action goes: slow, fast, slow."""
_SCALE: Final = 4.0
"""Actions are trained in this multiple, so that they are about as large as 1."""


def hand(joints: Array) -> Array:
    """Where the hand is: (n, 2) angles in radians -> (n, 2) places."""
    elbow = LINKS[0] * np.stack([np.cos(joints[:, 0]), np.sin(joints[:, 0])], axis=1)
    both = joints.sum(axis=1)
    return np.asarray(elbow + LINKS[1] * np.stack([np.cos(both), np.sin(both)], axis=1))


def picture(dot: Array, joints: Array) -> Array:
    """(n, 16, 16, 2): the dot in one channel, the hand in the other, as blurred spots."""
    axis = np.linspace(-1.1, 1.1, PIXELS)
    places = np.stack([dot, hand(joints)], axis=-1)[:, :, None, :]  # (n, x and y, 1, channels)
    spots = np.exp(-(((axis[None, None, :, None] - places) / 0.12) ** 2) / 2)
    return np.asarray(spots[:, 1, :, None, :] * spots[:, 0, None, :, :], np.float32)


def scenes(number: int, rng: np.random.Generator) -> dict[str, Array]:
    """One batch: `image` (n, 16, 16, 2), `joints` (n, 2) and `actions` (n, 8, 2), all float32; `dot` (n, 2)."""
    joints, goal = rng.uniform(_LOW, _HIGH, (2, number, JOINTS))
    dot = hand(goal)
    actions = _SCALE * (goal - joints)[:, None, :] * _STEPS[:, None]
    found = {"image": picture(dot, joints), "joints": joints, "actions": actions, "dot": dot}
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def batches(steps: int, *, first: int = 0, size: int = 32) -> Iterator[dict[str, Array]]:
    """The batches of `steps` steps from step `first` on: each is drawn from its own number, whoever asks for it."""
    for step in range(first, first + steps):
        batch = scenes(size, np.random.default_rng([7, step]))
        yield {name: batch[name] for name in ("image", "joints", "actions")}


def reached(scene: dict[str, Array], actions: Array) -> float:
    """Percent of the scenes in which the hand is at the dot when the predicted actions are done."""
    joints = scene["joints"] + np.asarray(actions, np.float32).sum(axis=1) / _SCALE
    distance = np.linalg.norm(hand(joints) - scene["dot"], axis=1)
    return float(100 * np.mean(distance < REACHED))
