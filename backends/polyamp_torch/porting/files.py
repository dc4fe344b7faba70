"""torch's files as sources and targets: a `state_dict` in .pt, .pth or .bin, and safetensors with torch's names.

Called by `converter`. Nothing in a file is run: torch reads it with `weights_only=True`, and maps it into memory where
its format allows that. What a file's layers are, `file_forms` tells from names and shapes.
"""

from __future__ import annotations

import errno
import functools
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from polyamp.errors import PortError, described
from polyamp.files import missing, write_atomically
from polyamp.porting.files import tensors as safetensors
from polyamp.porting.layouts.inventory import Inventory, Leaf
from polyamp.porting.layouts.lazy import Lazy
from polyamp_torch.porting.file_forms import layers_of
from polyamp_torch.porting.tensors import lazy, place_of, write
from polyamp_torch.porting.walk import module_of

_NESTED: Final = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params", "ema")
"""Where checkpoints keep a model beside other things."""
_PREFIXES: Final = ("module.", "_orig_mod.")
"""What wrappers put before all names."""
_PICKLED: Final = (".pt", ".pth", ".bin")
_PART: Final = 1 << 24


class _Content(NamedTuple):
    """A file that was opened.

    Attributes:
        arrays: key in the file -> values.
        tensors: the same as torch's tensors; empty of safetensors.
        whole: what the file holds, of torch's own.
        metadata: of safetensors.
        ordered: whether the keys are in the model's order.
    """

    arrays: Mapping[str, Lazy]
    tensors: Mapping[str, torch.Tensor]
    whole: Any
    metadata: Mapping[str, str]
    ordered: bool


def open_file(path: Path) -> Inventory:
    """See `polyamp.porting.layouts.converter.ReadsFiles.open_file`."""
    content = _opened(path)
    leaves: dict[str, Leaf] = {}
    left: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, short in _short(content.arrays).items():
        array = content.arrays[key]
        if array.dtype.kind in "iub" and not array.dtype.name.startswith("float"):
            counter = short.endswith("num_batches_tracked")
            left[short] = "counts batches; torch alone keeps it" if counter else "whole numbers or flags"
            continue
        trainable = not short.endswith(("running_mean", "running_var"))
        tied = None
        if key in content.tensors:
            owner = first.setdefault(place_of(content.tensors[key]), short)
            tied = owner if owner != short else None
        leaves[short] = Leaf(short, array, trainable, tied)
    return Inventory(layers_of(leaves), "a file of torch's", content.ordered, left)


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """See `polyamp.porting.layouts.converter.ReadsFiles.write_file`. A `state_dict`, which torch writes from memory, is
    there as a whole meanwhile; of safetensors it is one array."""
    content = _opened(like)
    short = _short(content.arrays)
    known = {name: key for key, name in short.items()}
    for name, array in leaves.items():
        if name not in known:
            raise PortError(f"{like} has no array {name!r}.")
        if content.arrays[known[name]].shape != array.shape:
            shape = list(content.arrays[known[name]].shape)
            raise PortError(f"{name!r} is {shape} in {like}. Received: {list(array.shape)}.")
    if path.suffix not in (".safetensors", *_PICKLED):
        raise _suffix(path)
    if content.whole is None and path.suffix == ".safetensors":
        new = {key: leaves.get(short[key], array) for key, array in content.arrays.items()}
        safetensors.write(path, new, _metadata(content))
        return
    if content.whole is None or path.suffix == ".safetensors":
        raise PortError(f"{path} would be another kind of file than {like}, whose layout it takes. Name it alike.")
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    for key, name in short.items():
        if name in leaves:
            made[place_of(content.tensors[key])] = _tensor(leaves[name])
    _save(_replaced(content.whole, made), path)


def write_model(path: Path, model: Any) -> None:
    """See `polyamp.porting.layouts.converter.ReadsFiles.write_model`: the `state_dict`. In safetensors, which know no
    ties, an array that has two names is there under the first, as Hugging Face's tools have it."""
    state = module_of(model).state_dict()
    if path.suffix in _PICKLED:
        _save(state, path)
    elif path.suffix == ".safetensors":
        first: dict[tuple[Any, ...], str] = {}
        arrays = {
            name: lazy(tensor, name)
            for name, tensor in state.items()
            if isinstance(tensor, torch.Tensor) and first.setdefault(place_of(tensor), name) == name
        }
        safetensors.write(path, arrays, {"format": "pt"})
    else:
        raise _suffix(path)


def _suffix(path: Path) -> PortError:
    return PortError(f"torch has no file of suffix {path.suffix!r}. Accepted: .safetensors, {', '.join(_PICKLED)}.")


def _metadata(content: _Content) -> dict[str, str]:
    return {key: value for key, value in content.metadata.items() if not key.startswith("polyamp.")}


def _opened(path: Path) -> _Content:
    if not path.exists():
        raise missing(path)
    with path.open("rb") as file:
        start = file.read(4)
    zipped = start == b"PK\x03\x04"
    if safetensors.recognised(path) or not (zipped or start.startswith(b"\x80")):
        found = safetensors.read(path)
        return _Content(found.arrays, {}, None, found.metadata, ordered=False)
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise PortError(
            f"{path} cannot be read without running code that is in it, which polyamp does not do "
            f"({_line(error)}). In a program that trusts it: torch.save(model.state_dict(), ...)."
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise safetensors.damaged(path, _line(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # what torch looks for lies before the file's beginning
            raise
        raise safetensors.damaged(path, _line(error)) from error
    tensors = _state(whole, path)
    arrays = {key: lazy(tensor, key) for key, tensor in tensors.items()}
    if zipped:
        sound = functools.cache(lambda: _check_digests(path))
        arrays = {key: _checked(array, sound) for key, array in arrays.items()}
    return _Content(arrays, tensors, whole, {}, ordered=True)


def _checked(array: Lazy, sound: Callable[[], None]) -> Lazy:
    """An array before whose first read the file is looked at."""

    def read() -> Any:
        sound()
        return array.read()

    return Lazy(array.shape, array.dtype, read)


def _check_digests(path: Path) -> None:
    """Refuse a file in which an array has another CRC-32 than when it was saved; torch does not look."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as record:
                    while record.read(_PART):
                        pass
    except zipfile.BadZipFile as error:
        what = f"{_line(error)}. (A file saved under torch.serialization.set_crc32_options(False) has no digests)"
        raise safetensors.damaged(path, what) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def _state(whole: Any, path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in what a file holds."""
    if isinstance(whole, Mapping):
        for key in _NESTED:
            if isinstance(whole.get(key), Mapping):
                return _state(whole[key], path)
        found = {str(key): value for key, value in whole.items() if isinstance(value, torch.Tensor)}
        if found:
            return found
    keys = f" with {', '.join(map(repr, list(whole)[:6]))}" if isinstance(whole, Mapping) else ""
    raise PortError(
        f"{path} holds no model's state_dict: it is {described(whole)}{keys}. Accepted: a dict of tensors, alone or "
        f"under one of {', '.join(map(repr, _NESTED))}."
    )


def _short(keys: Iterable[str]) -> dict[str, str]:
    """Key in the file -> path without a wrapper's prefix, `/`-separated."""
    found = {key: key for key in keys}
    again = True
    while again and found:
        again = False
        for prefix in _PREFIXES:
            if all(short.startswith(prefix) for short in found.values()):
                found = {key: short.removeprefix(prefix) for key, short in found.items()}
                again = True
    return {key: short.replace(".", "/") for key, short in found.items()}


def _tensor(array: Lazy) -> torch.Tensor:
    dtype = getattr(torch, array.dtype.name)
    tensor = torch.empty(array.shape, dtype=dtype)
    write(tensor, np.asarray(array.read()))
    return tensor


def _replaced(whole: Any, made: Mapping[tuple[Any, ...], torch.Tensor]) -> Any:
    """What a file holds, with new tensors in the place of those on the same memory."""
    if isinstance(whole, torch.Tensor):
        return made.get(place_of(whole), whole)
    if isinstance(whole, dict):
        new = type(whole)((key, _replaced(value, made)) for key, value in whole.items())
        if hasattr(whole, "__dict__"):  # a state_dict's versions of modules
            vars(new).update(vars(whole))
        return new
    if isinstance(whole, list):
        return [_replaced(value, made) for value in whole]
    return whole


def _save(whole: Any, path: Path) -> None:
    """`torch.save` by way of a file without a name, so that a half-written one is never seen."""
    with tempfile.TemporaryFile(dir=path.parent) as held:
        torch.save(whole, held)
        held.seek(0)
        write_atomically(path, _parts(held))


def _parts(held: Any) -> Iterator[bytes]:
    while part := held.read(_PART):
        yield part
