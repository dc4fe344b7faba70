"""Context manager that keeps unused parameters and their optimizer state unchanged (S23).

Keras's optimizers do not change a parameter whose gradient is None, decay and constraints included, with three
exceptions:

- they warn;
- they raise for an update without any gradient, which a member of a `MultiOptimizer` may have;
- they update the moving average (`use_ema`) of all parameters.

`skip_unused_parameters` replaces the responsible methods while the update is traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import FILTER_GRADIENTS, OVERWRITE_WITH_AVERAGES, UPDATE_AVERAGES, moving_averages
from polyamp_tensorflow.step.tensorflow_only.optimizer_patches import replace_methods


@contextlib.contextmanager
def skip_unused_parameters(optimizer: Any, unused: Sequence[Any], *, warn: bool = False) -> Iterator[None]:
    """Prevent a Keras optimizer's `apply` from changing parameters without a gradient.

    Args:
        optimizer: a Keras optimizer; members of a `MultiOptimizer` are included.
        unused: the variables whose gradient is None.
        warn: whether Keras warns that gradients do not exist, as in `fit`.

    Raises:
        UnsupportedError: this version of Keras lacks one of the methods.
    """
    if not unused:
        yield
        return
    ids = {id(native_variable(variable)) for variable in unused}
    purpose = "from parameters that the loss does not depend on"
    methods = functools.partial(_replacement_methods, unused=ids, warn=warn)
    with replace_methods(optimizer, methods, purpose=purpose, instead="freeze them"):
        yield


def _replacement_methods(part: Any, unused: set[int], warn: bool) -> dict[str, Callable[..., Any]]:
    def filter_gradients(gradients: Any, variables: Any) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if warn and pairs:
            return getattr(type(part), FILTER_GRADIENTS)(part, gradients, variables)
        return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

    def list_averages() -> Iterator[tuple[Any, Any, bool]]:
        for variable, average in moving_averages(part):
            yield variable, average, id(native_variable(variable)) in unused

    def update_averages(_: Any) -> None:
        """Apply Keras's formula. The average of an unused parameter starts at its value, like all, and then stays."""
        if not part.use_ema:
            return
        first = keras.ops.equal(part.iterations, 0)
        for variable, average, is_unused in list_averages():
            if is_unused:
                average.assign(keras.ops.where(first, variable, average))
                continue
            momentum = keras.ops.where(first, 0.0, part.ema_momentum)
            momentum = keras.ops.cast(momentum, variable.dtype)
            average.assign(momentum * average + (1 - momentum) * variable)

    def overwrite_with_averages(_: Any) -> None:
        for variable, average, is_unused in list_averages():
            if not is_unused:
                variable.assign(average)

    return {
        FILTER_GRADIENTS: filter_gradients,
        UPDATE_AVERAGES: update_averages,
        OVERWRITE_WITH_AVERAGES: overwrite_with_averages,
    }
