"""Parameters on which the loss does not depend, and their optimizer state, stay as they are (S23).

Keras's optimizers leave a parameter alone whose gradient is None, decay and constraints included, but for three things:
they warn, they refuse an update without any gradient, which a member of a `MultiOptimizer` may have, and they move the
moving average (`use_ema`) of all parameters. `leaving_alone` stands in for those of their methods while the update is
traced. Called by the step and by `LossScaleOptimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import keras

from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import MOVE_AVERAGES, TAKE_AVERAGES, WITHOUT_EMPTY, check_methods, moving_averages
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.step.optimizer_checks import members

_METHODS: Final = (WITHOUT_EMPTY, MOVE_AVERAGES, TAKE_AVERAGES)


@contextlib.contextmanager
def leaving_alone(optimizer: Any, unused: Sequence[Any], *, warn: bool = False) -> Iterator[None]:
    """Keep a Keras optimizer's `apply` from touching the parameters without a gradient.

    Args:
        optimizer: a Keras optimizer; of a `MultiOptimizer`, its members too.
        unused: the variables whose gradient is None.
        warn: let Keras warn that gradients do not exist, as `fit` does.

    Raises:
        UnsupportedError: this version of Keras looks for them somewhere else.
    """
    if not unused:
        yield
        return
    ids = {id(raw(variable)) for variable in unused}
    parts = members(optimizer)
    purpose = "from parameters that the loss does not depend on"
    check_methods(optimizer, parts, _METHODS, purpose=purpose, instead="freeze them")

    def put_back() -> None:
        for part in parts:
            for name in _METHODS:
                vars(part).pop(name, None)

    with ending(put_back):
        for part in parts:
            for name, method in _methods(part, ids, warn).items():
                object.__setattr__(part, name, method)
        yield


def _methods(part: Any, unused: set[int], warn: bool) -> dict[str, Callable[..., Any]]:
    own_filter = getattr(type(part), WITHOUT_EMPTY).__get__(part)

    def present(gradients: Any, variables: Any) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if warn and pairs:
            return own_filter(gradients, variables)
        return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

    def averages() -> Iterator[tuple[Any, Any, bool]]:
        for variable, average in moving_averages(part):
            yield variable, average, id(raw(variable)) in unused

    def move(_: Any) -> None:
        """Keras's formula; the average of what is not used starts at the parameter, as that of all does, and stays."""
        if not part.use_ema:
            return
        first = keras.ops.equal(part.iterations, 0)
        for variable, average, left in averages():
            if left:
                average.assign(keras.ops.where(first, variable, average))
                continue
            momentum = keras.ops.where(first, 0.0, part.ema_momentum)
            momentum = keras.ops.cast(momentum, variable.dtype)
            average.assign(momentum * average + (1 - momentum) * variable)

    def overwrite(_: Any) -> None:
        for variable, average, left in averages():
            if not left:
                variable.assign(average)

    return {WITHOUT_EMPTY: present, MOVE_AVERAGES: move, TAKE_AVERAGES: overwrite}
