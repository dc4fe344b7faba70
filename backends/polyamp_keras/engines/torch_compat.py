"""Private names of torch that the engine uses (torch from 2.7): one kernel for many tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

foreach_norm: Final[Callable[..., Any]] = torch._foreach_norm
"""`(tensors, order)` -> a list of the norms, scalars."""
foreach_divide: Final[Callable[..., Any]] = torch._foreach_div
"""`(tensors, scalar tensor)` -> a list of the quotients."""
