"""`save` and `restore`: one safetensors file holding every array of a state and a JSON header (S22).

The file is written by `polyamp.files`, so a save that dies half-way leaves the previous checkpoint as it was. A SHA-256
digest over every byte of the file, its own field blanked, lies in the header.
Loading parses JSON and copies bytes; it runs no code.

A backend whose native optimizer makes its arrays at the first step exports `optimizer/state/*`, an empty array: it says
that whatever lies under `optimizer/state/` on the other side is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from polyamp._version import __version__
from polyamp.backend import Backend
from polyamp.errors import CheckpointError, RecipeError
from polyamp.files import write_atomically
from polyamp.loss_scale import LossScaler

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray[Any, Any]]

FORMAT: Final = "polyamp-checkpoint-1"
_BLANK: Final = "polyamp-digest".ljust(64, "-")
"""Stands in the header for the digest while the digest is computed; as long as one."""
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What parsing damaged bytes can raise, beside safetensors' own error."""
_State = TypeVar("_State")


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a state to one file, atomically.

    Args:
        state: a training state.
        path: the file; its folder must exist. An older checkpoint there is replaced only once the new one is whole. Its
            permissions stay, and so does a symbolic link; partial files that killed saves of it left are removed.

    Raises:
        OSError: the folder is missing or full; the older checkpoint is intact.
    """
    from safetensors.numpy import save as to_bytes

    arrays = _contiguous(state.backend.export_state(state))
    meta = {"format": FORMAT, "backend": state.backend.name, "polyamp": __version__, "recipe": _recipe_text(state)}
    content = to_bytes(arrays, metadata={**meta, "digest": _BLANK})
    write_atomically(path, content.replace(_BLANK.encode(), _digest(content, _BLANK).encode(), 1))


def restore(state: _State, path: str | os.PathLike[str]) -> _State:
    """The state with everything replaced by what a checkpoint holds; training continues bit-identically (S22).

    Args:
        state: a state made by `init` from the same model and recipe. It says which arrays are expected.
        path: a file written by `save`.

    Returns:
        The restored state. In torch and Keras the model and optimizer inside are updated in place.

    Raises:
        CheckpointError: the file is damaged, or of another model or backend. The given state is then unchanged.
        FileNotFoundError: there is no such file.
    """
    backend: Backend = state.backend  # type: ignore[attr-defined]  # a State; the type variable keeps the caller's type
    meta, arrays = read(path)
    if meta.get("backend") != backend.name:
        raise CheckpointError(
            f"{os.fspath(path)} was saved by the {meta.get('backend')} backend and cannot be restored into a "
            f"{backend.name} state: layouts of parameters differ between frameworks."
        )
    _check_fit(backend.export_state(state), arrays, os.fspath(path))
    _check_scale(state.recipe.loss_scaler, arrays, os.fspath(path))  # type: ignore[attr-defined]  # a State, as above
    result: _State = backend.import_state(state, arrays)  # type: ignore[assignment]  # the same State type comes back
    return result


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, np.ndarray[Any, Any]]]:
    """A checkpoint's metadata and arrays, after checking its digest. For inspection; `restore` uses it.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a polyamp checkpoint.
    """
    from safetensors import SafetensorError, deserialize

    content = Path(path).read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        meta: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        arrays = {name: _array(info) for name, info in deserialize(content)}  # type: ignore[no-untyped-call]  # untyped
        stored = meta.pop("digest")
        intact = stored == _digest(content, stored)
    except (*_MALFORMED, SafetensorError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is not a whole polyamp checkpoint ({type(error).__name__}: {error}). It is truncated, "
            "damaged or another program's; restore an older one."
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} has format {meta.get('format')!r}; this version of polyamp reads {FORMAT!r}."
        )
    if not intact:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged: its contents do not match its digest. Restore an older one."
        )
    return meta, arrays


def _check_fit(expected: Arrays, found: Arrays, path: str) -> None:
    late = tuple(name[:-1] for name in (*expected, *found) if name.endswith("/*"))
    problems = [f"missing: {name}" for name in expected if name not in found and not name.startswith(late)]
    problems += [f"not in this state: {name}" for name in found if name not in expected and not name.startswith(late)]
    problems += [
        f"{name}: {_kind(found[name])} in the file, {_kind(expected[name])} in the state"
        for name in expected
        if name in found and _kind(found[name]) != _kind(expected[name])
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"{path} belongs to another model, optimizer or scaler. {shown}. Build the state from the model and recipe "
            "that were saved."
        )


def _check_scale(scaler: LossScaler, arrays: Arrays, path: str) -> None:
    scale = arrays.get("loss_scale/scale")
    if scale is not None and not scaler.min_scale <= float(scale) <= scaler.max_scale:
        raise CheckpointError(
            f"{path} holds a loss scale of {float(scale):g}, which the state's scaler (kind={scaler.kind!r}, "
            f"{scaler.min_scale:g} to {scaler.max_scale:g}) never has. Restore with the scaler that was saved."
        )


def _kind(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _contiguous(arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    return {name: np.asarray(arrays[name], order="C") for name in sorted(arrays)}


def _digest(content: bytes, held: str) -> str:
    """SHA-256 over a file's bytes with the digest field, which now holds `held`, blanked."""
    start = content.find(held.encode())
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(_BLANK.encode())
    digest.update(view[start + len(held) :])
    return digest.hexdigest()


def _array(info: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes
    import numpy as np

    names = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    letter = info["dtype"]
    dtype = np.dtype(names[letter] if letter in names else f"{letter[0].lower()}{int(letter[1:]) // 8}")
    return np.frombuffer(info["data"], dtype).reshape(info["shape"]).copy()


def _recipe_text(state: Any) -> str:
    try:
        return str(state.recipe.to_json())
    except RecipeError:
        return ""  # a native optimizer has no file form; the arrays still describe it wholly
