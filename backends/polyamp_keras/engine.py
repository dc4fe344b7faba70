"""What polyamp needs of a Keras backend beyond `keras.ops`, and `ENGINE`: that of the backend that Keras runs on.

Only the module of the current backend is imported: a process with Keras on torch or JAX imports no TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, cast

import keras

from polyamp.array_namespace import ArrayNamespace
from polyamp_keras.engines.differentiation import Differentiation, HostArray, ObservedCall


class KerasEngine(Protocol):
    """Verbs of one Keras backend. Each module of `polyamp_keras.engines` defines them as functions."""

    XP: ArrayNamespace
    """Array namespace of the backend's tensors."""
    FRAMEWORK: str
    """Name of the framework in messages."""
    DTYPE_ERRORS: tuple[type[Exception], ...]
    """Errors that the framework raises for operands of two dtypes; empty if it promotes them."""
    DTYPE_MESSAGE: str
    """Regular expression of the line of such an error that names the dtypes."""
    ONE_DTYPE_CODE: str
    """Code that makes two operands of one dtype, for the error message."""
    LOSS_REACHES_APPLY: bool
    """Whether a value that is known where the loss is computed, such as its divisor, can reach `apply`."""

    def is_float32_constant(self, value: Any, /) -> bool:
        """Return whether a value is a float32 tensor or variable of the framework that has numbers, so no symbol."""

    def is_tensor(self, value: Any, /) -> bool:
        """Return whether a value is a tensor on which attributes can be kept; no variable and no sparse tensor."""

    def gather_in_float32(self, call: Callable[..., Any], x: Any, args: Any, kwargs: Any, /) -> Any:
        """Return the result of a gather of a 16-bit `x`, whose gradient is summed in float32 and rounded once."""

    def bitcast(self, x: Any, dtype: str, /) -> Any:
        """Return the bits of a tensor as another dtype of the same size."""

    def custom_vjp(
        self, forward: Callable[..., Any], backward: Callable[..., Any], x: Any, w: Any, watch: Any = None, /
    ) -> Any:
        """Return the result of `forward(x, w) -> (result, residuals)`, whose gradients are `backward(residuals, g)`. A
        gradient of the gradients raises. A third value of `backward` is passed to `watch`; on JAX the gradients depend
        on what that returns, so that it stays in the program."""

    def integer_casts(self, given: Sequence[Any], /) -> AbstractContextManager[list[str]]:
        """Return a context manager that records the integer dtypes to which operations cast these tensors."""

    def matmul_precision(self, setting: str | None, /) -> AbstractContextManager[None]:
        """Return a context manager with the precision of float32 products (`Policy.float32_matmul`)."""

    def to_dense(self, gradient: Any, like: Any, /) -> Any:
        """Return the gradient of a variable as a dense tensor."""

    def divide(self, gradients: Sequence[Any], divisor: Any, /) -> list[Any]:
        """Return gradients, at least float32, over a float32 scalar."""

    def kernel_update(self, spec: Any, rate: Any, counts: Any, /) -> Any:
        """Return the framework's own update of a parameter by a spec, a function; None if it has none."""

    def host_values(self, variable: Any, /) -> HostArray:
        """Return the values of a variable, Keras's or the framework's, which later writes do not change."""

    def from_host(self, values: HostArray, /) -> Any:
        """Return a copy of an array of any strides in a form that a variable can be assigned."""

    def cast_variable(self, variable: Any, dtype: str, /) -> Any:
        """Return what a Keras variable contains, as a new one in another dtype."""

    def trace_state(self) -> Any:
        """Return what is equal for two calls only if none of them is in a trace inside of the other's."""

    def differentiate(
        self, call: ObservedCall, variables: Sequence[Any], cotangents: Callable[[Sequence[HostArray]], Any], /
    ) -> Differentiation:
        """Run `call`, and return the gradients of the sum of its floating outputs times `cotangents(outputs)` by the
        variables, zeros for a variable that they do not depend on."""

    def check_gradients(self, kinds: Collection[str], call: str, instead: str, /) -> None:
        """Raise if this process cannot compute gradients of layers of these canonical kinds.

        Args:
            kinds: the kinds.
            call: the call that would compute them.
            instead: the alternative, for the message.
        """

    def write_fit_state(self, model: Any, /) -> None:
        """Write the values of the last step of `fit` to the model's variables, if they are kept elsewhere."""

    def store_fit_state(self, model: Any, result: Any, /) -> None:
        """Write what a train function returned to the model's variables, if they are kept elsewhere."""

    def run_with_variables(self, function: Callable[..., Any], variables: Sequence[Any], arguments: Any, /) -> Any:
        """Return the result of a train function of `fit` whose step reads and writes further variables."""

    def monitored_train_step(self, model: Any, step: Any, figures: Any, /) -> Callable[..., Any]:
        """Return a `train_step` whose losses reach these `FitFigures`, where they do not in `scale_loss`."""


class StepEngine(KerasEngine, Protocol):
    """What a step and `fit` need beyond that. TensorFlow's are in `polyamp_tensorflow`, and its engine has none."""

    KEEPS_FIT_STATE: bool
    """Whether `fit` keeps the values of the variables in a state of its own while it runs."""

    def no_gradients(self) -> AbstractContextManager[None]:
        """Return a context manager in which nothing is recorded for a backward pass."""

    def is_traced(self, value: Any, /) -> bool:
        """Return whether a value belongs to a trace, so that it has no numbers."""

    def read_without_wait(self, flag: Any, /) -> bool | None:
        """Return a boolean scalar on the host; None if reading it would wait for a device, or in a trace."""

    def read_vector(self, values: Any, /) -> Any:
        """Return the elements of a vector on the host, which may wait; None in a trace."""

    def copy_value(self, variable: Any, /) -> Any:
        """Return a Keras variable's value, which later writes do not change."""

    def update_if(self, applies: Any, written: Sequence[Any], read: Sequence[Any], body: Callable[[], None], /) -> None:
        """Run `body`, which writes to Keras variables and reads these and others, if a flag is true that the host does
        not know; else they keep their values bit for bit."""

    def finite_flags(self, gradients: Sequence[Any], /) -> Any:
        """Return for each gradient whether all of its elements are finite, a boolean vector."""

    def global_norm(self, gradients: Sequence[Any], /) -> Any:
        """Return the global L2 norm of gradients, over the range of float32: inf or NaN only if one of them is."""

    def check_fit(self, jit_compile: Any, /) -> None:
        """Raise for ways of running `fit` that polyamp does not support."""

    def guarded_train_step(self, model: Any, step: Any, scaled: type[Any], count: Any, /) -> Callable[..., Any]:
        """Return a `train_step` that restores running statistics after a skipped update."""

    def value_counts(self, values: Any, length: int, /) -> Any:
        """Return how many elements of an integer vector are 0, 1, ..., length - 1, without a wait for the device."""


ENGINE: Final = cast("StepEngine", importlib.import_module(f"polyamp_keras.engines.{keras.config.backend()}"))
"""The engine of the current backend: a module, whose functions are those of the protocol."""
