"""`KerasObserver`: the `Observer` of `polyamp.parity` for Keras models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from polyamp.contract.backend import State
from polyamp.parity.trace.observer import CaptureCallback, DropoutCount, Observer, PassRecord, UniformSource
from polyamp.parity.trace.operation_log import OperationRecorder
from polyamp.recipe.policy import Policy
from polyamp.results import LossFunction
from polyamp_keras.arrays import native_variable
from polyamp_keras.models.layers import is_layer
from polyamp_keras.precision.policy_application import without_policies
from polyamp_tensorflow.arrays import device_name
from polyamp_tensorflow.observe import capture, dropout, model_copy, operation_recorder
from polyamp_tensorflow.observe.tensorflow_only import eager_trainings
from polyamp_tensorflow.precision.policy_module import native_model


class KerasObserver:
    """`Observer` for Keras layers and models. Of other models with variables it reports only the output.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> import polyamp
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
        >>> state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        >>> loss = lambda model, batch: keras.ops.mean(model(batch))
        >>> def see(path, what, array, dtype):
        ...     print(repr(path), what, array.shape, dtype)
        >>> found = KerasObserver().capture_pass(state, loss, np.ones((4, 3), "float32"), see)
        'head' input (4, 3) float32
        'head' output (4, 2) float32
        '' output (4, 2) float32
        '' cotangent (4, 2) float32
        'head' cotangent (4, 2) float32
        >>> found.gradients["head/bias"].tolist()
        [0.5, 0.5]
    """

    def device(self, model: Any) -> str:
        placed = {device_name(native_variable(variable).device) for variable in native_model(model).variables}
        return ", ".join(sorted(placed))

    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        return model_copy.model_copy(native_model(model), wide=wide, inference=inference)

    def without_policies(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which the model has no applied policy (`apply_policy`, `compile`)."""
        found = native_model(model)
        return without_policies(found) if is_layer(found) else nullcontext()

    def runs_eagerly(self, model: Any, policy: Policy, updates: int) -> bool:
        """Return whether a short training takes the least time op by op (`EagerTrainings`)."""
        return eager_trainings.runs_eagerly(self.device(model), policy, updates)

    def disable_dropout(self, model: Any, draws: UniformSource | None) -> AbstractContextManager[DropoutCount]:
        return dropout.disable_dropout(native_model(model), draws)

    def capture_pass(self, state: State, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        return capture.capture_pass(state, loss_fn, batch, on_capture)

    def record_operations(self, state: State, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
        operation_recorder.record_operations(state, loss_fn, batch, recorder)


OBSERVER: Final[Observer] = KerasObserver()
