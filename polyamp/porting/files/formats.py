"""Files as sources and targets: what a file is, and which converter reads and writes it. Called by `port`, which takes
a path for a source, and by `convert`.

What a file is, its first bytes say; of one that is yet to be written, its suffix. A framework is imported once one of
its files is met, through the registry, which says how to install what is not there.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polyamp.contract import registry
from polyamp.errors import PortError, UnsupportedError, did_you_mean
from polyamp.files import as_path, missing
from polyamp.porting.files import files, tensors
from polyamp.porting.layouts.canonical import Canonical, Layer
from polyamp.porting.layouts.converter import Evaluation, Ports, ReadsFiles
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CANONICAL: Final = "canonical"
"""What `porting.save` writes, in the place of a framework's name."""
SUFFIXES: Final = {
    ".safetensors": CANONICAL,
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".keras": "tensorflow",
    ".h5": "tensorflow",
}
"""Suffix of a file that is to be written -> whose it is."""
_METADATA: Final = {"pt": "torch", "tf": "tensorflow", "flax": "jax", files.FORMAT: CANONICAL}
"""What safetensors files say of their format -> whose they are."""
_ORBAX: Final = "_METADATA"
"""What lies in a folder that orbax wrote, in one of its items, or in neither where the folder holds numbered steps."""
_NOT_FILES: Final = {
    "saved_model.pb": "a SavedModel of TensorFlow, which holds a graph and no layers. Save the model as .keras",
    "model.safetensors": "a folder with a model in it. Name the file model.safetensors in it",
    "model.safetensors.index.json": "a folder with a model in it. Name the file model.safetensors.index.json in it",
    "pytorch_model.bin": "a folder with a model in it. Name the file pytorch_model.bin in it",
}
"""What lies in a folder that is no model's -> what it is, and what to do."""


def framework_of(path: Path) -> str:
    """Whose file this is: the name of a backend, or `CANONICAL`.

    Raises:
        PortError: it is none that is known, or holds a training state.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise missing(path)
    if path.name.endswith(".index.json") or tensors.recognised(path):
        return _of_tensors(path)
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"PK\x03\x04"):
        return _of_archive(path)
    if start.startswith(b"\x89HDF"):
        return "tensorflow"
    if start.startswith(b"\x80"):
        return "torch"
    if path.suffix == ".safetensors":
        return _of_tensors(path)
    raise _unknown(path, "its first bytes are those of none that polyamp knows" if start else "it is empty")


def framework_for(path: Path) -> str:
    """Whose file a path is to become, by its suffix.

    >>> framework_for(Path("model.weights.h5"))
    'tensorflow'

    Raises:
        PortError: the suffix says nothing.
    """
    if path.suffix in SUFFIXES:
        return SUFFIXES[path.suffix]
    if not path.suffix:
        return "jax"
    raise PortError(
        f"which file {path} is to become cannot be told from its suffix {path.suffix!r}. Known: "
        f"{', '.join(SUFFIXES)}, and none for a folder of orbax. Choose one of these, or name the framework: --to."
    )


def inventory_of(path: str | os.PathLike[str], framework: str | None = None) -> Inventory:
    """The layers in a file; no values are read that need not be.

    Args:
        path: the file or folder: what `porting.save` wrote; safetensors with a framework's own names, as on Hugging
            Face, or the index of several (model.safetensors.index.json); torch's .pt, .pth and .bin; .keras and
            .weights.h5; folders of orbax.
        framework: whose it is, where the file does not say.

    Raises:
        PortError: it is damaged, none that is known, or holds a training state.
        BackendNotInstalledError: whatever reads it is not installed; names the command that installs it.
        FileNotFoundError: there is no such file.
    """
    file = as_path(path)
    chosen = framework or framework_of(file)
    if chosen == CANONICAL:
        return files.open(file).inventory()
    return reader(chosen, file).open_file(file)


class FileTarget:
    """A file that is yet to be written, with the layout of one that is there, in the place of a model's converter.

    Args:
        path: the file to be written; None only tries.
        like: an existing file of the target model.
        framework: whose `like` is, where the file does not say.
    """

    in_place: Final = False

    def __init__(self, path: Path | None, like: Path, framework: str | None = None) -> None:
        self._path = path
        self._like = like
        self._framework = framework or framework_of(like)

    def inventory(self, model: Any = None, batch: Any = None) -> Inventory:
        """The layers of the file that is there."""
        return inventory_of(self._like, self._framework)

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Path | None:
        """Write the file."""
        if self._path is None:
            return None
        if self._framework == CANONICAL:
            files.write(_replaced(files.open(self._like), leaves), self._path)
        else:
            reader(self._framework, self._like).write_file(self._path, leaves, self._like)
        return self._path

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]) -> Evaluation:
        """Files compute nothing."""
        raise UnsupportedError("a file holds no function, so that nothing can be checked with a batch.")


class Tried:
    """A model's converter that writes nothing: for finding out what a port would do.

    Args:
        found: the model's layers.
    """

    in_place: Final = False

    def __init__(self, found: Inventory) -> None:
        self._found = found

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        """The layers."""
        return self._found

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        """The model as it is."""
        return model

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]) -> Evaluation:
        """Not without its values."""
        raise UnsupportedError("a port that is only tried cannot be checked with a batch.")


def same_backend(framework: str, name: str) -> bool:
    """Whether a framework's name is one of a backend's; imports neither.

    >>> same_backend("flax", "jax"), same_backend("torch", "jax")
    (True, False)
    """
    known = registry.entries()
    return framework == name or (framework in known and name in known and known[framework].value == known[name].value)


def reader(framework: str, path: Path) -> ReadsFiles:
    """The converter of a framework, if it reads files.

    Raises:
        PortError: there is no such framework.
        UnsupportedError: it reads none.
        BackendNotInstalledError: it is not installed.
    """
    known = {*registry.entries(), CANONICAL}
    if framework not in known:
        raise PortError(
            f"{framework!r} is no framework whose files polyamp knows. Known: {', '.join(sorted(known))}."
            f"{did_you_mean(framework, known)}"
        )
    backend = registry.get(framework)
    converter = backend.porting if isinstance(backend, Ports) else None
    if not isinstance(converter, ReadsFiles):
        raise UnsupportedError(f"{path}: the {backend.name} backend of this version reads and writes no models' files.")
    return converter


def _replaced(model: Canonical, leaves: Mapping[str, Lazy]) -> Canonical:
    """A model with other values in some arrays."""
    layers, stored = {}, model.arrays()
    for path, layer in model.items():
        arrays = {name: leaves.get(f"{path}/{name}", array) for name, array in layer.arrays.items()}
        for name, to in layer.tied.items():
            axes = files.axes_of(f"{path}/{name}", layer.arrays[name], to, stored)
            if axes is not None and to in leaves:
                arrays[name] = files.reordered(leaves[to], axes)
        layers[path] = Layer(layer.kind, arrays, layer.attributes, layer.tied, layer.fixed, layer.module)
    return Canonical(layers, model.framework, ordered=model.ordered)


def _of_folder(path: Path) -> str:
    inside = {entry.name for entry in path.iterdir()}
    for name, said in _NOT_FILES.items():
        if name in inside:
            raise PortError(f"{path} is {said}.")
    if _ORBAX in inside or any(name.isdigit() or (path / name / _ORBAX).exists() for name in inside):
        return "jax"
    raise _unknown(path, "it is a folder, and none of orbax")


def _of_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise PortError(f"{path} is a damaged zip archive ({error}). Restore an older one.") from error
    if any(name.endswith("/data.pkl") for name in names):
        return "torch"
    if "model.weights.h5" in names or "config.json" in names:
        return "tensorflow"
    raise _unknown(path, "it is a zip archive, and neither torch's nor Keras's")


def _of_tensors(path: Path) -> str:
    found = tensors.read(path)
    said = found.metadata.get("format")
    if said in _METADATA:
        return _METADATA[said]
    if said is not None and said.startswith("polyamp-"):
        raise PortError(f"{path} {files.other(said)}")
    ends = {name.replace("/", ".").rpartition(".")[2] for name in found.arrays}
    if "kernel" in ends and "weight" not in ends:
        return "jax"
    if "weight" in ends:
        return "torch"
    raise _unknown(path, "the names in it are neither torch's nor flax's")


def _unknown(path: Path, what: str) -> PortError:
    return PortError(
        f"whose file {path} is cannot be told: {what}. Known are safetensors, torch's .pt, .pth and .bin, .keras and "
        ".weights.h5, and folders of orbax. Name the framework if it is one: --from."
    )
