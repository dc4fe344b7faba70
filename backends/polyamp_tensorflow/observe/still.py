"""A block in which dropout and noise pass their inputs on, or take their random numbers from a given stream.

Keras's random numbers and TensorFlow's all come from a few functions, which other ones stand in for while the block
runs; so it acts in a step that is traced in it as well. Called by `observer`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.parity.observing import Draws
from polyamp_tensorflow.compat import fresh_function, layers_named, random_functions
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.models.layers import modules
from polyamp_tensorflow.observe.parts import replica

Array = np.ndarray[Any, Any]
_NOISE: Final = layers_named("GaussianNoise GaussianDropout AlphaDropout")
_LEAST: Final = 2.0**-24
"""A draw is kept this far from 0 and 1 where it becomes a normal number."""
_TRUNCATED: Final = 2.0
"""Where TensorFlow's truncated normal numbers end."""


@contextlib.contextmanager
def still(model: Any, draws: Draws | None) -> Iterator[None]:
    """See `Observer.still`. It acts in what is traced in the block; of layers whose `call` is a `tf.function` too.

    Without draws every dropout of Keras and TensorFlow passes its input on, in layers, cells, attention and in
    functions that a model calls, and so do layers that add or multiply noise; other random numbers stay random.

    With draws every random operation takes one call of `draws` with its shape. Dropout keeps where a draw is >= its
    rate; uniform numbers are the draws, scaled; integers are their scaled floor; normal numbers are the inverse of the
    normal distribution function at them, and truncated ones at what is left between both ends. The replicas of a
    strategy share the draws of the whole batch, of what has more than one row.

    Inside of a `tf.function` numbers are drawn when it is traced and are constants from then on: of a step that is
    traced once, the same at every step, and in every micro-batch of a window but its first.

    Raises:
        UnsupportedError: in the block, where draws are asked for numbers of another distribution, or of a shape that is
            not known when a function is traced.
    """
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in _replacements(model, draws):
            undo = _Shadow(target, name)
            stack.enter_context(ending(undo.put_back))
            setattr(target, name, stand_in) if inspect.ismodule(target) else vars(target).update({name: stand_in})
        yield


class _Shadow:
    """What an object had under a name."""

    def __init__(self, target: Any, name: str) -> None:
        self._target, self._name = target, name
        self._had = name in vars(target)
        self._value = vars(target).get(name)

    def put_back(self) -> None:
        """As it was; a second call does no harm."""
        if self._had:
            vars(self._target)[self._name] = self._value
        else:
            vars(self._target).pop(self._name, None)


def _replacements(model: Any, draws: Draws | None) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(object, name, what stands there in the block)."""
    functions = random_functions()
    for part in modules(model):
        fresh = fresh_function(part.layer.call)  # what was traced before the block knows nothing of it
        if fresh is not None:
            yield part.layer, "call", fresh
    if draws is None:
        for module, name in functions["dropout"]:
            yield module, name, _bound(getattr(module, name), lambda given: tf.convert_to_tensor(given["x"]))
        for part in modules(model):
            if isinstance(part.layer, _NOISE):
                yield part.layer, "call", _passing(part.layer.call)
        return
    numbers = _Numbers(draws)
    for kind, places in functions.items():
        for module, name in places:
            yield module, name, _bound(getattr(module, name), getattr(numbers, kind))


def _bound(function: Callable[..., Any], stand_in: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """`stand_in`, which gets the arguments of the function's calls by name."""
    signature = inspect.signature(function)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return stand_in({"": function.__name__, **given.arguments})

    return called  # type: ignore[no-any-return]  # TensorFlow is untyped


def _passing(call: Callable[..., Any]) -> Callable[..., Any]:
    def passing(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return inputs

    passing.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]  # functions take any attribute
    return passing


class _Numbers:
    """Random numbers made of draws; each method stands in for the functions of one kind."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._calls: Counter[int] = Counter()
        self._whole: dict[int, Array] = {}

    def dropout(self, given: dict[str, Any]) -> Any:
        """`x` with what is dropped 0 and the rest times 1 / (1 - rate)."""
        x, rate, shape = tf.convert_to_tensor(given["x"]), given["rate"], given["noise_shape"]
        if not tf.is_tensor(rate) and rate == 0:
            return x
        drawn = self._drawn(x.shape if shape is None else shape, given)
        if tf.is_tensor(rate):
            keep, scale = tf.constant(drawn) >= tf.cast(rate, tf.float32), 1 / (1 - tf.cast(rate, x.dtype))
        else:
            keep, scale = tf.constant(drawn >= np.float32(rate)), tf.cast(1 / (1 - rate), x.dtype)
        return tf.where(keep, x * scale, tf.zeros((), x.dtype))

    def uniform(self, given: dict[str, Any]) -> Any:
        """Of [0, 1)."""
        dtype = tf.as_dtype(given["dtype"])
        drawn = self._drawn(given["shape"], given)
        below = np.nextafter(np.asarray(1, dtype.as_numpy_dtype), np.asarray(0, dtype.as_numpy_dtype))
        return tf.constant(np.minimum(drawn.astype(dtype.as_numpy_dtype), below))

    def normal(self, given: dict[str, Any]) -> Any:
        """With mean 0 and variance 1."""
        return self._inverse(given, 0.0, 1.0)

    def truncated(self, given: dict[str, Any]) -> Any:
        """The same between -2 and 2."""
        least = math.erfc(_TRUNCATED / 2**0.5) / 2
        return self._inverse(given, least, 1 - least)

    def integers(self, given: dict[str, Any]) -> Any:
        """From `minval` up to `maxval`, which is left out."""
        low, high = tf.convert_to_tensor(given["minval"]), tf.convert_to_tensor(given["maxval"])
        drawn = tf.constant(self._drawn(given["shape"], given), tf.float64)
        return low + tf.cast(tf.floor(drawn * tf.cast(high - low, tf.float64)), low.dtype)

    def others(self, given: dict[str, Any]) -> Any:
        """Refused: no two frameworks make them alike.

        Raises:
            UnsupportedError: says so.
        """
        raise UnsupportedError(
            f"the random numbers of {given['']} cannot be made of numbers that another framework draws too. Draw "
            "uniform or normal numbers in the model, or compare with randomness='off'."
        )

    def _inverse(self, given: dict[str, Any], least: float, most: float) -> Any:
        drawn = self._drawn(given["shape"], given).astype(np.float64).clip(_LEAST, 1 - _LEAST)
        with tf.init_scope():
            values = tf.math.ndtri(tf.constant(least + drawn * (most - least))).numpy()
        return tf.constant(values.astype(tf.as_dtype(given["dtype"]).as_numpy_dtype))

    def _drawn(self, shape: Any, given: dict[str, Any]) -> Array:
        known = _known(shape)
        if known is None:
            raise UnsupportedError(
                f"the shape of the random numbers of {given['']} is not known when the step is traced, so that they "
                "cannot be those of another framework. Give the batch and the model fixed shapes, or compare with "
                "randomness='off'."
            )
        number, count = replica()
        if count == 1:
            return np.asarray(self._draws(known), np.float32)
        return self._part(known, number, count)

    def _part(self, shape: tuple[int, ...], number: int, count: int) -> Array:
        """A replica's rows of the numbers that one device would draw for all of them."""
        call = self._calls[number]
        self._calls[number] += 1
        rows = shape[0] if shape and shape[0] > 1 else 0
        if call not in self._whole:
            self._whole[call] = np.asarray(self._draws((rows * count, *shape[1:]) if rows else shape), np.float32)
        whole = self._whole[call]
        if min(self._calls[other] for other in range(count)) > call:
            del self._whole[call]
        return whole[number * rows : (number + 1) * rows] if rows else whole


def _known(shape: Any) -> tuple[int, ...] | None:
    """A shape from a list, which may hold tensors, a `TensorShape` or a tensor; None where it is not known."""
    if isinstance(shape, tf.TensorShape):
        return tuple(shape.as_list()) if shape.is_fully_defined() else None
    if tf.is_tensor(shape):
        value = tf.get_static_value(shape)
        return None if value is None else tuple(int(length) for length in np.atleast_1d(value))
    lengths = [tf.get_static_value(length) if tf.is_tensor(length) else length for length in shape]
    return None if None in lengths else tuple(int(length) for length in lengths)
