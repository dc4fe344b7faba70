"""torch files as sources and targets: `state_dict` files (.pt, .pth, .bin), and safetensors with torch's names.

No code in a file is run: torch reads it with `weights_only=True`, and maps it into memory where the format allows that.
`file_layers` infers the layers of a file from names and shapes.
"""

from __future__ import annotations

import errno
import functools
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from polyamp.errors import PortError, describe_value
from polyamp.files import missing_file_error, read_chunks, write_atomically
from polyamp.porting.files import safetensors_file as safetensors
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_torch.porting.inventory import unwrap_module
from polyamp_torch.porting.torch_only.numpy_conversion import storage_key, to_lazy, write_tensor
from polyamp_torch.porting.torch_only.weights_file_layers import read_file_layers

_STATE_DICT_KEYS: Final = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "ema",
)
"""Keys under which checkpoints store a model next to other data."""
_PREFIXES: Final = ("module.", "_orig_mod.")
"""Prefixes that wrappers add to all names."""
_PICKLE_SUFFIXES: Final = (".pt", ".pth", ".bin")


class _FileContent(NamedTuple):
    """Content of an open file.

    Attributes:
        arrays: key in the file -> values.
        tensors: the same as torch tensors; empty for safetensors.
        unpickled: the object in a torch file; None for safetensors.
        metadata: metadata of a safetensors file.
        ordered: whether the keys are in the model's order.
    """

    arrays: Mapping[str, Lazy]
    tensors: Mapping[str, torch.Tensor]
    unpickled: Any
    metadata: Mapping[str, str]
    ordered: bool


def open_file(path: Path) -> Inventory:
    """See `polyamp.porting.layouts.converter.FileConverter.open_file`."""
    content = _open_content(path)
    leaves: dict[str, InventoryLeaf] = {}
    left: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, short in _strip_prefixes(content.arrays).items():
        array = content.arrays[key]
        if array.dtype.kind in "iub" and not array.dtype.name.startswith("float"):
            counter = short.endswith("num_batches_tracked")
            left[short] = "counts batches; torch alone keeps it" if counter else "whole numbers or flags"
            continue
        trainable = not short.endswith(("running_mean", "running_var"))
        tied = None
        if key in content.tensors:
            owner = first.setdefault(storage_key(content.tensors[key]), short)
            tied = owner if owner != short else None
        leaves[short] = InventoryLeaf(short, array, trainable, tied)
    return Inventory(read_file_layers(leaves), "a file of torch's", content.ordered, left)


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """Write a file; see `polyamp.porting.layouts.converter.FileConverter.write_file`. A whole `state_dict` is in memory
    meanwhile, because torch writes it from memory; for safetensors, one array is."""
    content = _open_content(like)
    short = _strip_prefixes(content.arrays)
    known = {name: key for key, name in short.items()}
    for name, array in leaves.items():
        if name not in known:
            raise PortError(f"{like} has no array {name!r}.")
        if content.arrays[known[name]].shape != array.shape:
            shape = list(content.arrays[known[name]].shape)
            raise PortError(f"{name!r} is {shape} in {like}. Received: {list(array.shape)}.")
    if path.suffix not in (".safetensors", *_PICKLE_SUFFIXES):
        raise _suffix_error(path)
    if content.unpickled is None and path.suffix == ".safetensors":
        new = {key: leaves.get(short[key], array) for key, array in content.arrays.items()}
        safetensors.write(path, new, _safetensors_metadata(content))
        return
    if content.unpickled is None or path.suffix == ".safetensors":
        raise PortError(f"{path} would be another kind of file than {like}, whose layout it takes. Name it alike.")
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    for key, name in short.items():
        if name in leaves:
            made[storage_key(content.tensors[key])] = _to_tensor(leaves[name])
    _save_atomically(_replace_tensors(content.unpickled, made), path)


def write_model(path: Path, model: Any) -> None:
    """Write the `state_dict`; see `polyamp.porting.layouts.converter.FileConverter.write_model`. safetensors has no
    ties: an array with two names is stored under the first, as in Hugging Face's tools."""
    state = unwrap_module(model).state_dict()
    if path.suffix in _PICKLE_SUFFIXES:
        _save_atomically(state, path)
    elif path.suffix == ".safetensors":
        first: dict[tuple[Any, ...], str] = {}
        arrays = {
            name: to_lazy(tensor, name)
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and first.setdefault(storage_key(tensor), name) == name
        }
        safetensors.write(path, arrays, {"format": "pt"})
    else:
        raise _suffix_error(path)


def _suffix_error(path: Path) -> PortError:
    return PortError(
        f"torch has no file of suffix {path.suffix!r}. Accepted: .safetensors, {', '.join(_PICKLE_SUFFIXES)}."
    )


def _safetensors_metadata(content: _FileContent) -> dict[str, str]:
    return {key: value for key, value in content.metadata.items() if not key.startswith("polyamp.")}


def _open_content(path: Path) -> _FileContent:
    if not path.exists():
        raise missing_file_error(path)
    with path.open("rb") as file:
        start = file.read(4)
    zipped = start == b"PK\x03\x04"
    if safetensors.is_safetensors(path) or not (zipped or start.startswith(b"\x80")):
        found = safetensors.read(path)
        return _FileContent(found.arrays, {}, None, found.metadata, ordered=False)
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise PortError(
            f"{path} cannot be read without running code that is in it, which polyamp does not do "
            f"({_first_line(error)}). In a program that trusts it: torch.save(model.state_dict(), ...)."
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise safetensors.damaged_file_error(path, _first_line(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # torch seeks to a position before the start of the file
            raise
        raise safetensors.damaged_file_error(path, _first_line(error)) from error
    tensors = _find_state_dict(whole, path)
    arrays = {key: to_lazy(tensor, key) for key, tensor in tensors.items()}
    if zipped:
        sound = functools.cache(lambda: _check_digests(path))
        arrays = {key: _with_check(array, sound) for key, array in arrays.items()}
    return _FileContent(arrays, tensors, whole, {}, ordered=True)


def _with_check(array: Lazy, sound: Callable[[], None]) -> Lazy:
    """Return an array that runs a check of the file before its first read."""

    def read() -> Any:
        sound()
        return array.read()

    return Lazy(array.shape, array.dtype, read)


def _check_digests(path: Path) -> None:
    """Raise if an array's CRC-32 differs from the one stored when the file was saved. torch does not check it."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as record:
                    for _ in read_chunks(record):
                        pass
    except zipfile.BadZipFile as error:
        what = f"{_first_line(error)}. (A file saved under torch.serialization.set_crc32_options(False) has no digests)"
        raise safetensors.damaged_file_error(path, what) from error


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def _find_state_dict(whole: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors from the content of a file."""
    if isinstance(whole, Mapping):
        for key in _STATE_DICT_KEYS:
            if isinstance(whole.get(key), Mapping):
                return _find_state_dict(whole[key], path)
        found = {str(key): value for key, value in whole.items() if isinstance(value, torch.Tensor)}
        if found:
            return found
    keys = f" with {', '.join(map(repr, list(whole)[:6]))}" if isinstance(whole, Mapping) else ""
    raise PortError(
        f"{path} holds no model's state_dict: it is {describe_value(whole)}{keys}. Accepted: a dict of tensors, "
        "alone or "
        f"under one of {', '.join(map(repr, _STATE_DICT_KEYS))}."
    )


def _strip_prefixes(keys: Iterable[str]) -> dict[str, str]:
    """Map each key in the file to its `/`-separated path without wrapper prefixes."""
    found = {key: key for key in keys}
    again = True
    while again and found:
        again = False
        for prefix in _PREFIXES:
            if all(short.startswith(prefix) for short in found.values()):
                found = {key: short.removeprefix(prefix) for key, short in found.items()}
                again = True
    return {key: short.replace(".", "/") for key, short in found.items()}


def _to_tensor(array: Lazy) -> torch.Tensor:
    dtype = getattr(torch, array.dtype.name)
    tensor = torch.empty(array.shape, dtype=dtype)
    write_tensor(tensor, np.asarray(array.read()))
    return tensor


def _replace_tensors(whole: Any, made: Mapping[tuple[Any, ...], torch.Tensor]) -> Any:
    """Return the content of a file with new tensors in place of those on the same memory."""
    if isinstance(whole, torch.Tensor):
        return made.get(storage_key(whole), whole)
    if isinstance(whole, dict):
        new = type(whole)((key, _replace_tensors(value, made)) for key, value in whole.items())
        if hasattr(whole, "__dict__"):  # the module versions of a state_dict
            vars(new).update(vars(whole))
        return new
    if isinstance(whole, list):
        return [_replace_tensors(value, made) for value in whole]
    return whole


def _save_atomically(whole: Any, path: Path) -> None:
    """Run `torch.save` through an unnamed file, so that a partial file is never visible."""
    with tempfile.TemporaryFile(dir=path.parent) as held:
        torch.save(whole, held)
        held.seek(0)
        write_atomically(path, read_chunks(held))
