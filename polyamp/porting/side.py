"""`Side`: a model on its way, with its inventory and who can fill it; and `export`, one side alone. Called by `port`,
`files` and users."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from polyamp.contract import registry
from polyamp.errors import PortError, UnsupportedError, described
from polyamp.porting.layouts.canonical import Canonical, canonical_of
from polyamp.porting.layouts.converter import Converter, Ports
from polyamp.porting.layouts.inventory import Inventory


class Side(NamedTuple):
    """A model on its way: what it is made of, and who can fill it.

    Attributes:
        inventory: its layers.
        converter: of its framework; None of a file and of a `Canonical`.
        model: the model itself.
    """

    inventory: Inventory
    converter: Converter | None
    model: Any


def export(model: Any, batch: Any = None) -> Canonical:
    """A model in the canonical layout; nothing is read before it is used.

    Args:
        model: a model as `polyamp.init` takes it, of any framework.
        batch: inputs for it, a NumPy array, a tuple or a mapping: where layers are known by their names alone (linen,
            haiku, plain functions), a call of the model on them shows what they are.

    Raises:
        PortError: what some layers are cannot be told; names them.
        UnsupportedError: the backend has no layers that could be moved.

    Example:
        >>> from polyamp.reference import MLP
        >>> model = export(MLP.random([4, 3, 1], seed=0))
        >>> model["dense0"].kind, model["dense0"].arrays["kernel"].shape
        ('dense', (4, 3))
    """
    if isinstance(model, Canonical):
        return model
    return canonical_of(side_of(model, batch, "export(model)").inventory)


def side_of(model: Any, batch: Any, call: str, *, files: bool = False) -> Side:
    """A model with its inventory.

    Raises:
        UnsupportedError: its backend cannot move models.
        BackendError: no backend recognises it.
    """
    if isinstance(model, Canonical):
        return Side(model.inventory(), None, model)
    if isinstance(model, str | os.PathLike):
        if not files:
            raise PortError(f"{call} takes a model here. Received: {described(model)}, a path.")
        from polyamp.porting.files.formats import inventory_of

        return Side(inventory_of(model), None, model)
    backend = registry.backend_for(model)
    if not isinstance(backend, Ports):
        raise UnsupportedError(
            f"{call}: the {backend.name} backend of this version has no converter (`porting`), so that its models "
            "cannot be moved."
        )
    return Side(backend.porting.inventory(model, batch), backend.porting, model)
