"""Bytes of checkpoints: arrays of a safetensors file, and digests that lie in the text that they are of.

Called by `checkpoint` for the one file, by `sharded` for the manifest, by `parts` for a folder's data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

BLANK: Final = "polyamp-digest".ljust(64, "-")
"""Stands in the place of a digest while the digest is computed; as long as one."""
MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What parsing damaged bytes can raise, beside safetensors' own error."""


def digest(content: bytes, held: str) -> str:
    """SHA-256 over bytes with the digest field, which now holds `held`, blanked."""
    start = content.find(held.encode())
    view = memoryview(content)
    found = hashlib.sha256(view[:start])
    found.update(BLANK.encode())
    found.update(view[start + len(held) :])
    return found.hexdigest()


def without_complex128(arrays: Mapping[str, np.ndarray[Any, Any]]) -> tuple[dict[str, np.ndarray[Any, Any]], list[str]]:
    """Contiguous arrays as safetensors hold them, which have complex64 and no complex128: such an array becomes float64
    with a last axis of (real, imaginary). And the names of these."""
    import numpy as np

    names = [name for name, each in arrays.items() if each.dtype == np.complex128]
    pairs = {name: arrays[name][..., None].view(np.float64) for name in names}
    return {**arrays, **pairs}, names


def with_complex128(
    arrays: Mapping[str, np.ndarray[Any, Any]], names: Sequence[str]
) -> dict[str, np.ndarray[Any, Any]]:
    """What `without_complex128` was given."""
    import numpy as np

    return {**arrays, **{name: arrays[name].view(np.complex128)[..., 0] for name in names}}


def array(info: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """A tensor as `safetensors.deserialize` gives it, in memory of its own."""
    import ml_dtypes
    import numpy as np

    names = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    letter = info["dtype"]
    dtype = np.dtype(names[letter] if letter in names else f"{letter[0].lower()}{int(letter[1:]) // 8}")
    if letter == "BOOL" and max(info["data"], default=0) > 1:
        raise ValueError("a boolean that is neither 0 nor 1")
    return np.frombuffer(info["data"], dtype).reshape(info["shape"]).copy()
