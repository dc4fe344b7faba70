"""`Case`, one row of the zoo: a public model, its counterpart in another framework, and the lines that a port needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
Batch = tuple[Array, ...]
VOCABULARY: Final = 61
"""Tokens of the language models."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair of models.

    Attributes:
        name: the architecture.
        pair: where the source's code and the target's code come from, "transformers → flax".
        source: builds the source.
        target: builds the target for the batch that it is given.
        batch: draws a batch in the source's layout.
        names: the `names=` that the port needs.
        forms: the `forms=` that the port needs.
        tries: calls of `port` that a reader of its errors needs, the successful one included.
        to_target: the batch in the target's layout; by default images are turned to channels last.
        own_parameters: regular expression over the paths of a Keras target's parameters that the source has none of;
            the judge leaves their gradients out.
        remark: a sentence for the table.
    """

    name: str
    pair: str
    source: Callable[[], Any]
    target: Callable[[Batch], Any]
    batch: Callable[[np.random.Generator], Batch]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    forms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tries: int = 1
    to_target: Callable[[Batch], Batch] | None = None
    own_parameters: str = ""
    remark: str = ""

    def native(self, batch: Batch) -> Batch:
        """The batch in the target's layout."""
        if self.to_target is not None:
            return self.to_target(batch)
        return tuple(channels_last(array) if array.dtype.kind == "f" else array for array in batch)


def channels_last(array: Array) -> Array:
    """Images with the channels last."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if array.ndim == 4 else array


def channels_first(array: Array) -> Array:
    """Images with the channels first."""
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if array.ndim == 4 else array


def unchanged(batch: Batch) -> Batch:
    """The batch as it is, for targets with the source's layout."""
    return batch


def images(size: int = 32, channels: int = 3) -> Callable[[np.random.Generator], Batch]:
    """Draws of two images, channels first."""
    return lambda rng: (rng.standard_normal((2, channels, size, size)).astype(np.float32),)


def tokens(length: int = 7, vocabulary: int = VOCABULARY) -> Callable[[np.random.Generator], Batch]:
    """Draws of two sequences of tokens."""
    return lambda rng: (rng.integers(0, vocabulary, (2, length)),)


def features(*sizes: int) -> Callable[[np.random.Generator], Batch]:
    """Draws of three vectors for every input."""
    return lambda rng: tuple(rng.standard_normal((3, size)).astype(np.float32) for size in sizes)
