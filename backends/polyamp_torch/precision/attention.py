"""Attention with dropout in a compiled step that computes in 16 bits.

`torch.func`, by which the compiled step differentiates, runs `scaled_dot_product_attention` with dropout through its
plain composition (matmul, softmax, dropout, matmul), and inside it autocast is on again, which it is not in the eager
kernel: forward and backward then disagree about dtypes, and torch fails. `Attention` casts the inputs by itself, as
autocast would, and turns autocast off for the call. Called by `compiled` and `compile_trial`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyamp_torch.compat import PlainAutocast
from polyamp_torch.precision.op_list import ENTERED

_CALLED: Final = functional.scaled_dot_product_attention
_AROUND: Final = functional.multi_head_attention_forward
_DROPOUT: Final = 10
"""Position of its `dropout_p`."""


class Attention(TorchFunctionMode):
    """A block in which attention does the casting of autocast by itself.

    Args:
        device_type: "cpu", "cuda", ...
        acting: False to look on only.

    Attributes:
        seen: whether attention was called under autocast, with dropout.
    """

    def __init__(self, device_type: str, *, acting: bool = True) -> None:
        super().__init__()
        self.device_type = device_type
        self.acting = acting
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function passes here, and most go straight on."""
        kwargs = kwargs or {}
        if func is _CALLED:
            return self._called(args, kwargs)
        if func is torch.Tensor.unflatten:  # it calls super(), which torch.compile cannot follow under a mode
            return torch.unflatten(*args, **kwargs)
        if func is _AROUND and self.acting:
            with self:
                return ENTERED[_AROUND](*args, **kwargs)
        if func is _AROUND and kwargs.get("dropout_p", args[_DROPOUT] if len(args) > _DROPOUT else 0.0):
            self.seen = self.seen or torch.is_autocast_enabled(self.device_type)
        return func(*args, **kwargs)

    def _called(self, args: Any, kwargs: dict[str, Any]) -> Any:
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if not dropout or not torch.is_autocast_enabled(self.device_type):
            return _CALLED(*args, **kwargs)
        if not self.acting:
            self.seen = True
            return _CALLED(*args, **kwargs)
        dtype = torch.get_autocast_dtype(self.device_type)
        args = [_cast(value, dtype) for value in args]
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        with PlainAutocast(self.device_type, enabled=False):
            return _CALLED(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """As autocast casts: floating tensors other than float64, masks of numbers among them."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if floating else value
