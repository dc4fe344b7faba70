"""What a checkpoint says of a Keras optimizer: its configuration by name. Called by the backend and the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import rate_variable
from polyamp_tensorflow.step.optimizers import SpecOptimizer


def described(optimizer: Any) -> dict[str, Any]:
    """The configuration of a native optimizer as plain values; empty if it cannot say."""
    try:
        config = dict(optimizer.get_config())
    except NotImplementedError:  # a schedule of the user's own without get_config
        return {}
    config.pop("name", None)  # counts what else the process has built
    plain: dict[str, Any] = _plain(config)
    return plain


def setting_of(optimizer: Any, name: str) -> str | None:
    """The setting whose present value an exported array holds: a learning rate that is a variable."""
    if isinstance(optimizer, SpecOptimizer):
        return "optimizer.learning_rate" if name == "optimizer/learning_rate" else None
    rate = rate_variable(optimizer)
    for number, variable in enumerate(optimizer.variables):
        if variable is rate and name == f"optimizer/{number:04d}":
            return "optimizer.learning_rate"
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value == float(np.float32(value)):
        return float(
            str(np.float32(value))
        )  # Keras keeps the learning rate in float32: 0.001, not 0.0010000000474974513
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(raw(value))
        return _plain(array.item()) if array.size == 1 else f"{array.dtype}{list(array.shape)}"
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
