"""`write` and `open` for files of models in the canonical layout, so that two frameworks need not share an environment.

A model is one safetensors file (`safetensors_file`). Each array is stored under "path/array"; the metadata contains the
other fields of a `Canonical` as JSON. Any program that reads safetensors can read the arrays; polyamp reads everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from polyamp._version import __version__
from polyamp.errors import PortError, describe_value
from polyamp.files import as_path
from polyamp.porting.files import safetensors_file
from polyamp.porting.layouts.canonical_model import Canonical, Layer
from polyamp.porting.layouts.layer_kinds import to_json_value
from polyamp.porting.layouts.lazy_array import Array, Lazy

FORMAT: Final = "polyamp-canonical-1"
_CHECKPOINT: Final = "polyamp-checkpoint-1"
_MAX_DEPTH: Final = 32
"""Levels of lists and objects in an attribute."""
_FIELDS: Final = {
    "path": str,
    "kind": str,
    "module": str,
    "arrays": list,
    "attributes": dict,
    "tied": dict,
    "fixed": list,
}
"""JSON field of a layer's metadata -> its type. "tied" maps an array's name to [name of the array it is tied to, order
of axes]; the order is null if the array is stored separately."""


def write(canonical: Canonical, file: Path) -> None:
    """Write a model to a file; see `porting.save`.

    Raises:
        PortError: an attribute is no JSON data, the file format lacks an array's dtype, or a tied array does not exist.
        OSError: the folder is missing, full or read-only; the older file is intact.
    """
    stored = canonical.arrays()
    if len(stored) != sum(len(layer.arrays) - len(layer.tied) for layer in canonical.values()):
        raise PortError("two arrays of the model have the same name path/array, and a file holds each name once.")
    layers = []
    for layer_path, layer in canonical.items():
        tied = {}
        for name, to in layer.tied.items():
            axes = tie_axes(f"{layer_path}/{name}", layer.arrays[name], to, stored)
            if axes is None:
                stored[f"{layer_path}/{name}"] = layer.arrays[name]
            tied[name] = [to, axes]
        layers.append(
            {
                "path": layer_path,
                "kind": layer.kind,
                "module": layer.module,
                "arrays": list(layer.arrays),
                "attributes": _attributes(layer_path, layer),
                "tied": tied,
                "fixed": sorted(layer.fixed),
            }
        )
    metadata = {
        "format": FORMAT,
        "polyamp": __version__,
        "framework": canonical.framework,
        "ordered": json.dumps(canonical.ordered),
        "layers": json.dumps(layers, separators=(",", ":")),
    }
    safetensors_file.write(file, stored, metadata)


def open(path: str | os.PathLike[str]) -> Canonical:  # noqa: A001  # public name
    """Open a model that `save` wrote. Arrays are read on demand, and checked against their digests then.

    No code in the file is run. The file must not be changed in place while the model is in use. `save` replaces the
    file, which is safe.

    Args:
        path: the file.

    Raises:
        PortError: the file is damaged or of another format or version. Reading an array can raise it too.
        ArgumentError: no path.
        FileNotFoundError: there is no such file; the message lists files with similar names.
        IsADirectoryError: it is a folder.
    """
    file = as_path(path, instead="porting.open(path) reads what porting.save wrote.")
    metadata, arrays, digested = safetensors_file.read(file, "model that porting.save wrote")
    said = metadata.get("format")
    if said != FORMAT:
        raise PortError(f"{file} {describe_other_format(said)}")
    if not digested:
        raise safetensors_file.damaged_file_error(file, "it has no digests")
    try:
        layers = dict(_read_layers(json.loads(metadata["layers"]), arrays))
        ordered = json.loads(metadata["ordered"])
        return Canonical(layers, metadata["framework"], ordered=bool(ordered))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise safetensors_file.damaged_file_error(
            file, f"what it says of its layers cannot be used ({said})"
        ) from error


def _attributes(path: str, layer: Layer) -> dict[str, Any]:
    found = {}
    for name, value in layer.attributes.items():
        try:
            found[name] = to_json_value(value)
            json.dumps(found[name], allow_nan=False)
            _check_depth(name, found[name])
        except (TypeError, ValueError, RecursionError) as error:
            raise PortError(
                f"the attribute {name!r} of {path!r} ({layer.kind}) is no JSON data: {error}. Attributes are numbers, "
                f"texts, true, false, null, lists and objects of them. Received: {describe_value(value)}."
            ) from error
    return found


def _check_depth(name: str, value: Any) -> None:
    """Raise ValueError if lists and objects are nested deeper than attributes are, and than they can be compared."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [list(each.values()) if isinstance(each, Mapping) else each for each in level]
        level = [item for each in inner if isinstance(each, list) for item in each]
        if not level:
            return
    raise ValueError(f"{name!r} is nested deeper than {_MAX_DEPTH} levels")


def tie_axes(name: str, array: Lazy, to: str, stored: Mapping[str, Lazy]) -> list[int] | None:
    """Return the order of axes in which an array equals the array it is tied to; None if they differ in any bit."""
    if to not in stored:
        raise PortError(f"{name!r} is tied to {to!r}, which is no array of the model. Arrays: {', '.join(stored)}.")
    other = stored[to]
    straight = list(range(array.ndim))
    for axes in (straight, straight[::-1]):
        if array.dtype != other.dtype or tuple(other.shape[axis] for axis in axes) != array.shape:
            continue
        here, there = array.read(), other.read().transpose(axes)
        same = here.ctypes.data == there.ctypes.data and here.strides == there.strides
        if same or np.array_equal(_bit_view(here), _bit_view(there)):
            return axes
    return None


def _bit_view(array: Array) -> Array:
    """Return values that compare bit by bit: a NaN equals itself, and -0 differs from 0."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array


def _read_layers(described_layers: Any, arrays: Mapping[str, Lazy]) -> Iterator[tuple[str, Layer]]:
    """Yield the layers that the metadata describes, with their arrays.

    Raises:
        ValueError, KeyError, TypeError: the metadata is not in the format of `save`.
    """
    left, seen = set(arrays), set()
    for said in described_layers:
        for field, kind in _FIELDS.items():
            if not isinstance(said[field], kind):
                raise ValueError(f"{field!r} of a layer is no {kind.__name__}: {describe_value(said[field])}")
        path, names, tied = said["path"], said["arrays"], said["tied"]
        if path in seen:
            raise ValueError(f"the layer {path!r} is there twice")
        if not {*tied, *said["fixed"]} <= set(names) or len(set(names)) != len(names):
            raise ValueError(f"the arrays of {path!r} contradict each other")
        seen.add(path)
        held = {}
        for name in names:
            to, axes = tied.get(name, (None, None))
            stored = f"{path}/{name}" if axes is None else to
            for needed in (stored, to or stored):
                if needed not in arrays:
                    raise ValueError(f"the array {needed!r} is missing")
            left.discard(f"{path}/{name}")
            held[name] = arrays[stored] if axes is None else lazy_transpose(arrays[stored], axes)
        for name, value in said["attributes"].items():
            _check_depth(name, value)
        ties = {name: to for name, (to, _) in tied.items()}
        yield path, Layer(said["kind"], held, said["attributes"], ties, frozenset(said["fixed"]), said["module"])
    if left:
        raise ValueError(f"{min(left)!r} belongs to no layer")


def lazy_transpose(array: Lazy, axes: list[int]) -> Lazy:
    """Return a lazy array with its axes in another order.

    Raises:
        ValueError: `axes` are not the array's axes.
    """
    if sorted(axes) != list(range(array.ndim)):
        raise ValueError(f"{axes} is no order of {array.ndim} axes")

    def read() -> Array:
        return array.read().transpose(axes)

    return Lazy(tuple(array.shape[axis] for axis in axes), array.dtype, read)


def describe_other_format(said: str | None) -> str:
    """Return a sentence about a file of another format, and how to use it."""
    if said == _CHECKPOINT:
        return (
            "is a training state that polyamp.save wrote, and no model that porting.save wrote. "
            "polyamp.restore(state, path) reads it into a state of the same backend, polyamp.port(path, state) into "
            "one of another."
        )
    if said is not None and said.startswith("polyamp-"):
        return f"has format {said!r}; this version of polyamp reads {FORMAT!r}. Use the polyamp that wrote it."
    return (
        "holds a framework's own tensors, and no model that porting.save wrote: which layers they belong to is not "
        "said in it. `polyamp port` reads such files."
    )
