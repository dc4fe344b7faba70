"""Keras files as sources and targets: `.keras` archives and `.weights.h5` files.

A .keras file contains the model's config. Keras builds the model from it without its weights, and its layers are read
as any model's. A .weights.h5 file has only names and shapes (`weights_file_layers`).
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import keras

from polyamp.errors import PortError, describe_value, did_you_mean
from polyamp.files import read_chunks, write_atomically
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_tensorflow.compat import saved_variable_paths
from polyamp_tensorflow.porting.inventory import KerasInventory, read_keras_model
from polyamp_tensorflow.porting.tensorflow_only import weights_file_layers
from polyamp_tensorflow.porting.tensorflow_only.file_rewrite import rewrite_file
from polyamp_tensorflow.porting.tensorflow_only.h5_archive import KerasArchive, StoredArray
from polyamp_tensorflow.precision.policy_module import native_model

_ZEROS: Final[Mapping[str, Any]] = {
    "module": "keras.initializers",
    "class_name": "Zeros",
    "config": {},
    "registered_name": None,
}


def open_file(path: Path) -> Inventory:
    """Return the layers of a file (see `FileConverter`)."""
    return _read_archive_layers(KerasArchive(path))[0]


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """Write a copy of the file `like` with other values (see `FileConverter`)."""
    archive = KerasArchive(like)
    inventory, places = _read_archive_layers(archive)
    there = {leaf.name: leaf.array for layer in inventory.layers for leaf in layer.leaves.values()}
    for name, given in leaves.items():
        if name not in there:
            raise PortError(f"{like} has no array {name!r}.{did_you_mean(name, there)}")
        if given.shape != there[name].shape:
            raise PortError(f"{name!r} of {like} has shape {list(there[name].shape)}. Received: {list(given.shape)}.")
    rewrite_file(path, archive, {place: given for name, given in leaves.items() for place in places[name]})


def write_model(path: Path, model: Any) -> None:
    """Save a model with Keras (see `FileConverter`): a .keras file stores the model, a .weights.h5 file its weights."""
    model = native_model(model)
    whole = path.name.endswith(".keras")
    if not (whole or path.name.endswith(".weights.h5")) or not isinstance(model, keras.Model):
        raise PortError(
            "a keras.Model is written to a .keras or .weights.h5 file. Received: "
            f"{describe_value(model)}, for the file {path.name}."
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "model.keras" if whole else "model.weights.h5")
        (model.save if whole else model.save_weights)(made)
        with made.open("rb") as file:
            write_atomically(path, read_chunks(file))


def _read_archive_layers(archive: KerasArchive) -> tuple[Inventory, dict[str, list[str]]]:
    """Return the layers, and the places of each leaf in the HDF5 file."""
    if archive.config is None:
        return weights_file_layers.read_file_layers(archive.arrays, archive.names)
    model = _build_model(archive)
    there = read_keras_model(model)
    places = dict(_dataset_places(archive, model, there))
    layers = [_with_stored_arrays(layer, archive.arrays, places) for layer in there.inventory.layers]
    inventory = dataclasses.replace(there.inventory, layers=layers)
    del model, there
    gc.collect()  # the model has reference cycles, and is as large as the file
    return inventory, places


def _build_model(archive: KerasArchive) -> Any:
    """Build the uncompiled model of a config, with zero weights. Keras refuses code in the file.

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
    """Return the config with zeros in place of all initializers. Random values are not needed and take longer."""
    if isinstance(config, list):
        return [_without_initializers(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {
        key: dict(_ZEROS) if key.endswith("initializer") and value is not None else _without_initializers(value)
        for key, value in config.items()
    }


def _dataset_places(archive: KerasArchive, model: Any, there: KerasInventory) -> Iterator[tuple[str, list[str]]]:
    """Yield (leaf, places of its array in the HDF5 file)."""
    saved = saved_variable_paths(model)
    for name, variable in there.variables.items():
        places = saved.get(id(variable), [])
        for place in places or [""]:
            stored = archive.arrays.get(place)
            if stored is None:
                raise archive.damaged_error(f"its weights lack {name!r}, which its config has")
            if stored.array.shape != tuple(variable.shape):
                raise archive.damaged_error(
                    f"{name!r} is {list(variable.shape)} in its config and {list(stored.array.shape)} in its weights"
                )
        yield name, places


def _with_stored_arrays(
    layer: NativeLayer, arrays: Mapping[str, StoredArray], places: Mapping[str, list[str]]
) -> NativeLayer:
    """Return a layer with the file's arrays in place of the model's."""

    def one(leaf: InventoryLeaf) -> InventoryLeaf:
        return dataclasses.replace(leaf, array=arrays[places[leaf.name][0]].array)

    return dataclasses.replace(layer, leaves={name: one(leaf) for name, leaf in layer.leaves.items()})
