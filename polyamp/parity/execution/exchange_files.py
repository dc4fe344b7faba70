"""Files that sides in two processes exchange: the first side's layers with weights, and another side's alignment.

The files are in a private folder of the run and are read by the same version of polyamp. So they are pickled, and the
objects are the same as for two sides in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp.errors import PortError
from polyamp.parity.execution.memory_mapped_arrays import ArrayLocation, ArrayStore, memory_map
from polyamp.parity.execution.participant import FirstPass
from polyamp.parity.trace.operation_log import OperationLog
from polyamp.parity.verdict.alignment import Alignment
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.states.training_state import ArrayMapping

_REFERENCE_FILE: Final = "offer"
_FIRST_INPUTS_FILE: Final = "first-inputs"
_WEIGHTS_FILE: Final = "weights.bin"


def write_reference(inventory: Inventory, folder: Path) -> None:
    """Write the layers of the first side, with the values of their arrays.

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
    _write_pickle(folder / _REFERENCE_FILE, dataclasses.replace(inventory, layers=layers))


def read_reference(folder: Path) -> Inventory:
    """Read the layers of the first side; values are loaded lazily."""
    inventory: Inventory = _read_pickle(folder / _REFERENCE_FILE)
    return inventory


def write_operations(log: OperationLog, path: Path) -> None:
    """Write the recorded operations of a side."""
    path.write_bytes(msgspec.msgpack.encode(log))


def read_operations(path: Path) -> OperationLog:
    """Read the recorded operations of a side."""
    return msgspec.msgpack.decode(path.read_bytes(), type=OperationLog)


def write_first_pass(found: FirstPass, folder: Path) -> None:
    """Write what the first side's modules took in its first pass."""
    _write_pickle(folder / _FIRST_INPUTS_FILE, found)


def read_first_pass(folder: Path) -> FirstPass:
    """Read what the first side's modules took."""
    found: FirstPass = _read_pickle(folder / _FIRST_INPUTS_FILE)
    return found


def write_alignment(alignment: Alignment, mappings: Sequence[ArrayMapping], path: Path) -> None:
    """Write another side's alignment, and its mappings of the first side's arrays."""
    _write_pickle(path, (alignment, list(mappings)))


def read_alignment(path: Path) -> tuple[Alignment, list[ArrayMapping]]:
    """Read another side's alignment and mappings."""
    found: tuple[Alignment, list[ArrayMapping]] = _read_pickle(path)
    return found


def _memory_mapped_leaf(leaf: InventoryLeaf, path: Path, place: ArrayLocation) -> InventoryLeaf:
    array = Lazy(place.shape, leaf.array.dtype, functools.partial(memory_map, path, place))
    return dataclasses.replace(leaf, array=array)


def _write_pickle(path: Path, value: Any) -> None:
    try:
        path.write_bytes(pickle.dumps(value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PortError(
            f"what a layer of the model is made of cannot be handed to another process: {error}. A form that is "
            "registered for a layer (polyamp.porting.register) must be made of operations whose classes stand at the "
            "top level of a module."
        ) from error


def _read_pickle(path: Path) -> Any:
    try:
        return pickle.loads(path.read_bytes())  # noqa: S301  # written by this run, in its private folder
    except (ModuleNotFoundError, AttributeError) as error:
        raise PortError(
            f"what a layer of the first side is made of cannot be read here: {error}. A form that is registered for a "
            "layer (polyamp.porting.register) must be made of operations of a module that both environments have."
        ) from error
