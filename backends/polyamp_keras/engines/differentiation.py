"""`Differentiation`, the result of a forward and backward pass that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

HostArray = np.ndarray[Any, Any]
ObservedCall = Callable[[], tuple[Sequence[Any], Mapping[Any, Any]]]
"""`() -> (outputs, observed)`: the outputs of a model, floating ones in float32, and tensors of the pass by any key."""


class Differentiation(NamedTuple):
    """Result of a forward and backward pass, on the host.

    Attributes:
        outputs: the outputs.
        gradients: the gradient by each variable, float32.
        observed: what the call observed, by the same keys in the same order.
    """

    outputs: Sequence[HostArray]
    gradients: Sequence[HostArray]
    observed: Mapping[Any, HostArray]
