"""A user's own values in a checkpoint: what `save(extra=...)` accepts, as JSON text, and back (S22)."""

from __future__ import annotations

import json
from typing import Any, Final

from polyamp.errors import ArgumentError, describe_value

KEY: Final = "extra"
"""Metadata key of both forms."""
_ACCEPTED: Final = "None, bool, int, float, str, lists and dicts of these, and scalars of NumPy or a framework"


def encode_extra(extra: Any) -> dict[str, str]:
    """Return the metadata for a user's values; none without values.

    Raises:
        ArgumentError: names the first value that JSON cannot hold.
    """
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise ArgumentError(
            f"extra must be a dict of your own values, such as extra={{'best_val_loss': 1.5}}. "
            f"Received: extra={describe_value(extra)}."
        )
    return {KEY: json.dumps(_plain(extra, "extra"))}


def decode_extra(meta: dict[str, str]) -> dict[str, Any]:
    """Return the values that `encode_extra` put into the metadata; an empty dict without them."""
    found: dict[str, Any] = json.loads(meta.get(KEY, "{}"))
    return found


def _plain(value: Any, path: str) -> Any:
    """Return a value as JSON gives it back; `path` is how a user reaches it."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentError(f"the keys of {path} must be strings. Received: {key!r}. Write str(key).")
        return {str(key): _plain(each, f"{path}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, f"{path}[{index}]") for index, each in enumerate(value)]
    if getattr(value, "shape", None) == () and hasattr(value, "__array__"):
        value = value.item() if hasattr(value, "item") else value.numpy().item()  # TensorFlow's tensors have no item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ArgumentError(f"{path} must be one of: {_ACCEPTED}. Received: {describe_value(value)}. {_advice(value)}")


def _advice(value: Any) -> str:
    if isinstance(value, tuple | set | frozenset):
        return "Write list(...): it comes back as a list."
    if hasattr(value, "shape"):
        return "Write value.tolist(), or keep a large array in a file of its own."
    return "Store what it is made from, such as its name or its settings."
