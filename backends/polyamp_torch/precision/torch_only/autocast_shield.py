"""`shield`: a context manager that turns enclosing autocast regions off (S3).

A backward pass runs under the region that is open where it begins, and so do the products in some optimizers. A step
inside a user's `torch.autocast` would round its gradients, or lose them.
"""

from __future__ import annotations

import contextlib

import torch

from polyamp_torch.compat import NULL_CONTEXT
from polyamp_torch.precision.torch_only.autocast_regions import AutocastRegion, RegionSettings
from polyamp_torch.precision.torch_only.float32_islands import DEVICE_TYPES


def shield() -> contextlib.AbstractContextManager[None]:
    """Context manager that turns autocast off on every device type, until a region is opened inside it.

    It costs nothing if no region is open.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), shield():
        ...     (x @ x).dtype
        torch.float32
    """
    region: contextlib.AbstractContextManager[None] = NULL_CONTEXT
    for kind in filter(torch.is_autocast_enabled, DEVICE_TYPES):
        off = RegionSettings(kind, torch.get_autocast_dtype(kind), enabled=False, acting=False)
        region = AutocastRegion(off, region)
    return region
