"""Keras's files as sources and targets: `.keras` archives and `.weights.h5`. Called by `converter`.

A .keras file says what model it holds: Keras builds it from that, without its weights, and its layers are read as any
model's. A .weights.h5 file has names and shapes alone (`guesses`).
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import keras

from polyamp.errors import PortError, described, did_you_mean
from polyamp.files import write_atomically
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.lazy import Lazy
from polyamp_tensorflow.compat import saved_places
from polyamp_tensorflow.porting import guesses
from polyamp_tensorflow.porting.archive import Archive, Stored
from polyamp_tensorflow.porting.rewriting import write
from polyamp_tensorflow.porting.walk import Found, found

_CHUNK: Final = 1 << 22
_ZEROS: Final[Mapping[str, Any]] = {
    "module": "keras.initializers",
    "class_name": "Zeros",
    "config": {},
    "registered_name": None,
}


def open_file(path: Path) -> Inventory:
    """The layers of a file (see `ReadsFiles`)."""
    return _listed(Archive(path))[0]


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """A file as another one, with other values (see `ReadsFiles`)."""
    archive = Archive(like)
    inventory, places = _listed(archive)
    there = {leaf.name: leaf.array for layer in inventory.layers for leaf in layer.leaves.values()}
    for name, given in leaves.items():
        if name not in there:
            raise PortError(f"{like} has no array {name!r}.{did_you_mean(name, there)}")
        if given.shape != there[name].shape:
            raise PortError(f"{name!r} of {like} has shape {list(there[name].shape)}. Received: {list(given.shape)}.")
    write(path, archive, {place: given for name, given in leaves.items() for place in places[name]})


def write_model(path: Path, model: Any) -> None:
    """A model as Keras saves it (see `ReadsFiles`): whole in a .keras file, its weights in a .weights.h5 file."""
    whole = path.name.endswith(".keras")
    if not (whole or path.name.endswith(".weights.h5")) or not isinstance(model, keras.Model):
        raise PortError(
            "a keras.Model is written to a .keras or .weights.h5 file. Received: "
            f"{described(model)}, for the file {path.name}."
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "model.keras" if whole else "model.weights.h5")
        (model.save if whole else model.save_weights)(made)
        with made.open("rb") as file:
            write_atomically(path, iter(lambda: file.read(_CHUNK), b""))


def _listed(archive: Archive) -> tuple[Inventory, dict[str, list[str]]]:
    """The layers, and where in the HDF5 file each leaf lies."""
    if archive.config is None:
        return guesses.listed(archive.arrays, archive.names)
    model = _built(archive)
    there = found(model)
    places = dict(_places(archive, model, there))
    layers = [_stored(layer, archive.arrays, places) for layer in there.inventory.layers]
    inventory = dataclasses.replace(there.inventory, layers=layers)
    del model, there
    gc.collect()  # the model lies in circles, and is as large as the file
    return inventory, places


def _built(archive: Archive) -> Any:
    """The model that a config describes, its weights zero, not compiled. Code in the file is refused by Keras.

    Raises:
        PortError: Keras cannot build it.
    """
    config = _without_initializers({**archive.config, "compile_config": None})
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except Exception as error:
        raise PortError(
            f"Keras cannot build the model of {archive.path} from its config: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]} Import the module that defines and registers its classes "
            "(keras.saving.register_keras_serializable), or load the model with keras.models.load_model and give it "
            "instead of the file."
        ) from error


def _without_initializers(config: Any) -> Any:
    """The config with zeros for all random values: they are not needed, and take longer."""
    if isinstance(config, list):
        return [_without_initializers(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: dict(_ZEROS) if key.endswith("initializer") and value is not None else _without_initializers(value)
        for key, value in config.items()
    }


def _places(archive: Archive, model: Any, there: Found) -> Iterator[tuple[str, list[str]]]:
    """(leaf, places of its array in the HDF5 file)"""
    saved = saved_places(model)
    for name, variable in there.variables.items():
        places = saved.get(id(variable), [])
        for place in places or [""]:
            stored = archive.arrays.get(place)
            if stored is None:
                raise archive.damaged(f"its weights lack {name!r}, which its config has")
            if stored.array.shape != tuple(variable.shape):
                raise archive.damaged(
                    f"{name!r} is {list(variable.shape)} in its config and {list(stored.array.shape)} in its weights"
                )
        yield name, places


def _stored(layer: NativeLayer, arrays: Mapping[str, Stored], places: Mapping[str, list[str]]) -> NativeLayer:
    """A layer with the arrays of the file in the place of the model's."""

    def one(leaf: Leaf) -> Leaf:
        return dataclasses.replace(leaf, array=arrays[places[leaf.name][0]].array)

    return dataclasses.replace(layer, leaves={name: one(leaf) for name, leaf in layer.leaves.items()})
