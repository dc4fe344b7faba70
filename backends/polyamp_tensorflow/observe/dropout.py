"""Context manager that disables dropout and noise, or replaces their random numbers by given draws.

All random numbers of Keras and TensorFlow come from a few functions, which the context manager replaces. So it also
affects a step that is traced in it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_keras.models.layers import list_layers
from polyamp_keras.observe.dropout import NOISE_LAYERS, identity_call, replace_draws
from polyamp_tensorflow.compat import random_functions, untraced_function
from polyamp_tensorflow.observe.tensorflow_only.replica_outputs import current_replica

Array = np.ndarray[Any, Any]
_MIN_DRAW: Final = 2.0**-24
"""Minimum distance of a draw from 0 and 1 where it is converted to a normal number."""
_TRUNCATION_LIMIT: Final = 2.0
"""Bound of TensorFlow's truncated normal numbers."""


def disable_dropout(model: Any, draws: UniformSource | None) -> AbstractContextManager[DropoutCount]:
    """Disable or share dropout in the block, as in `Observer.disable_dropout`.

    It affects functions that are traced in the block, and layers whose `call` is a `tf.function`.

    Without draws, every dropout of Keras and TensorFlow is the identity: in layers, cells, attention and functions that
    a model calls. So are layers that add or multiply noise. Other random numbers stay random.

    With draws, every random operation calls `draws` once with its shape:

    - dropout keeps an element where the draw is >= its rate;
    - uniform numbers are the scaled draws, integers their scaled floor;
    - normal numbers are the inverse normal distribution function at the draws, truncated ones within the two bounds.

    The replicas of a strategy share the draws of the whole batch for shapes with more than one row.

    Inside a `tf.function` numbers are drawn during tracing and are constants from then on. A step that is traced once
    has the same ones at every step, and in every micro-batch of an accumulation except its first.

    Raises:
        UnsupportedError: in the block, if an operation needs draws of another distribution, or of a shape that is
            unknown during tracing.
    """
    return replace_draws(model, functools.partial(_replacements, model, draws))


def _replacements(
    model: Any, draws: UniformSource | None, count: DropoutCount
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield (object, attribute name, replacement) for the block."""
    functions = random_functions()
    for part in list_layers(model):
        fresh = untraced_function(part.layer.call)  # an earlier trace would ignore the block
        if fresh is not None:
            yield part.layer, "call", fresh
    if draws is None:
        for module, name in functions["dropout"]:
            identity = _wrap_signature(getattr(module, name), functools.partial(_pass_through, count))
            yield module, name, identity
        for part in list_layers(model):
            if isinstance(part.layer, NOISE_LAYERS):
                yield part.layer, "call", identity_call(part.layer.call, lambda drops: _count(count, drops))
        return
    numbers = _SharedRandomFunctions(draws)
    for kind, places in functions.items():
        for module, name in places:
            yield module, name, _wrap_signature(getattr(module, name), getattr(numbers, kind))


def _count(count: DropoutCount, drops: bool) -> None:
    count.add(current_replica()[0] == 0 and drops)


def _wrap_signature(function: Callable[..., Any], stand_in: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return `stand_in` with the signature of `function`; it gets the arguments of each call by name."""
    signature = inspect.signature(function)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return stand_in({"": function.__name__, **bound.arguments})

    return called  # type: ignore[no-any-return]  # TensorFlow is untyped


def _pass_through(count: DropoutCount, arguments: dict[str, Any]) -> Any:
    """Return `x`, in place of a function that drops."""
    rate = arguments["rate"]
    _count(count, tf.is_tensor(rate) or rate > 0)
    return tf.convert_to_tensor(arguments["x"])


class _SharedRandomFunctions:
    """Random numbers computed from draws. Each method replaces the functions of one kind."""

    def __init__(self, draws: UniformSource) -> None:
        self._draws = draws
        self._calls: Counter[int] = Counter()
        self._batch_draws: dict[int, Array] = {}

    def dropout(self, arguments: dict[str, Any]) -> Any:
        """Return `x` with dropped elements 0 and the others times 1 / (1 - rate)."""
        x, rate, shape = tf.convert_to_tensor(arguments["x"]), arguments["rate"], arguments["noise_shape"]
        if not tf.is_tensor(rate) and rate == 0:
            return x
        drawn = self._draw_array(x.shape if shape is None else shape, arguments)
        if tf.is_tensor(rate):
            keep, scale = tf.constant(drawn) >= tf.cast(rate, tf.float32), 1 / (1 - tf.cast(rate, x.dtype))
        else:
            keep, scale = tf.constant(drawn >= np.float32(rate)), tf.cast(1 / (1 - rate), x.dtype)
        return tf.where(keep, x * scale, tf.zeros((), x.dtype))

    def uniform(self, arguments: dict[str, Any]) -> Any:
        """Return uniform numbers in [0, 1)."""
        dtype = tf.as_dtype(arguments["dtype"])
        drawn = self._draw_array(arguments["shape"], arguments)
        below = np.nextafter(np.asarray(1, dtype.as_numpy_dtype), np.asarray(0, dtype.as_numpy_dtype))
        return tf.constant(np.minimum(drawn.astype(dtype.as_numpy_dtype), below))

    def normal(self, arguments: dict[str, Any]) -> Any:
        """Return normal numbers with mean 0 and variance 1."""
        return self._inverse(arguments, 0.0, 1.0)

    def truncated(self, arguments: dict[str, Any]) -> Any:
        """Return normal numbers truncated to [-2, 2]."""
        least = math.erfc(_TRUNCATION_LIMIT / 2**0.5) / 2
        return self._inverse(arguments, least, 1 - least)

    def integers(self, arguments: dict[str, Any]) -> Any:
        """Return integers from `minval` to `maxval`, exclusive."""
        low, high = tf.convert_to_tensor(arguments["minval"]), tf.convert_to_tensor(arguments["maxval"])
        drawn = tf.constant(self._draw_array(arguments["shape"], arguments), tf.float64)
        return low + tf.cast(tf.floor(drawn * tf.cast(high - low, tf.float64)), low.dtype)

    def unsupported(self, arguments: dict[str, Any]) -> Any:
        """Raise: no two frameworks compute these numbers in the same way.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the random numbers of {arguments['']} cannot be made of numbers that another framework draws too. Draw "
            "uniform or normal numbers in the model, or compare with randomness='off'."
        )

    def _inverse(self, arguments: dict[str, Any], least: float, most: float) -> Any:
        drawn = self._draw_array(arguments["shape"], arguments).astype(np.float64).clip(_MIN_DRAW, 1 - _MIN_DRAW)
        with tf.init_scope():
            values = tf.math.ndtri(tf.constant(least + drawn * (most - least))).numpy()
        return tf.constant(values.astype(tf.as_dtype(arguments["dtype"]).as_numpy_dtype))

    def _draw_array(self, shape: Any, arguments: dict[str, Any]) -> Array:
        known = _static_shape(shape)
        if known is None:
            raise UnsupportedError(
                f"the shape of the random numbers of {arguments['']} is not known when the step is traced, so that "
                "they cannot be those of another framework. Give the batch and the model fixed shapes, or compare with "
                "randomness='off'."
            )
        number, count = current_replica()
        if count == 1:
            return np.asarray(self._draws(known), np.float32)
        return self._replica_rows(known, number, count)

    def _replica_rows(self, shape: tuple[int, ...], number: int, count: int) -> Array:
        """Return a replica's rows of the numbers that one device would draw for the whole batch."""
        call = self._calls[number]
        self._calls[number] += 1
        rows = shape[0] if shape and shape[0] > 1 else 0
        if call not in self._batch_draws:
            self._batch_draws[call] = np.asarray(self._draws((rows * count, *shape[1:]) if rows else shape), np.float32)
        whole = self._batch_draws[call]
        if min(self._calls[other] for other in range(count)) > call:
            del self._batch_draws[call]
        return whole[number * rows : (number + 1) * rows] if rows else whole


def _static_shape(shape: Any) -> tuple[int, ...] | None:
    """Return a shape given as a list, which may contain tensors, a `TensorShape` or a tensor; None if unknown."""
    if isinstance(shape, tf.TensorShape):
        return tuple(shape.as_list()) if shape.is_fully_defined() else None
    if tf.is_tensor(shape):
        value = tf.get_static_value(shape)
        return None if value is None else tuple(int(length) for length in np.atleast_1d(value))
    lengths = [tf.get_static_value(length) if tf.is_tensor(length) else length for length in shape]
    return None if None in lengths else tuple(int(length) for length in lengths)
