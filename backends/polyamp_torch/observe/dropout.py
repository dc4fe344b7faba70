"""`disable_dropout`: a context manager that turns dropout off, or takes its random numbers from a given source.

A mode intercepts every dropout function, whoever calls it: modules, `torch.nn.functional`, attention and recurrent
layers with their own rate. `random_number_modes` supplies given random numbers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn import functional

from polyamp.errors import UnsupportedError
from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_torch.compat import assume_constant_result, is_in_backward
from polyamp_torch.observe.torch_only.compiled_module_detection import compiled_parts
from polyamp_torch.observe.torch_only.random_number_modes import (
    CHANNEL_DROPOUT_FUNCTIONS,
    DROPOUT_FUNCTIONS,
    RECURRENT_FUNCTIONS,
    DropoutMode,
    Function,
    SharedRandomMode,
)
from polyamp_torch.precision.op_list import BACKWARD_FUNCTIONS

_ATTENTION: Final = functional.multi_head_attention_forward
_RATE_ARGUMENTS: Final[dict[Function, tuple[str, int]]] = {
    **{
        getattr(space, name + end): ("p", 1)
        for space in (torch, functional)
        for name in dict.fromkeys((*DROPOUT_FUNCTIONS, *CHANNEL_DROPOUT_FUNCTIONS, "native_dropout"))
        for end in ("", "_")
        if hasattr(space, name + end)
    },
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    _ATTENTION: ("dropout_p", list(inspect.signature(_ATTENTION).parameters).index("dropout_p")),
}
"""Dropout function -> name and position of its rate argument."""
_ATTENTION_TRAINING: Final = list(inspect.signature(_ATTENTION).parameters).index("training")
"""Position of its argument that says whether it drops."""
_INTERCEPTED: Final = frozenset({*_RATE_ARGUMENTS, *RECURRENT_FUNCTIONS, *BACKWARD_FUNCTIONS})


@contextlib.contextmanager
def disable_dropout(model: Any, draws: UniformSource | None) -> Iterator[DropoutCount]:
    """Context manager that turns dropout off, or takes random numbers from `draws` (`Observer.disable_dropout`).

    Raises:
        UnsupportedError: draws are given and a part is compiled, which would treat the first draws as constants.
    """
    count, is_compiled = DropoutCount(), any(compiled_parts(model))
    if draws is None:
        if is_compiled:
            count.give_up()
        with NoDropoutMode(count):
            yield count
        return
    if is_compiled:
        raise UnsupportedError(
            "draws: what torch.compile made takes its random numbers where it was compiled, so that none can be given "
            "to it. Leave dropout off (randomness='off'), or compare the model uncompiled."
        )
    with SharedRandomMode(draws):
        yield count


@assume_constant_result
def dropout_rate_argument(function: Function) -> tuple[str, int] | None:
    """Return name and position of a function's rate argument, or None if it has none."""
    return _RATE_ARGUMENTS.get(function)


@assume_constant_result
def _is_recurrent(function: Function) -> bool:
    return function in RECURRENT_FUNCTIONS


class NoDropoutMode(DropoutMode):
    """Mode in which dropout functions drop nothing.

    Args:
        count: counts the calls that would have dropped something, in forward passes.
    """

    def __init__(self, count: DropoutCount | None = None) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a call of a torch function; most calls run unchanged."""
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in _INTERCEPTED:
            return func(*args, **kwargs)
        rate = dropout_rate_argument(func)
        if not torch.compiler.is_compiling() and self.count is not None and not is_in_backward():
            self.count.add(_dropout_calls(func, args, kwargs))
        if rate is not None:
            self.carry_into_recomputation()
            name, place = rate
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        elif _is_recurrent(func):
            self.carry_into_recomputation()
            # the rate is the only float; its position differs for packed sequences
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        elif func in BACKWARD_FUNCTIONS and not torch.compiler.is_compiling():
            return self.call_in_mode(func, types, args, kwargs)
        return func(*args, **kwargs)


def _dropout_calls(func: Function, args: Any, kwargs: Any) -> int:
    """Return how often a call drops something: once, between the layers of a recurrent stack, or never."""
    rate = _RATE_ARGUMENTS.get(func)
    if rate is not None:
        name, place = rate
        default = 0.0 if name == "dropout_p" else 0.5
        chance = args[place] if len(args) > place else kwargs.get(name, default)
        return int(float(chance) > 0.0 and _is_training(func, args, kwargs))
    if func not in RECURRENT_FUNCTIONS:
        return 0
    packed = not isinstance(args[3], bool)
    layers, chance, training = args[4 + packed : 7 + packed]
    return layers - 1 if training and chance > 0.0 else 0


def _is_training(func: Function, args: Any, kwargs: Any) -> bool:
    if func is functional.scaled_dot_product_attention:
        return True
    place = _ATTENTION_TRAINING if func is _ATTENTION else 2
    given = kwargs.get("training", kwargs.get("train", True))
    return bool(args[place] if len(args) > place else given)
