"""`shield`: a block that the autocast regions around it do not reach (S3). Called by the step and `GradScaler`.

A backward pass runs under the region that is open where it begins, and so do the products in some optimizers: a step
inside somebody's `torch.autocast` would round its gradients, or lose them.
"""

from __future__ import annotations

import contextlib

import torch

from polyamp_torch.compat import NOTHING
from polyamp_torch.precision.islands import DEVICE_TYPES
from polyamp_torch.precision.regions import Block, Region, Setting


def shield() -> contextlib.AbstractContextManager[None]:
    """A block in which autocast is off on every device type, until a region is opened inside it.

    Free where no region is open.

    Example:
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), shield():
        ...     (x @ x).dtype
        torch.float32
    """
    return Shield() if any(map(torch.is_autocast_enabled, DEVICE_TYPES)) else NOTHING


class Shield(Block):
    """The block itself: a region with autocast off for each device type that has it on."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def open(self) -> None:
        for kind in filter(torch.is_autocast_enabled, DEVICE_TYPES):
            off = Setting(kind, torch.get_autocast_dtype(kind), enabled=False, acting=False)
            region = Region(off, NOTHING)
            region.frame, region.instruction = self.frame, self.instruction  # `repair` closes it by them
            self._regions.append(region)
            region.open()

    def close(self, *, interrupted: bool) -> None:
        for region in reversed(self._regions):
            region.close(interrupted=interrupted)
        self.frame = None
