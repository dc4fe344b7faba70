"""Protocols with which a backend records its models' training: `Observer` and `HasObserver`, and their data types.

`backends/*/observe` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from polyamp.contract.backend import State
from polyamp.contract.casting_report import OperationCount
from polyamp.errors import ModelError
from polyamp.recipe.policy import Policy
from polyamp.results import LossFunction

Array = np.ndarray[Any, Any]
CaptureKind = Literal["input", "output", "cotangent"]
"""A module's output; the gradient of the unscaled loss with respect to it; or, for a module without submodules, its
first floating input array, which comes right before its output."""
CaptureCallback = Callable[[str, CaptureKind, "Array", str], None]
"""`on_capture(path, what, array, dtype)`, called in the order of computation: outputs as calls end, then cotangents.

- path: of the module, as `Converter.inventory` spells it, "" for the model itself; the second call of a module in one
  pass is "path#2", the third "path#3".
- array: on the host, in the framework's own layout; float32 or float64, whatever its original dtype.
- dtype: the original dtype.
"""
UniformSource = Callable[[tuple[int, ...]], "Array"]
"""`draws(shape)`: return the next uniform numbers of [0, 1), float32, the same in every framework."""


class DropoutCount:
    """Number of calls of dropout that were turned off: those with a rate above 0, in training mode.

    Attributes:
        calls: the number so far, as often as Python ran such a call; None if some cannot be counted.
    """

    def __init__(self) -> None:
        self.calls: int | None = 0

    def add(self, calls: int = 1) -> None:
        """Count calls."""
        if self.calls is not None:
            self.calls += calls

    def give_up(self) -> None:
        """Say from now on that there are calls which cannot be counted."""
        self.calls = None


class PassRecord(NamedTuple):
    """One forward and backward pass of `loss_fn`.

    Attributes:
        loss: unscaled, a Python number.
        gradients: name of a trainable leaf (`Inventory`) -> gradient of the unscaled loss in the leaf's shape, float32
            (float64 of a float64 model); None where the loss does not depend on it.
        operations: the operations that ran, by module path, as `polyamp.explain` lists them; empty where the framework
            does not expose them.
        hidden_reason: why outputs of submodules are not visible (a compiled model); "" if they are.
    """

    loss: float
    gradients: Mapping[str, Array | None]
    operations: Sequence[OperationCount] = ()
    hidden_reason: str = ""


class Observer(Protocol):
    """Protocol of a backend's recorder of training passes."""

    def device(self, model: Any) -> str:
        """Return the name of the device that holds a model's arrays, in the words of `BackendInfo.devices`; "" if it
        has no arrays."""

    def model_copy(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager that yields a model to train and leaves the given one unchanged.

        The model is a copy; or, where copies are impossible (Keras), the model itself, whose variables and settings
        are restored on exit. It has the same values, paths, mode (training or not), wrappers (`torch.compile`) and
        trainable parameters.

        Args:
            model: as `polyamp.init` takes it.
            wide: use float64 for parameters and statistics; everything inside the block may run in float64.
            inference: use inference mode (running statistics, no dropout) unless a call overrides it.

        Raises:
            UnsupportedError: `wide` is set, and the framework or the model does not support it.
            ModelError: the model cannot be copied.
        """

    def disable_dropout(self, model: Any, draws: UniformSource | None) -> AbstractContextManager[DropoutCount]:
        """Return a context manager in which a model, and functions of its framework, draw no random numbers.

        It yields the count of what it turns off; with `draws` nothing is counted.

        Args:
            model: a model from `model_copy`.
            draws: None: dropout passes its input through. Else each random mask or number comes from one call of
                `draws`, in program order. Dropout keeps elements whose draw is >= its rate, and multiplies them by
                1 / (1 - rate).
        """

    def capture_pass(self, state: State, loss_fn: LossFunction, batch: Any, on_capture: CaptureCallback) -> PassRecord:
        """Run one forward and backward pass of `loss_fn` on the state's model under its policy, as `value_and_grad`.

        The state is unchanged afterwards, including its random streams.

        Args:
            state: state that `polyamp.init` made from a model from `model_copy`.
            loss_fn: the loss.
            batch: whole NumPy batch; it is not split into micro-batches.
            on_capture: called with the output of every module; only with the model's if submodules are not visible.
        """


@runtime_checkable
class PolicyRemover(Protocol):
    """Optional protocol of an observer: models may carry a policy of their own, applied for good (Keras)."""

    def without_policies(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which the model carries none, so that another policy can be tried on it."""


@runtime_checkable
class EagerTrainings(Protocol):
    """Optional protocol of an observer: short trainings may run op by op, where a compilation takes longer (Keras)."""

    def runs_eagerly(self, model: Any, policy: Policy, updates: int) -> bool:
        """Return whether `train_step(compile=False)` takes the least time for so many updates."""


def without_policies(observer: Observer, model: Any) -> AbstractContextManager[None]:
    """Return a context manager in which a model carries no policy of its own.

    Raises:
        ModelError: a training state in place of its model.
    """
    if hasattr(model, "scale_state"):
        raise ModelError(f"model must be a model. Received: a {type(model).__name__}. Pass its model: state.model.")
    return observer.without_policies(model) if isinstance(observer, PolicyRemover) else nullcontext()


@runtime_checkable
class HasObserver(Protocol):
    """Protocol of a backend whose models' training can be recorded."""

    @property
    def observer(self) -> Observer:
        """Recorder of its training passes."""
