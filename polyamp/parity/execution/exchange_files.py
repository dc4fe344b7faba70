"""Files that sides in two processes exchange: the first side's layers with weights, and another side's alignment.

The files are in a private folder of the run and are read by the same version of polyamp. So they are pickled, and the
objects are the same as for two sides in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any, Final

from polyamp.errors import PortError
from polyamp.parity.execution.memory_mapped_arrays import ArrayLocation, ArrayStore, memory_map
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf
from polyamp.porting.layouts.lazy_array import Lazy

REFERENCE_FILE: Final = "offer"
"""Name of the file of the first side's layers."""
FIRST_INPUTS_FILE: Final = "first-inputs"
"""Name of the file of what the first side's modules took in its first pass."""
_WEIGHTS_FILE: Final = "weights.bin"


def write_reference(inventory: Inventory, folder: Path) -> None:
    """Write the layers of the first side, with the values of their arrays, which are loaded when they are read.

    Raises:
        PortError: a layer has a value that cannot be pickled.
    """
    path = folder / _WEIGHTS_FILE
    places: dict[str, ArrayLocation] = {}
    with ArrayStore(path) as store:
        for layer in inventory.layers:
            for leaf in layer.leaves.values():
                owner = places.get(leaf.tied or "")
                alike = owner is not None and owner.shape == leaf.array.shape
                places[leaf.name] = owner if alike and owner is not None else store.put(leaf.array.read())
    layers = [
        dataclasses.replace(
            layer,
            leaves={name: _memory_mapped_leaf(leaf, path, places[leaf.name]) for name, leaf in layer.leaves.items()},
            lines={},
        )
        for layer in inventory.layers
    ]
    write_object(folder / REFERENCE_FILE, dataclasses.replace(inventory, layers=layers))


def _memory_mapped_leaf(leaf: InventoryLeaf, path: Path, place: ArrayLocation) -> InventoryLeaf:
    array = Lazy(place.shape, leaf.array.dtype, functools.partial(memory_map, path, place))
    return dataclasses.replace(leaf, array=array)


def write_object(path: Path, value: Any) -> None:
    """Write what one side says and another, or the run, reads.

    Raises:
        PortError: a part of it cannot be pickled.
    """
    try:
        path.write_bytes(pickle.dumps(value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PortError(
            f"what a layer of the model is made of cannot be handed to another process: {error}. A form that is "
            "registered for a layer (polyamp.porting.register) must be made of operations whose classes stand at the "
            "top level of a module."
        ) from error


def read_object(path: Path) -> Any:
    """Read what `write_object` wrote.

    Raises:
        PortError: it is made of a module that is not here.
    """
    try:
        return pickle.loads(path.read_bytes())  # noqa: S301  # written by this run, in its private folder
    except (ModuleNotFoundError, AttributeError) as error:
        raise PortError(
            f"what a layer of the first side is made of cannot be read here: {error}. A form that is registered for a "
            "layer (polyamp.porting.register) must be made of operations of a module that both environments have."
        ) from error
