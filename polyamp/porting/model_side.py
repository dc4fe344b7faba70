"""`ModelSide`, a model in a port with its inventory and converter, and `export`, which exports a single model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from polyamp.backend_lookup import converter_of_choice
from polyamp.contract import registry
from polyamp.errors import PortError, UnsupportedError, describe_value
from polyamp.porting.layouts.canonical_model import Canonical, to_canonical
from polyamp.porting.layouts.converter import Converter, HasConverter
from polyamp.porting.layouts.inventory import Inventory


class ModelSide(NamedTuple):
    """One side of a port: the model, its inventory and its converter.

    Attributes:
        inventory: its layers.
        converter: converter of its framework; None for a file and for a `Canonical`.
        model: the model itself.
    """

    inventory: Inventory
    converter: Converter | None
    model: Any


def export(model: Any, batch: Any = None) -> Canonical:
    """Export a model to the canonical layout. Values are read only when they are used.

    Args:
        model: a model of any framework, as `polyamp.init` accepts it.
        batch: inputs for the model, a NumPy array, a tuple or a mapping. A call of the model on them identifies layers
            that are otherwise known only by their names (linen, haiku, plain functions).

    Raises:
        PortError: the kinds of some layers are unknown; the message lists them.
        UnsupportedError: the backend has no layers that can be moved.

    Example:
        >>> from polyamp.reference import MLP
        >>> model = export(MLP.random([4, 3, 1], seed=0))
        >>> model["dense0"].kind, model["dense0"].arrays["kernel"].shape
        ('dense', (4, 3))
    """
    if isinstance(model, Canonical):
        return model
    return to_canonical(make_model_side(model, batch, "export(model)").inventory)


def make_model_side(model: Any, batch: Any, call: str, *, files: bool = False) -> ModelSide:
    """Return a model with its inventory and converter.

    Raises:
        UnsupportedError: its backend cannot move models.
        BackendError: no backend recognises it.
    """
    if isinstance(model, Canonical):
        return ModelSide(model.inventory(), None, model)
    if isinstance(model, str | os.PathLike):
        if not files:
            raise PortError(f"{call} takes a model here. Received: {describe_value(model)}, a path.")
        from polyamp.porting.files.file_formats import file_inventory

        return ModelSide(file_inventory(model), None, model)
    converter = find_converter(model, call)
    return ModelSide(converter.inventory(model, batch), converter, model)


def find_converter(model: Any, call: str) -> Converter:
    """Return the converter of a model: that of its backend, or of a framework that runs on several, as Keras does.

    Args:
        model: the model.
        call: the call for messages.

    Raises:
        UnsupportedError: its backend cannot move models.
        BackendError: no backend recognises it.
    """
    own: Converter | None = converter_of_choice(model)
    if own is not None:
        return own
    backend = registry.backend_for(model)
    if not isinstance(backend, HasConverter):
        raise UnsupportedError(
            f"{call}: the {backend.name} backend of this version has no converter (`porting`), so that its models "
            "cannot be moved."
        )
    return backend.porting
