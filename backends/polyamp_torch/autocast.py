"""The autocast region of a policy, for torch code of any kind (S3). Modules under a policy are in `binding`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyamp.errors import UnsupportedError
from polyamp.policy import Policy
from polyamp.trees import leaves
from polyamp_torch.arrays import DTYPES, cast_tree


@contextlib.contextmanager
def autocast(policy: Policy, device_type: str = "cpu") -> Iterator[None]:
    """A region in which operations pick their dtype by the policy's compute dtype.

    It is `torch.autocast` where the policy computes in 16 bits under wider parameters, and a region with autocast off
    otherwise. Open it for one forward pass, not around optimizer steps: torch caches the cast weights until the
    outermost region ends.

    Example:
        >>> import torch, polyamp
        >>> with autocast(polyamp.Policy("mixed_bfloat16")):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    with matmul_precision(policy.float32_matmul), region(policy.compute, policy, device_type):
        yield


def region(dtype: str, policy: Policy, device_type: str) -> Any:
    """`torch.autocast` in `dtype`, or with autocast off where the policy does not mix dtypes by operation."""
    mixed = dtype in ("float16", "bfloat16") and policy.param != dtype and (policy.mode or "autocast") == "autocast"
    if not mixed:
        return torch.autocast(device_type, enabled=False)
    # Overrides nest dtypes on one weight, which torch's weight cache (keyed by the tensor alone) would confuse.
    return torch.autocast(device_type, dtype=DTYPES[dtype], cache_enabled=not policy.overrides)


@contextlib.contextmanager
def matmul_precision(wanted: str | None) -> Iterator[None]:
    """torch's process-wide float32 matmul precision, set for the time of a block; None leaves it alone."""
    if wanted is None:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_under(target: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A plain function as one that runs under the policy, on the device of its first tensor argument."""
    if policy.overrides:
        raise UnsupportedError("overrides name module paths; policy.autocast needs a module for them, not a function.")

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next((x.device.type for _, x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)), "cpu")
        with autocast(policy, device):
            if policy.mode == "cast":
                args, kwargs = cast_tree((args, kwargs), policy.compute, float64=policy.casts_float64)
            result = target(*args, **kwargs)
        return cast_tree(result, policy.output, float64=policy.casts_float64)

    return call
