"""An optimizer's gradients as the scaler's kernels want them: real and dense views, unscaled and tested in place.

Called by `GradScaler`. The kernel is the one behind torch's own scaler, so that the numbers are torch's; what it leaves
out is done here: complex and uncoalesced sparse gradients, and the test of what comes *out* of the multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from polyamp_torch.compat import by_device_and_dtype, check_and_unscale_, values_of_coalesced
from polyamp_torch.own_loop.shards import here, spread, summed
from polyamp_torch.step.measure import measured

Flags = dict[torch.device, torch.Tensor]
"""Per device a float32 scalar, 1 where a gradient is not finite and 0 elsewhere: torch's `found_inf_per_device`."""
Kinds = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Gradients as the multi-tensor kernels want them: by device and dtype."""


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Every parameter of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(parameters: list[torch.Tensor]) -> Kinds:
    """The gradients that are there by device and dtype, as real strided tensors that share memory with them.

    A sparse gradient is coalesced first, and `.grad` replaced by the result: duplicate indices are summed by the
    optimizer later anyway, and only their sum shows whether it is finite. The grouping is done in C++: a loop in Python
    is most of the time that torch's scaler takes. Of what is sharded over ranks it is the part that lies here.
    """
    if kind := spread():
        summed(parameters)
    grads = [p.grad for p in parameters]
    there: list[torch.Tensor | None] = [grad for grad in grads if grad is not None]
    if not there:
        return {}
    if any([grad.layout is not torch.strided for grad in there if grad is not None]):  # noqa: C419  # twice as fast
        there = [_values(p) for p in parameters if p.grad is not None]
    if kind:
        there = [here(grad) if isinstance(grad, kind) else grad for grad in there]
    kinds: Kinds = {}
    for (device, dtype), (lists, _) in by_device_and_dtype([there]).items():
        group = cast("list[torch.Tensor]", lists[0])
        if dtype.is_complex:
            group = [torch.view_as_real(grad.conj() if grad.is_conj() else grad) for grad in group]
        kinds.setdefault((device, group[0].dtype), []).extend(group)
    return kinds


def _values(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout is torch.strided:
        return grad
    if grad.layout is not torch.sparse_coo:
        return grad.values()
    if not grad.is_coalesced():
        grad = parameter.grad = grad.coalesce()
    return values_of_coalesced(grad)


def unscale_(grads: Kinds, inverse: torch.Tensor, found: torch.Tensor, *, grows: bool) -> Flags:
    """Multiply gradients in place by `inverse` and test them.

    Args:
        grads: from `gradients_of`.
        inverse: 1 / scale, float32 scalar.
        found: float32 scalar that the flags begin with.
        grows: whether `inverse` may be above 1. The kernel tests what it reads; only then can a finite gradient become
            infinite, and what was written is tested by a second pass (S10).

    Returns:
        Flags of the devices that hold gradients.
    """
    flags: Flags = {}
    ones: Flags = {}
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


def overflow(grads: Kinds, scale: torch.Tensor, *, grows: bool) -> torch.Tensor:
    """1 if a gradient is not finite once divided by `scale`, else 0: a float32 scalar on the scale's device.

    The gradients keep their values. Of what is sharded, the parts that lie here count.
    """
    zero = torch.zeros_like(scale, dtype=torch.float32)
    if not grows:
        return together(list(unscale_(grads, torch.ones_like(zero), zero, grows=False).values()), zero)
    filled = [grad.detach() for group in grads.values() for grad in group if grad.numel()]
    if not filled:
        return zero
    return (~measured(filled, scale).finite).to(scale.device, torch.float32, non_blocking=True)


def together(flags: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The flags' maximum on the device of `like`; `like` itself where there is none."""
    if not flags:
        return like
    moved = [flag.to(like.device, non_blocking=True) for flag in flags]
    return moved[0] if len(moved) == 1 else torch.stack([flag.reshape(()) for flag in moved]).amax()


def parameters_behind(result: torch.Tensor) -> Iterator[torch.nn.Parameter]:
    """The `nn.Parameter`s that a backward pass from `result` reaches, found by walking its graph."""
    todo: list[Any] = [result.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            yield leaf
        todo.extend(following for following, _ in node.next_functions)
