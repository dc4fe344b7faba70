"""The one-file form of a checkpoint, read: its metadata and arrays, checked against the digest.

`polyamp.train.checkpoint` writes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from polyamp.errors import CheckpointError
from polyamp.files import missing_file_error
from polyamp.train.checkpoint_tensors import PARSE_ERRORS, content_digest, decode_complex128, deserialize_arrays
from polyamp.train.sharded_checkpoint import MANIFEST

FORMAT: Final = "polyamp-checkpoint-1"
COMPLEX128: Final = "complex128"
"""Metadata key: names of the arrays that are stored as pairs of float64."""
_MAGIC_BYTES: Final = {  # first bytes of a file -> its description
    b"PK\x03\x04": "it is a zip archive, as torch.save, .keras and .npz files are",
    b"\x89HDF": "it is an HDF5 file, as older Keras weights are",
    b"\x80": "it is a pickle, which polyamp does not load",
    b"\x93NUMPY": "it is a NumPy array",
}


def read_with_digest(path: Path) -> tuple[dict[str, str], dict[str, Any], str]:
    """Read a checkpoint's metadata and arrays, check its digest, and return it too.

    Raises:
        CheckpointError: the file is truncated, damaged, or not a polyamp checkpoint.
        FileNotFoundError: there is no such file; lists similar names in the folder.
        IsADirectoryError: it is a folder.
    """
    from safetensors import SafetensorError

    content = _read_bytes(path)
    try:
        length = int.from_bytes(content[:8], "little")
        meta: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        arrays = decode_complex128(deserialize_arrays(content), json.loads(meta.pop(COMPLEX128, "[]")))
        stored = meta.pop("digest")
        intact = stored == content_digest(content, stored)
    except (*PARSE_ERRORS, SafetensorError) as error:
        raise CheckpointError(
            f"{os.fspath(path)} is not a whole polyamp checkpoint ({_describe_foreign_file(content, error)}). "
            "It is truncated, damaged or another program's; restore an older one."
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)} has format {meta.get('format')!r}; this version of polyamp reads {FORMAT!r}."
        )
    if not intact:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged: its contents do not match its digest. Restore an older one."
        )
    return meta, arrays, stored


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise missing_file_error(path) from error
    except IsADirectoryError as error:
        advice = "polyamp.save wrote a file. Name the file"
        if (path / MANIFEST).exists():
            advice = "its own framework reads it: restore it in one process, and save one file (sharded=False)"
        raise IsADirectoryError(error.errno, f"{path.absolute()} is a folder; {advice}", str(path)) from error


def _describe_foreign_file(content: bytes, error: Exception) -> str:
    """Describe a file that is no checkpoint by its first bytes, or else by the error of reading it."""
    if not content:
        return "it is empty"
    for start, kind in _MAGIC_BYTES.items():
        if content.startswith(start):
            return kind
    return f"{type(error).__name__}: {error}"
