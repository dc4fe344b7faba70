"""`KerasObserver`: the `Observer` of `polyamp.parity` over Keras models, a line or two a method."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from polyamp.contract.backend import State
from polyamp.parity.observing import Draws, Observer, See, Watched
from polyamp.results import LossFunction
from polyamp_tensorflow.observe import still, watching, working
from polyamp_tensorflow.precision.bound import native_of


class KerasObserver:
    """`Observer` over Keras layers and models, and over other models with variables, of which the output alone is seen.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import polyamp
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        >>> loss = lambda model, batch: keras.ops.mean(model(batch))
        >>> def see(path, what, array, dtype):
        ...     print(repr(path), what, array.shape, dtype)
        >>> found = KerasObserver().watch(state, loss, np.ones((4, 3), "float32"), see)
        'head' input (4, 3) float32
        'head' output (4, 2) float32
        '' output (4, 2) float32
        '' cotangent (4, 2) float32
        'head' cotangent (4, 2) float32
        >>> found.gradients["head/bias"].tolist()
        [0.5, 0.5]
    """

    def working(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        return working.working(native_of(model), wide=wide, inference=inference)

    def still(self, model: Any, draws: Draws | None) -> AbstractContextManager[None]:
        return still.still(native_of(model), draws)

    def watch(self, state: State, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
        return watching.watch(state, loss_fn, batch, see)


OBSERVER: Final[Observer] = KerasObserver()
