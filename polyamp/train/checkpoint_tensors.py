"""Byte-level parts of checkpoints: arrays of safetensors files, and digests embedded in the text that they cover."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from polyamp.float_formats import DTYPE_ALIASES

if TYPE_CHECKING:
    import numpy as np

BLANK_DIGEST: Final = "polyamp-digest".ljust(64, "-")
"""Placeholder of a digest while the digest is computed; of the same length."""
PARSE_ERRORS: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""Errors of parsing damaged bytes, besides safetensors' own error."""


def content_digest(content: bytes, stored: str) -> str:
    """Return SHA-256 over bytes whose digest field, now `stored`, is blanked."""
    start = content.find(stored.encode())
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(BLANK_DIGEST.encode())
    digest.update(view[start + len(stored) :])
    return digest.hexdigest()


def seal_content(content: bytes) -> bytes:
    """Return bytes whose blank digest field is filled in."""
    return content.replace(BLANK_DIGEST.encode(), content_digest(content, BLANK_DIGEST).encode(), 1)


def encode_complex128(arrays: Mapping[str, np.ndarray[Any, Any]]) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """Return contiguous arrays for safetensors, which supports complex64 but not complex128, and the converted names.
    A complex128 array becomes float64 with a last axis of (real, imaginary)."""
    import numpy as np

    names = [name for name, each in arrays.items() if each.dtype == np.complex128]
    pairs = {name: arrays[name][..., None].view(np.float64) for name in names}
    return {**arrays, **pairs}, names


def decode_complex128(
    arrays: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str]
) -> dict[str, np.ndarray[Any, Any]]:
    """Invert `encode_complex128`."""
    import numpy as np

    return {**arrays, **{name: arrays[name].view(np.complex128)[..., 0] for name in names}}


def deserialize_arrays(content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a safetensors file by name, each in its own memory.

    Raises:
        SafetensorError: the bytes are no such file; damaged ones raise any of `PARSE_ERRORS` too.
    """
    from safetensors import deserialize

    read: Any = deserialize  # safetensors does not annotate it
    return {name: _array_from_info(info) for name, info in read(content)}


def _array_from_info(info: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    import ml_dtypes
    import numpy as np

    names = {**DTYPE_ALIASES, "bool": "bool"}
    letter = info["dtype"]
    name = names.get(letter.lower()) or f"{letter[0].lower()}{int(letter[1:]) // 8}"
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if letter == "BOOL" and max(info["data"], default=0) > 1:
        raise ValueError("a boolean that is neither 0 nor 1")
    return np.frombuffer(info["data"], dtype).reshape(info["shape"]).copy()
