"""Gradients of an optimizer as real, dense views for the scaler's kernels, which unscale and check them in place.

The kernel is that of torch's own scaler, so the numbers are equal to torch's. This module adds complex gradients,
uncoalesced sparse gradients, and the check of the *results* of the multiplication.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import check_and_unscale_, coalesced_values, group_by_device_and_dtype
from polyamp_torch.own_loop.torch_only.sharded_gradients import dtensor_class, local_gradient, reduce_partial_gradients
from polyamp_torch.step.grad_stats import global_norm_and_finite

DeviceFlags = dict[torch.device, torch.Tensor]
"""Device -> float32 scalar, 1 if a gradient is not finite, else 0: torch's `found_inf_per_device`."""
GradientBuckets = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Gradients by device and dtype, as the multi-tensor kernels require."""


def optimizer_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return every parameter of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradients(optimizer: Any) -> bool:
    """Return whether any parameter of an optimizer has a gradient on this rank."""
    return any(p.grad is not None for p in optimizer_parameters(optimizer))


def bucket_gradients(parameters: list[torch.Tensor]) -> GradientBuckets:
    """Return the existing gradients by device and dtype, as real strided tensors that share memory with them.

    A sparse gradient is coalesced first, and `.grad` replaced by the result: the optimizer sums duplicate indices later
    anyway, and only the sum shows whether it is finite. The grouping runs in C++: a Python loop takes most of the time
    of torch's scaler. Of gradients that are sharded over ranks, the local shards are returned.
    """
    if kind := dtensor_class():
        reduce_partial_gradients(parameters)
    grads = [p.grad for p in parameters]
    there: list[torch.Tensor | None] = [grad for grad in grads if grad is not None]
    if not there:
        return {}
    if any([grad.layout is not torch.strided for grad in there if grad is not None]):  # noqa: C419  # twice as fast
        there = [_strided_gradient(p) for p in parameters if p.grad is not None]
    if kind:
        there = [local_gradient(grad) if isinstance(grad, kind) else grad for grad in there]
    kinds: GradientBuckets = {}
    for (device, dtype), (lists, _) in group_by_device_and_dtype([there]).items():
        group = cast("list[torch.Tensor]", lists[0])
        if dtype.is_complex:
            group = [torch.view_as_real(grad.conj() if grad.is_conj() else grad) for grad in group]
        kinds.setdefault((device, group[0].dtype), []).extend(group)
    return kinds


def _strided_gradient(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout is torch.strided:
        return grad
    if grad.layout is not torch.sparse_coo:
        return grad.values()
    if not grad.is_coalesced():
        grad = parameter.grad = grad.coalesce()
    return coalesced_values(grad)


class Float16GradientError(UnsupportedError, ValueError):
    """Gradients in float16 cannot be unscaled. Also a ValueError, as in torch."""


def refuse_float16(grads: GradientBuckets) -> None:
    """Reject gradients in float16. The message begins with torch's text, which users search for."""
    if any(dtype is torch.float16 for _, dtype in grads):
        raise Float16GradientError(
            "Attempting to unscale FP16 gradients. Gradients must not be float16: they overflow and vanish before they "
            "can be unscaled. Keep the parameters in float32, and let autocast compute in float16."
        )


def unscale_gradients(
    grads: GradientBuckets, inverse: torch.Tensor, found: torch.Tensor, *, grows: bool
) -> DeviceFlags:
    """Multiply gradients in place by `inverse` and check that they are finite.

    Args:
        grads: from `bucket_gradients`.
        inverse: 1 / scale, float32 scalar.
        found: float32 scalar, initial value of the flags.
        grows: whether `inverse` may be above 1. The kernel checks its inputs; only with `grows` can a finite gradient
            become infinite, and a second pass checks the results (S10).

    Returns:
        Flags of the devices with gradients.
    """
    flags: DeviceFlags = {}
    ones: DeviceFlags = {}
    with torch.no_grad():
        for (device, _), group in grads.items():
            if device not in flags:
                flags[device] = found.to(device, non_blocking=True, copy=True)
            factor = inverse.to(device, non_blocking=True)
            check_and_unscale_(group, flags[device], factor)
            if grows:
                one = ones.setdefault(device, torch.ones_like(factor))
                check_and_unscale_(group, flags[device], one)
    return flags


def overflow_flag(grads: GradientBuckets, scale: torch.Tensor, *, grows: bool) -> torch.Tensor:
    """Return 1 if a gradient divided by `scale` is not finite, else 0: a float32 scalar on the scale's device.

    The gradients keep their values. Of sharded gradients, the local shards count.
    """
    zero = torch.zeros_like(scale, dtype=torch.float32)
    if not grows:
        return max_flag(list(unscale_gradients(grads, torch.ones_like(zero), zero, grows=False).values()), zero)
    filled = [grad.detach() for group in grads.values() for grad in group if grad.numel()]
    if not filled:
        return zero
    return (~global_norm_and_finite(filled, scale).finite).to(scale.device, torch.float32, non_blocking=True)


def max_flag(flags: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the flags' maximum on the device of `like`; `like` itself if there are no flags."""
    if not flags:
        return like
    moved = [flag.to(like.device, non_blocking=True) for flag in flags]
    return moved[0] if len(moved) == 1 else torch.stack([flag.reshape(()) for flag in moved]).amax()
