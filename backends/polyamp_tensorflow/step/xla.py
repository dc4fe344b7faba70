"""Whether something is compiled with XLA by itself: float16 on TensorFlow's CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final

from polyamp.rules.plan import Plan
from polyamp_tensorflow.arrays import raw

_WARNING: Final = (
    "float16 on TensorFlow's CPU is slow outside XLA, on some processors 300 times slower than float32, so polyamp "
    "compiles this with XLA (jit_compile=True). The first call takes seconds. Pass jit_compile=True or False to "
    "choose, or use bfloat16."
)
_warned: list[bool] = []


def needs_xla(plans: Iterable[Plan], parameters: Iterable[Any], *, stacklevel: int) -> bool:
    """True for float16 on a CPU; says so once per process.

    Args:
        plans: what the models compute in.
        parameters: their variables, whose device counts.
        stacklevel: of the warning, counted from the caller as in `warnings.warn`.
    """
    if not any("float16" in plan.narrow for plan in plans):
        return False
    if not any(raw(parameter).device.rpartition("device:")[2].startswith("CPU") for parameter in parameters):
        return False
    if not _warned:
        _warned.append(True)
        warnings.warn(_WARNING, UserWarning, stacklevel=stacklevel + 1)
    return True
