"""Dropout and noise of Keras where it runs on torch or JAX: turned off, or of given random numbers.

All dropout of Keras there comes from one function of its backend. What it shares with TensorFlow, where random numbers
have other sources, stands here too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import keras
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_keras.compat import layer_classes, random_module
from polyamp_keras.interrupts import EnsureUndo
from polyamp_keras.models.layers import list_layers

NOISE_LAYERS: Final = layer_classes("GaussianNoise GaussianDropout AlphaDropout")
"""Layers that add or multiply noise."""
_OTHER_DRAWS: Final = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "gamma", "beta", "binomial", "shuffle"),
)
"""Functions of Keras whose numbers are not those of another framework."""


def disable_dropout(model: Any, draws: UniformSource | None) -> contextlib.AbstractContextManager[DropoutCount]:
    """Context manager that turns dropout off, or takes its random numbers from `draws` (`Observer.disable_dropout`).

    Raises:
        UnsupportedError: in the block, with draws, for random numbers that are no dropout.
    """
    return replace_draws(model, functools.partial(_stand_ins, model, draws))


@contextlib.contextmanager
def replace_draws(
    model: Any, stand_ins: Callable[[DropoutCount], Iterable[tuple[Any, str, Callable[..., Any]]]]
) -> Iterator[DropoutCount]:
    """Context manager with stand-ins for what draws random numbers in a model.

    Args:
        model: the model; a count of the dropout of a recurrent layer is not known.
        stand_ins: yields (object, attribute name, replacement), given the count that the block yields.
    """
    count = DropoutCount()
    if any(has_recurrent_dropout(part.layer) for part in list_layers(model)):
        count.give_up()  # on TensorFlow Keras draws the masks of recurrent layers outside of training too
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in stand_ins(count):
            undo = AttributeBackup(target, name)
            stack.enter_context(EnsureUndo(undo.restore))
            vars(target)[name] = stand_in
        yield count


def _stand_ins(
    model: Any, draws: UniformSource | None, count: DropoutCount
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield (object, attribute name, replacement) for the block."""
    module = random_module()
    if draws is not None:
        yield module, "dropout", _shared_dropout(draws)
        for name in _OTHER_DRAWS:
            if hasattr(module, name):
                yield module, name, _unsupported_draw(name)
        return

    def identity(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        count.add(rate > 0)
        return inputs

    yield module, "dropout", identity
    for part in list_layers(model):
        if isinstance(part.layer, NOISE_LAYERS):
            yield part.layer, "call", identity_call(part.layer.call, count.add)


def _shared_dropout(draws: UniformSource) -> Callable[..., Any]:
    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        if rate == 0.0:
            return inputs
        shape = tuple(inputs.shape) if noise_shape is None else noise_shape
        whole = tuple(length if own is None else own for length, own in zip(inputs.shape, shape, strict=True))
        keep = keras.ops.convert_to_tensor(np.asarray(draws(whole), np.float32) >= np.float32(rate))
        scaled = inputs * keras.ops.cast(1 / (1 - rate), inputs.dtype)
        return keras.ops.where(keep, scaled, keras.ops.zeros_like(inputs))

    return dropout


def _unsupported_draw(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"the random numbers of keras.random.{name} cannot be made of numbers that another framework draws too. "
            "Compare with randomness='off'."
        )

    return refuse


class AttributeBackup:
    """Attribute of an object, recorded to be restored."""

    def __init__(self, target: Any, name: str) -> None:
        self._target, self._name = target, name
        self._had = name in vars(target)
        self._value = vars(target).get(name)

    def restore(self) -> None:
        """Restore the attribute; a second call has no further effect."""
        if self._had:
            vars(self._target)[self._name] = self._value
        else:
            vars(self._target).pop(self._name, None)


def has_recurrent_dropout(layer: Any) -> bool:
    """Return whether a recurrent layer or cell drops something; Keras draws its masks outside of training too."""
    return bool(getattr(layer, "recurrent_dropout", 0.0) or (hasattr(layer, "recurrent_dropout") and layer.dropout))


def identity_call(call: Callable[..., Any], add: Callable[[bool], None]) -> Callable[..., Any]:
    """Return a `call` of a layer that returns its input, and reports whether it was in training mode."""

    def passing(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        add(bool(kwargs.get("training", args[0] if args else False)))
        return inputs

    passing.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]  # functions take any attribute
    return passing
