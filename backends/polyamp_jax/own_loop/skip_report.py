"""Names of the gradients that are not finite, for the error about a stuck loss scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyamp_jax.arrays import named_leaves, to_numpy


def non_finite_names(grads: Any) -> list[str]:
    """Return the paths of the gradients with elements that are not finite; reads them on the host."""
    return [name for name, grad in named_leaves(grads).items() if not np.isfinite(to_numpy(grad)).all()]
