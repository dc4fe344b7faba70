"""A block in which dropout passes its input on. Called by `observer`.

A `TorchFunctionMode` sees every function that drops, whoever calls it: modules, `torch.nn.functional`, attention and
recurrent layers with a rate of their own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyamp.errors import UnsupportedError
from polyamp.parity.observing import Draws

Function = Callable[..., Any]


@contextlib.contextmanager
def still(model: Any, draws: Draws | None) -> Iterator[None]:
    """`Observer.still`.

    Raises:
        UnsupportedError: draws are given.
    """
    if draws is not None:
        raise UnsupportedError("draws: shared masks are not there yet for torch; leave randomness='off'.")
    with Still():
        yield


_RATES: Final[dict[Function, tuple[str, int]]] = {
    **{
        function: ("p", 1)
        for name in ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
        for function in (getattr(functional, name),)
    },
    **{
        function: ("p", 1)
        for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "native_dropout")
        for function in (getattr(torch, name), getattr(torch, f"{name}_", None))
        if function is not None
    },
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: (
        "dropout_p",
        list(inspect.signature(functional.multi_head_attention_forward).parameters).index("dropout_p"),
    ),
}
"""Function that drops -> its argument for the rate: name, and place."""
_RECURRENT: Final = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class Still(TorchFunctionMode):
    """Has every function that drops drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function passes here, and most go straight on."""
        kwargs = kwargs or {}
        rate = _RATES.get(func)
        if rate is not None:
            name, place = rate
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        elif func in _RECURRENT:
            args = (*args[:5], 0.0, *args[6:])
        return func(*args, **kwargs)
