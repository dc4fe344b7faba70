"""What the converter asks of a library over JAX (`Library`): one module of this room for each, which it loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from polyamp.porting.layouts.inventory import Inventory

Record = Callable[[str, Any], None]
"""Told the path of a module and what its call returned, each time a call ends."""


class Batch(NamedTuple):
    """What a model is called with.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Library(Protocol):
    """One library's models; the module of its name in this room has these functions."""

    def inventory(self, model: Any, batch: Batch | None) -> Inventory:
        """Every array of a model, in layers; see `polyamp.porting.layouts.converter.Converter.inventory`."""

    def arrays(self, model: Any) -> Mapping[str, Any]:
        """Name of a leaf, as the inventory has it -> its array or `jax.ShapeDtypeStruct`; what is tied once."""

    def replaced(self, model: Any, arrays: Mapping[str, Any]) -> Any:
        """A new model of the same structure with other arrays in the leaves of these names."""

    def run(self, model: Any, batch: Batch, record: Record) -> Any:
        """The outputs of a model on a batch, in inference mode and in float32; may be traced. The model is the
        converter's own copy."""


def batch_of(batch: Any) -> Batch:
    """An array, a tuple of positional arguments or a mapping of keyword arguments as arguments.

    >>> batch_of((1, 2))
    Batch(args=(1, 2), kwargs={})
    """
    if isinstance(batch, Mapping):
        return Batch((), {str(name): value for name, value in batch.items()})
    return Batch(batch if isinstance(batch, tuple) else (batch,), {})
