"""What two sides in two processes have to know of each other, as files: the first side's layers with their weights, and
what another side that matched itself with them found.

`worker` writes and reads them. They lie in a private folder of the run and are read by the same version of polyamp; so
they are pickled, and what is used is exactly what two sides in one process would use.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from polyamp.errors import PortError
from polyamp.parity.aligned import Agreed
from polyamp.parity.stored import Place, Store, mapped
from polyamp.porting.layouts.inventory import Inventory, Leaf
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.states.canonical import Way

_OFFER: Final = "offer"
_WEIGHTS: Final = "weights.bin"


def offer(inventory: Inventory, folder: Path) -> None:
    """Write the layers of the first side, with the values of their arrays.

    Raises:
        PortError: a layer holds something that no other process can read.
    """
    path = folder / _WEIGHTS
    places: dict[str, Place] = {}
    with Store(path) as store:
        for layer in inventory.layers:
            for leaf in layer.leaves.values():
                owner = places.get(leaf.tied or "")
                alike = owner is not None and owner.shape == leaf.array.shape
                places[leaf.name] = owner if alike and owner is not None else store.put(leaf.array.read())
    layers = [
        dataclasses.replace(
            layer,
            leaves={name: _there(leaf, path, places[leaf.name]) for name, leaf in layer.leaves.items()},
            lines={},
        )
        for layer in inventory.layers
    ]
    _write(folder / _OFFER, dataclasses.replace(inventory, layers=layers))


def offered(folder: Path) -> Inventory:
    """The layers of the first side; values are read when they are needed."""
    inventory: Inventory = _read(folder / _OFFER)
    return inventory


def answer(agreed: Agreed, ways: Sequence[Way], path: Path) -> None:
    """Write what another side found: what both have to know, and the ways of the first side's arrays."""
    _write(path, (agreed, list(ways)))


def answered(path: Path) -> tuple[Agreed, list[Way]]:
    """What another side found."""
    found: tuple[Agreed, list[Way]] = _read(path)
    return found


def _there(leaf: Leaf, path: Path, place: Place) -> Leaf:
    array = Lazy(place.shape, leaf.array.dtype, functools.partial(mapped, path, place))
    return dataclasses.replace(leaf, array=array)


def _write(path: Path, value: Any) -> None:
    try:
        path.write_bytes(pickle.dumps(value))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PortError(
            f"what a layer of the model is made of cannot be handed to another process: {error}. A form that is "
            "registered for a layer (polyamp.porting.register) must be made of operations whose classes stand at the "
            "top level of a module."
        ) from error


def _read(path: Path) -> Any:
    try:
        return pickle.loads(path.read_bytes())  # noqa: S301  # written by this run, in a folder of its own
    except (ModuleNotFoundError, AttributeError) as error:
        raise PortError(
            f"what a layer of the first side is made of cannot be read here: {error}. A form that is registered for a "
            "layer (polyamp.porting.register) must be made of operations of a module that both environments have."
        ) from error
