"""Inventory of a JAX model, from the module of its library."""

from __future__ import annotations

from typing import Any

from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.porting.libraries.porting_library import find_library, make_call_inputs


def inventory(model: Any, batch: Any = None) -> Inventory:
    """Return the layers of a model; see `Converter.inventory`."""
    return find_library(model).inventory(model, None if batch is None else make_call_inputs(batch))
