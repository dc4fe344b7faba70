"""A block in which dropout passes its input on. Called by `observer`; `drawn` is the block in which random numbers are
given.

A mode sees every function that drops, whoever calls it: modules, `torch.nn.functional`, attention and recurrent layers
with a rate of their own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn import functional

from polyamp.errors import UnsupportedError
from polyamp.parity.observing import Draws
from polyamp_torch.compat import constant_when_compiled
from polyamp_torch.observe.compiled import compiled_parts
from polyamp_torch.observe.drawn import Drawn
from polyamp_torch.observe.quiet import CHANNELS, DROPOUTS, RECURRENT, Function, Quiet
from polyamp_torch.precision.op_list import BACKWARD

_ATTENTION: Final = functional.multi_head_attention_forward
_RATES: Final[dict[Function, tuple[str, int]]] = {
    **{
        getattr(space, name + end): ("p", 1)
        for space in (torch, functional)
        for name in dict.fromkeys((*DROPOUTS, *CHANNELS, "native_dropout"))
        for end in ("", "_")
        if hasattr(space, name + end)
    },
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    _ATTENTION: ("dropout_p", list(inspect.signature(_ATTENTION).parameters).index("dropout_p")),
}
"""Function that drops -> its argument for the rate: name, and place."""


@contextlib.contextmanager
def still(model: Any, draws: Draws | None) -> Iterator[None]:
    """`Observer.still`.

    Raises:
        UnsupportedError: draws are given, and something is compiled, which would take the first ones for constants.
    """
    if draws is None:
        with Still():
            yield
        return
    if any(compiled_parts(model)):
        raise UnsupportedError(
            "draws: what torch.compile made takes its random numbers where it was compiled, so that none can be given "
            "to it. Leave dropout off (randomness='off'), or compare the model uncompiled."
        )
    with Drawn(draws):
        yield


@constant_when_compiled
def rate_of(function: Function) -> tuple[str, int] | None:
    """Where a function has its rate, or None for most."""
    return _RATES.get(function)


@constant_when_compiled
def _is_recurrent(function: Function) -> bool:
    return function in RECURRENT


class Still(Quiet):
    """Has every function that drops drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function passes here, and most go straight on."""
        kwargs = kwargs or {}
        rate = rate_of(func)
        if rate is not None:
            self.carried()
            name, place = rate
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        elif _is_recurrent(func):
            self.carried()
            args = (*args[:5], 0.0, *args[6:])  # of packed sequences too
        elif func in BACKWARD and not torch.compiler.is_compiling():
            return self.inside(func, types, args, kwargs)
        return func(*args, **kwargs)
