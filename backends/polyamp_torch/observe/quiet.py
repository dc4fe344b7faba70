"""`Quiet`: what `still` and `drawn` share: a mode that is on in recomputation too, and which functions drop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from polyamp_torch.compat import NOTHING, open_modes
from polyamp_torch.precision import recomputation
from polyamp_torch.precision.op_list import without_dispatch

Function = Callable[..., Any]

DROPOUTS: Final = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
"""The functions of `torch`, each with an in-place form, that everything of torch's that drops ends in."""
CHANNELS: Final = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_alpha_dropout")
"""Those that drop whole channels."""
RECURRENT: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class Quiet(TorchFunctionMode):
    """A mode that is on in what a checkpoint runs again, and inside of a backward pass."""

    def carried(self) -> None:
        """Be there when what runs now runs again."""
        if not torch.compiler.is_compiling():
            recomputation.carry(("quiet", id(self)), self._again, everywhere=True)

    def _again(self) -> contextlib.AbstractContextManager[Any]:
        return NOTHING if any(mode is self for mode in open_modes()) else self

    def inside(self, func: Function, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a Python function of torch's gives, whose inner calls are to be seen."""
        if not all(kind in (torch.Tensor, nn.Parameter) for kind in types):  # other subclasses have their own say
            return func(*args, **kwargs)
        body = without_dispatch(func)
        with self:
            return body(*args, **kwargs)
