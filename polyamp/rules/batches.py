"""What becomes of a batch on its way into a step: host arrays of float64 (S26), and batches without a row (S24).

Each backend calls these from the walk over the batch that it makes anyway. They know no framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyamp.errors import BatchError


def host_array(array: Any, parameters: str) -> Any:
    """A NumPy array or scalar as it goes into a step: float64 as float32, unless the parameters are float64 (S26).

    NumPy makes float64 of whatever is not told otherwise, and frameworks compute in float32. Arrays of a framework are
    not for this function: what was made float64 there stays (S2).

    Args:
        array: NumPy array or scalar.
        parameters: the policy's `param` dtype.

    >>> import numpy as np
    >>> host_array(np.zeros(2), "float32").dtype, host_array(np.zeros(2), "float64").dtype
    (dtype('float32'), dtype('float64'))
    """
    return array.astype("float32") if parameters != "float64" and array.dtype == "float64" else array


def check_has_rows(lengths: Iterable[int | None]) -> None:
    """Refuse a batch none of whose arrays has a row: the mean over it would be NaN, or nothing.

    An array of length 0 beside others is the program's own business, such as the boxes of an image without any.

    Args:
        lengths: of every array of the batch that has an axis, that along axis 0; None where it is not known.

    Raises:
        BatchError: there are arrays, and all are empty.
    """
    found = list(lengths)
    if found and not any(length != 0 for length in found):
        raise BatchError(
            f"batch is empty: of its {len(found)} array{'s' if len(found) > 1 else ''} none has a row along axis 0. "
            "Leave the step out for such a batch, or have the loader drop it (drop_last=True, drop_remainder=True)."
        )
