"""Detection of file formats, and the converter that reads and writes each format.

The first bytes identify an existing file; the suffix identifies one to be written. A framework is imported only when
one of its files is used. The registry reports how to install a missing one.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from polyamp.backend_lookup import get_converter
from polyamp.contract import registry
from polyamp.errors import PortError, UnsupportedError, did_you_mean
from polyamp.files import as_path, missing_file_error
from polyamp.porting.files import canonical_file, safetensors_file
from polyamp.porting.layouts.canonical_model import Canonical, Layer
from polyamp.porting.layouts.converter import FileConverter, HasConverter
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy

CANONICAL: Final = "canonical"
"""Format name of files that `porting.save` writes, used in place of a framework's name."""
FRAMEWORK_BY_SUFFIX: Final = {
    ".safetensors": CANONICAL,
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".keras": "tensorflow",
    ".h5": "tensorflow",
}
"""Suffix of a file to be written -> its framework."""
_CHOICE_FILES: Final = {"keras": "keras", "tensorflow": "keras"}
"""Framework -> the one that runs on several others whose converter reads and writes its files."""
_METADATA: Final = {"pt": "torch", "tf": "tensorflow", "flax": "jax", canonical_file.FORMAT: CANONICAL}
"""Format in a safetensors file's metadata -> its framework."""
_ORBAX: Final = "_METADATA"
"""File in a folder that orbax wrote, or in one of its items. A folder of numbered steps has neither."""
_NOT_FILES: Final = {
    "saved_model.pb": "a SavedModel of TensorFlow, which holds a graph and no layers. Save the model as .keras",
    "model.safetensors": "a folder with a model in it. Name the file model.safetensors in it",
    "model.safetensors.index.json": "a folder with a model in it. Name the file model.safetensors.index.json in it",
    "pytorch_model.bin": "a folder with a model in it. Name the file pytorch_model.bin in it",
}
"""Name of a file in a folder that is no model's folder -> what the folder is, and what to do."""


def detect_framework(path: Path) -> str:
    """Return the framework of a file: the name of a backend, or `CANONICAL`.

    Raises:
        PortError: the format is unknown, or the file is a training state.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return _folder_framework(path)
    if not path.exists():
        raise missing_file_error(path)
    if path.name.endswith(".index.json") or safetensors_file.is_safetensors(path):
        return _safetensors_framework(path)
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"PK\x03\x04"):
        return _archive_framework(path)
    if start.startswith(b"\x89HDF"):
        return "tensorflow"
    if start.startswith(b"\x80"):
        return "torch"
    if path.suffix == ".safetensors":
        return _safetensors_framework(path)
    raise _unknown_file_error(path, "its first bytes are those of none that polyamp knows" if start else "it is empty")


def framework_from_suffix(path: Path) -> str:
    """Return the framework of a file to be written, by its suffix.

    >>> framework_from_suffix(Path("model.weights.h5"))
    'tensorflow'

    Raises:
        PortError: the suffix is unknown.
    """
    if path.suffix in FRAMEWORK_BY_SUFFIX:
        return FRAMEWORK_BY_SUFFIX[path.suffix]
    if not path.suffix:
        return "jax"
    raise PortError(
        f"which file {path} is to become cannot be told from its suffix {path.suffix!r}. Known: "
        f"{', '.join(FRAMEWORK_BY_SUFFIX)}, and none for a folder of orbax. Choose one of these, or name the "
        "framework: --to."
    )


def file_inventory(path: str | os.PathLike[str], framework: str | None = None) -> Inventory:
    """Return the layers in a file. Values are read only if necessary.

    Args:
        path: the file or folder: what `porting.save` wrote; safetensors with a framework's own names, as on Hugging
            Face, or the index of several (model.safetensors.index.json); torch's .pt, .pth and .bin; .keras and
            .weights.h5; folders of orbax.
        framework: framework of the file, if the file does not identify it.

    Raises:
        PortError: the file is damaged, of an unknown format, or a training state.
        BackendNotInstalledError: its reader is not installed; the message has the command that installs it.
        FileNotFoundError: there is no such file.
    """
    file = as_path(path)
    chosen = framework or detect_framework(file)
    if chosen == CANONICAL:
        return canonical_file.open(file).inventory()
    return file_converter(chosen, file).open_file(file)


def write_like(path: Path, leaves: Mapping[str, Lazy], like: Path, framework: str | None = None) -> None:
    """Write a file with the layout of an existing one.

    Args:
        path: the file to be written.
        leaves: name of each leaf of the existing file -> its new values.
        like: an existing file of the target model.
        framework: framework of `like`, if the file does not identify it.
    """
    chosen = framework or detect_framework(like)
    if chosen == CANONICAL:
        canonical_file.write(_with_leaves(canonical_file.open(like), leaves), path)
    else:
        file_converter(chosen, like).write_file(path, leaves, like)


def file_converter(framework: str, path: Path) -> FileConverter:
    """Return the converter of a framework, if it reads files.

    Raises:
        PortError: there is no such framework.
        UnsupportedError: the framework reads no files.
        BackendNotInstalledError: it is not installed.
    """
    known = {*registry.entries(), CANONICAL}
    if framework not in known:
        raise PortError(
            f"{framework!r} is no framework whose files polyamp knows. Known: {', '.join(sorted(known))}."
            f"{did_you_mean(framework, known)}"
        )
    converter = get_converter(_CHOICE_FILES.get(framework, framework))
    if isinstance(converter, FileConverter):
        return converter
    backend = registry.get(framework)
    converter = backend.porting if isinstance(backend, HasConverter) else None
    if not isinstance(converter, FileConverter):
        raise UnsupportedError(f"{path}: the {backend.name} backend of this version reads and writes no models' files.")
    return converter


def _with_leaves(model: Canonical, leaves: Mapping[str, Lazy]) -> Canonical:
    """Return a model with replaced values in some arrays."""
    layers, stored = {}, model.arrays()
    for path, layer in model.items():
        arrays = {name: leaves.get(f"{path}/{name}", array) for name, array in layer.arrays.items()}
        for name, to in layer.tied.items():
            axes = canonical_file.tie_axes(f"{path}/{name}", layer.arrays[name], to, stored)
            if axes is not None and to in leaves:
                arrays[name] = canonical_file.lazy_transpose(leaves[to], axes)
        layers[path] = Layer(layer.kind, arrays, layer.attributes, layer.tied, layer.fixed, layer.module)
    return Canonical(layers, model.framework, ordered=model.ordered)


def _folder_framework(path: Path) -> str:
    inside = {entry.name for entry in path.iterdir()}
    for name, said in _NOT_FILES.items():
        if name in inside:
            raise PortError(f"{path} is {said}.")
    if _ORBAX in inside or any(name.isdigit() or (path / name / _ORBAX).exists() for name in inside):
        return "jax"
    raise _unknown_file_error(path, "it is a folder, and none of orbax")


def _archive_framework(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise PortError(f"{path} is a damaged zip archive ({error}). Restore an older one.") from error
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    if "model.weights.h5" in names or "config.json" in names:
        return "tensorflow"
    raise _unknown_file_error(path, "it is a zip archive, and neither torch's nor Keras's")


def _safetensors_framework(path: Path) -> str:
    found = safetensors_file.read(path)
    said = found.metadata.get("format")
    if said in _METADATA:
        return _METADATA[said]
    if said is not None and said.startswith("polyamp-"):
        raise PortError(f"{path} {canonical_file.describe_other_format(said)}")
    ends = {name.replace("/", ".").rpartition(".")[2] for name in found.arrays}
    if "kernel" in ends and "weight" not in ends:
        return "jax"
    if "weight" in ends:
        return "torch"
    raise _unknown_file_error(path, "the names in it are neither torch's nor flax's")


def _unknown_file_error(path: Path, what: str) -> PortError:
    return PortError(
        f"whose file {path} is cannot be told: {what}. Known are safetensors, torch's .pt, .pth and .bin, .keras and "
        ".weights.h5, and folders of orbax. Name the framework if it is one: --from."
    )
