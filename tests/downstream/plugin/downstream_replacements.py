"""What polyamp replaces in a framework or a package, by name. Each counts how often the program used it."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

USES: Final[Counter[str]] = Counter()
"""Name of a class or function of polyamp -> how often the program made or called it."""


def _count_instances(cls: type, name: str) -> None:
    """Count the instances of a class in `USES`, subclasses' too."""
    original: Any = cls.__init__

    @functools.wraps(original)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        USES[name] += 1
        original(self, *args, **kwargs)

    cls.__init__ = counted  # type: ignore[misc]  # a wrapper of the same signature


def _replace_everywhere(old: Any, new: Any) -> None:
    """Bind `new` in every imported module that has `old` among its names, polyamp's own modules excepted."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(("polyamp", "downstream_")):
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def autocast() -> None:
    """`torch.autocast` and its older names, by `polyamp_torch.autocast`."""
    import polyamp_torch
    import torch

    _count_instances(polyamp_torch.autocast, "autocast")
    for module in (torch, torch.amp, torch.amp.autocast_mode):
        module.autocast = polyamp_torch.autocast  # type: ignore[attr-defined]  # put in its place

    def cuda_autocast(*args: Any, **kwargs: Any) -> Any:
        return polyamp_torch.autocast("cuda", *args, **kwargs)

    torch.cuda.amp.autocast = cuda_autocast  # type: ignore[assignment,misc]  # put in its place


def grad_scaler() -> None:
    """`torch.amp.GradScaler` and its older names, by `polyamp_torch.GradScaler`."""
    import polyamp_torch
    import torch

    _count_instances(polyamp_torch.GradScaler, "GradScaler")
    for module in (torch, torch.amp, torch.amp.grad_scaler, torch.cuda.amp):
        module.GradScaler = polyamp_torch.GradScaler  # type: ignore[attr-defined]  # put in its place


REPLACEMENTS: Final[dict[str, Callable[[], None]]] = {
    "torch.autocast": autocast,
    "torch.amp.GradScaler": grad_scaler,
}
"""What is replaced, as the page names it -> the function that replaces it."""
