"""Attention with dropout in a compiled step that computes in 16 bits.

The compiled step differentiates with `torch.func`, which runs `scaled_dot_product_attention` with dropout as a
composition (matmul, softmax, dropout, matmul). Autocast is on inside the composition, unlike in the eager kernel.
Forward and backward then disagree about dtypes, and torch fails. `AttentionCastMode` casts the inputs as autocast
would, and turns autocast off for the call.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyamp_torch.compat import TorchAutocast
from polyamp_torch.precision.op_list import FUNCTIONS_WITHOUT_DISPATCH

_ATTENTION_FUNCTION: Final = functional.scaled_dot_product_attention
_MULTI_HEAD_FUNCTION: Final = functional.multi_head_attention_forward
_DROPOUT_ARGUMENT: Final = 10
"""Position of its `dropout_p`."""


class AttentionCastMode(TorchFunctionMode):
    """Mode that casts the inputs of attention in place of autocast.

    Args:
        device_type: "cpu", "cuda", ...
        acting: False to observe only.

    Attributes:
        seen: whether attention was called under autocast, with dropout.
    """

    def __init__(self, device_type: str, *, acting: bool = True) -> None:
        super().__init__()
        self.device_type = device_type
        self.acting = acting
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of a torch function; most calls run unchanged."""
        kwargs = kwargs or {}
        if func is _ATTENTION_FUNCTION:
            return self._called(args, kwargs)
        if func is torch.Tensor.unflatten:  # it calls super(), which torch.compile cannot follow under a mode
            return torch.unflatten(*args, **kwargs)
        if func is _MULTI_HEAD_FUNCTION and self.acting:
            with self:
                return FUNCTIONS_WITHOUT_DISPATCH[_MULTI_HEAD_FUNCTION](*args, **kwargs)
        if func is _MULTI_HEAD_FUNCTION and kwargs.get(
            "dropout_p", args[_DROPOUT_ARGUMENT] if len(args) > _DROPOUT_ARGUMENT else 0.0
        ):
            self.seen = self.seen or torch.is_autocast_enabled(self.device_type)
        return func(*args, **kwargs)

    def _called(self, args: Any, kwargs: dict[str, Any]) -> Any:
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if not dropout or not torch.is_autocast_enabled(self.device_type):
            return _ATTENTION_FUNCTION(*args, **kwargs)
        if not self.acting:
            self.seen = True
            return _ATTENTION_FUNCTION(*args, **kwargs)
        dtype = torch.get_autocast_dtype(self.device_type)
        args = [_cast_like_autocast(value, dtype) for value in args]
        kwargs = {name: _cast_like_autocast(value, dtype) for name, value in kwargs.items()}
        with TorchAutocast(self.device_type, enabled=False):
            return _ATTENTION_FUNCTION(*args, **kwargs)


def _cast_like_autocast(value: Any, dtype: torch.dtype) -> Any:
    """Cast as autocast does: floating tensors except float64, including additive masks."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if floating else value
