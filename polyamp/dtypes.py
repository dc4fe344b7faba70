"""The dtype table: every spelling of a floating dtype that polyamp understands, mapped to one canonical name.

Called by `Policy`, the dialects and the backends. No framework is imported: a framework's own dtype object
is recognised by its name.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp.errors import PolicyError, did_you_mean

ALIASES: Final[dict[str, str]] = {
    "float16": "float16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "f32": "float32",
    "fp32": "float32",
    "single": "float32",
    "full": "float32",
    "float64": "float64",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
}
"""Spelling -> canonical name."""

BYTES: Final[dict[str, int]] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Canonical name -> bytes per element."""


def canonical(dtype: Any, *, argument: str) -> str:
    """The canonical name of a floating dtype given by name or as a framework's dtype object.

    Args:
        dtype: a name ("bf16"), or any object whose name ends in one (`torch.bfloat16`, `jnp.float16`, `tf.float32`).
        argument: how the caller calls it; used in the message.

    Raises:
        PolicyError: nothing in the table matches.

    >>> canonical("bf16", argument="compute")
    'bfloat16'
    """
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    found = ALIASES.get(name)
    if found is None:
        raise PolicyError(
            f"{argument} must be one of {', '.join(sorted(set(ALIASES.values())))} (or an alias such as 'bf16'). "
            f"Received: {argument}={dtype!r}.{did_you_mean(name, ALIASES)}"
        )
    return found


def name_of(dtype: Any) -> str:
    """The name of a framework's dtype object: "bfloat16" of `torch.bfloat16`; of anything else some text."""
    for attribute in ("name", "__name__"):
        name = getattr(dtype, attribute, None)
        if isinstance(name, str):
            return name
    return str(dtype).rpartition(".")[2]
