"""Kernels over many gradients at once: their norm, which is also the finite test, and the factor that unscales them.

Called by the step and by `GradScaler`.
"""

from __future__ import annotations

import torch


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded once: exact for powers of two."""
    return scale.double().reciprocal().float()


def global_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all gradients as a float64 scalar, finite exactly when every float32 gradient is.

    The fast pass accumulates in float32. Where its squares leave float32's range it is taken again in float64; on the
    CPU that is decided by looking, elsewhere the float64 pass is the only one, so that nothing waits for the device.
    """
    if grads[0].device.type == "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if 1e-15 < norm.item() < 1e15:
            return norm.double()
    wide: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)))
    return wide
