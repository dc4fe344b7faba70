"""Configuration of a Keras optimizer, by name, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import rate_variable
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer


def optimizer_metadata(optimizer: Any) -> dict[str, Any]:
    """Return the configuration of a native optimizer as plain values; empty if it has no `get_config`."""
    try:
        config = dict(optimizer.get_config())
    except NotImplementedError:  # a custom schedule without get_config
        return {}
    config.pop("name", None)  # numbered per process
    plain: dict[str, Any] = _plain_value(config)
    return plain


def optimizer_setting(optimizer: Any, name: str) -> str | None:
    """Return the setting whose current value is in an exported array: a learning rate that is a variable."""
    if isinstance(optimizer, SpecOptimizer):
        return "optimizer.learning_rate" if name == "optimizer/learning_rate" else None
    rate = rate_variable(optimizer)
    for number, variable in enumerate(optimizer.variables):
        if variable is rate and name == f"optimizer/{number:04d}":
            return "optimizer.learning_rate"
    return None


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, float) and value == float(np.float32(value)):
        return float(
            str(np.float32(value))
        )  # Keras stores the learning rate in float32: 0.001, not 0.0010000000474974513
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(native_variable(value))
        return _plain_value(array.item()) if array.size == 1 else f"{array.dtype}{list(array.shape)}"
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
