"""The contract between polyamp and a framework: the `Backend` and `State` protocols and what passes between them.

A backend is one object of this shape, registered under the entry-point group `polyamp.backends`. In a backend's
own package the line `BACKEND: Final[Backend] = TorchBackend()` makes the type checkers prove the contract, and
`polyamp.conformance` holds its behaviour to the semantics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from polyamp.arrays import ArrayNamespace
from polyamp.contract.report import CastingReport
from polyamp.recipe.members import Members
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules.decide import Skip
from polyamp.rules.growing import Growth
from polyamp.rules.scale import LossScaleState
from polyamp.rules.stuck import Watch

if TYPE_CHECKING:
    import numpy as np

    from polyamp.contract.harness import Harness
    from polyamp.errors import PolyampError


class BackendInfo(NamedTuple):
    """What a loaded backend says of itself.

    Attributes:
        framework: name of the framework's distribution ("torch").
        version: its version.
        devices: names of the devices it can compute on, the default one first.
    """

    framework: str
    version: str
    devices: tuple[str, ...]


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ModelT_co = TypeVar("ModelT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    ModelT_co = TypeVar("ModelT_co", covariant=True)


class State(Protocol[ModelT_co]):
    """A model under training, generic in the model's type. In JAX a pytree; in torch and Keras it holds the user's own
    module. What one framework's state has beyond this stands in its class, such as `polyamp_torch.TorchState`."""

    @property
    def backend(self) -> Backend:
        """The backend that made it."""

    @property
    def recipe(self) -> Recipe:
        """The recipe it was made with."""

    @property
    def model(self) -> ModelT_co:
        """The current model in its native form."""

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state."""

    @property
    def step(self) -> Any:
        """Number of applied updates, int32 scalar."""

    @property
    def watch(self) -> Watch:
        """The host's count of this state's steps (S17). The state that a step returns has the same."""

    @property
    def groups(self) -> Members | None:
        """Which parameter has which hyperparameters (S27); None while a model waits for its variables. Of a backend
        whose states have none, made before there were parameter groups, `init` refuses a recipe that has some."""


ValueAndGrad = Callable[[Sequence[Any], Any], tuple[Any, list[Gradients]]]
"""`(states, batch) -> (value, one Gradients per state)`; `value` is what `loss_fn` returned, the loss in float32."""


class LossFunctions(Protocol):
    """What `polyamp.losses` composes its formulas of (S24), on the framework's arrays and in float32.

    Labels that come in are inside of the classes. Besides, the arrays have the operators of arithmetic, comparison and
    indexing, and `shape`.
    """

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        """A scope in which arithmetic on float32 arrays stays in float32, whatever autocast is on (S4)."""

    def wide(self, values: Any, like: Any) -> Any:
        """Native or NumPy numbers as a float32 array beside `like`, differentiably."""

    def constant(self, values: Any, like: Any) -> Any:
        """The same without a gradient, for counts."""

    def indices(self, labels: Any, like: Any) -> Any:
        """Native or NumPy labels as an array of signed integers beside `like`."""

    def on_host(self, labels: Any) -> np.ndarray[Any, Any] | None:
        """The labels as a NumPy array where looking at them waits for no device; None elsewhere and while tracing."""

    def classes(self, logits: Any) -> Any:
        """The length of the last axis: an int, or an integer scalar where a compiler does not know it."""

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        """Elementwise squared error, float32."""

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        """Cross-entropy with integer labels, float32, reduced over the rows or not; the framework's quickest."""

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        """Elementwise binary cross-entropy, float32."""

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        """Elementwise Huber loss, float32."""

    def log_softmax(self, logits: Any) -> Any:
        """Along the last axis, float32."""

    def pick(self, values: Any, labels: Any) -> Any:
        """`values[..., labels]`: one of each row, shape (...) of values of shape (..., classes)."""

    def take(self, values: Any, labels: Any) -> Any:
        """`values[labels]`, of values of shape (classes,)."""

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Elementwise choice of arrays or Python numbers, in the dtype of the array; of two numbers in float32."""

    def sum(self, values: Any, axis: int | None = None) -> Any:
        """Sum of all elements or over one axis, float32."""

    def mean(self, values: Any, axis: int | None = None) -> Any:
        """Mean of all elements or over one axis, float32."""


@runtime_checkable
class PerOperation(Protocol):
    """A backend whose autocast has rules per operation that it can change (`Policy.op_rules`) and explain; not every
    backend has."""

    def explain(self, target: Any, policy: Policy, *inputs: Any, strict: bool = False) -> CastingReport:
        """The casting report of `target(*inputs)`; with `strict`, an operation without a rule raises."""


@runtime_checkable
class OwnLoop(Protocol):
    """A backend with a loss-scaling object in its framework's own form, for people who keep their own loop."""

    def native_scaler(self, scaler: LossScaler, **options: Any) -> Any:
        """The framework's own object for a scaler, made with its own options."""


@runtime_checkable
class ResumesOptimizers(Protocol):
    """A backend that can say what hyperparameters a native optimizer has and which arrays of a state hold them.

    Without it, `restore` compares only the class of a native optimizer, and takes every array from the file.
    """

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        """The state's native optimizer as plain values by name, as it was at `init`: its "type" and hyperparameters."""

    def setting_of(self, state: Any, name: str) -> str | None:
        """The setting whose present value the array `name` of `export_state` holds, such as "optimizer.learning_rate";
        None for every other array."""


@runtime_checkable
class ChecksArrays(Protocol):
    """A backend that can refuse arrays for more than their names, shapes and dtypes."""

    def check_arrays(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[str]:
        """What `import_state` could not put into this state, one sentence each; empty if nothing. Changes nothing."""


@runtime_checkable
class DescribesStates(Protocol):
    """A backend whose checkpoints say what they hold, so that `polyamp.port` reads them in another framework."""

    def described(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """What `arrays`, which `export_state` gave of this state, are, as JSON. Raises nothing."""


@runtime_checkable
class ExplainsFailures(Protocol):
    """A backend that knows what was mistaken when a step ends in certain errors of its framework."""

    def explained(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        """The error to raise in place of the framework's: what came, and what to do. None if it is not known.

        Args:
            error: what a step, or its first half, raised; none of polyamp's own.
            states: the states that it was called with.
            batch: the batch, as the user gave it.
        """


class Backend(Protocol):
    """What polyamp needs of a framework."""

    @property
    def name(self) -> str:
        """Short name, as a user writes it: "torch"."""

    @property
    def xp(self) -> ArrayNamespace:
        """Array namespace for the formulas that polyamp writes once."""

    @property
    def losses(self) -> LossFunctions:
        """Loss functions."""

    def info(self) -> BackendInfo:
        """Framework, version and devices."""

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        """A new 0-dim array, on the device of `like` or on the default one."""

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy on the host; bfloat16 arrives as `ml_dtypes.bfloat16`."""

    def is_concrete(self, array: Any) -> bool:
        """False for an array that has no value yet, because a compiler is tracing."""

    def cast(self, tree: Any, dtype: str, *, float64: bool = False) -> Any:
        """A tree with its floating leaves cast (S2); float64 leaves only if `float64`."""

    def native_policy(self, policy: Policy) -> Any:
        """The framework's own object for a policy."""

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        """A function or a model as a callable that runs under the policy."""

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        """The scalar loss in float32, times `scale` unless that is None (S6). Raises `LossError`."""

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        """Float32 gradients divided by `scale`, and the flag over the quotients (S10). Raises `GradientError`."""

    def regularization(self, model: Any) -> Any:
        """What a model, bound or native, adds to its loss by itself (S25): float32 scalar, 0 where there is nothing."""

    def parameters(self, model: Any) -> dict[str, Any]:
        """Path -> master weight of every trainable parameter of a model, bound or native (S29). In `loss_fn` they are
        what gradients are taken by, also where the model computes with casts of them."""

    def init(self, model: Any, recipe: Recipe, **options: Any) -> State:
        """A fresh state. Raises what S20 asks for, before the first step."""

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        """The whole step: S6 to S14, without host synchronisation where the framework's optimizer allows it."""

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        """The first half: `loss_fn` sees one model, or a tuple of models when there are several states."""

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        """The second half for one or several states that share a scaler (S14): flag, clip, optimizer, scale."""

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        """(parameter path, gradient) pairs, for reports."""

    def export_state(self, state: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Every array of the state by a `/`-separated name, on the host. The loss scale lies under `loss_scale/`."""

    def import_state(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> State:
        """`state` with its arrays replaced. Names, shapes and dtypes are already checked to be those of
        `export_state(state)`, counters not to be negative, and `check_arrays` (if there is one) had nothing to say."""

    def refresh(self, state: Any, model: Any, growth: Growth) -> State:
        """The state that goes on after the model was changed (S28): that of `init`, with scale, counters and steps, and
        of every parameter that `growth.stayed` names its optimizer state and count.

        `model` is None where the user gave none. A state that shares arrays with the new one refuses to step then.
        """

    def testing(self) -> Harness:
        """Models of this framework for the conformance suite, the demo and the parity runner."""
