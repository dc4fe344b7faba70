"""Choice of XLA by default: for float16 on TensorFlow's CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_tensorflow.arrays import native_variable

_FLOAT16_WARNING: Final = (
    "float16 on TensorFlow's CPU is slow outside XLA, on some processors 300 times slower than float32, so polyamp "
    "compiles this with XLA (jit_compile=True). The first call takes seconds. Pass jit_compile=True or False to "
    "choose, or use bfloat16."
)
_float16_warned: list[bool] = []


def needs_xla(plans: Iterable[ResolvedPolicy], parameters: Iterable[Any], *, stacklevel: int) -> bool:
    """Return whether the models compute in float16 on a CPU; if so, warn once per process.

    Args:
        plans: the models' resolved policies.
        parameters: their variables, which determine the device.
        stacklevel: stack level of the warning, counted from the caller as in `warnings.warn`.
    """
    if not any("float16" in plan.narrow for plan in plans):
        return False
    if not any(
        native_variable(parameter).device.rpartition("device:")[2].startswith("CPU") for parameter in parameters
    ):
        return False
    if not _float16_warned:
        _float16_warned.append(True)
        warnings.warn(_FLOAT16_WARNING, UserWarning, stacklevel=stacklevel + 1)
    return True
