"""`DropoutMode`: base mode for intercepting dropout, active in recomputation too; and torch's dropout functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from polyamp_torch.compat import NULL_CONTEXT, open_modes
from polyamp_torch.precision.op_list import copy_without_dispatch
from polyamp_torch.precision.torch_only import activation_checkpointing

Function = Callable[..., Any]

DROPOUT_FUNCTIONS: Final = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
"""The functions of `torch`, each with an in-place form, that implement all of torch's dropout."""
CHANNEL_DROPOUT_FUNCTIONS: Final = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")
"""The functions that drop whole channels."""
RECURRENT_FUNCTIONS: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class DropoutMode(TorchFunctionMode):
    """Base `TorchFunctionMode` that stays active in the recomputation of checkpoints, and inside a backward pass."""

    def carry_into_recomputation(self) -> None:
        """Keep the mode active when a checkpoint recomputes the current code."""
        if not torch.compiler.is_compiling():
            activation_checkpointing.carry_into_checkpoint(("dropout", id(self)), self._reenter, everywhere=True)

    def _reenter(self) -> contextlib.AbstractContextManager[Any]:
        return NULL_CONTEXT if any(mode is self for mode in open_modes()) else self

    def call_in_mode(self, func: Function, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one of torch's Python functions so that the mode sees its inner calls."""
        if not all(kind in (torch.Tensor, nn.Parameter) for kind in types):  # other subclasses may override
            return func(*args, **kwargs)
        body = copy_without_dispatch(func)
        with self:
            return body(*args, **kwargs)
