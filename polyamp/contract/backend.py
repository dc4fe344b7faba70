"""Contract between polyamp and a framework: the `Backend` and `State` protocols and the types they exchange.

A backend is one object of this protocol, registered under the entry-point group `polyamp.backends`. The line
`BACKEND: Final[Backend] = TorchBackend()` in a backend's package lets type checkers verify the contract.
`polyamp.conformance` tests its behaviour against the semantics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from polyamp.array_namespace import ArrayNamespace
from polyamp.contract.casting_report import CastingReport
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules.group_members import GroupMembers
from polyamp.rules.refresh import RefreshPlan
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp.rules.update_decision import Skip

if TYPE_CHECKING:
    import numpy as np

    from polyamp.contract.harness import Harness
    from polyamp.errors import PolyampError


class BackendInfo(NamedTuple):
    """Description of a loaded backend.

    Attributes:
        framework: name of the framework's distribution ("torch").
        version: its version.
        devices: names of the available devices, the default one first.
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
    """Model in training, generic in the model's type. In JAX a pytree; in torch and Keras it contains the user's own
    module. Framework-specific attributes are on its class, such as `polyamp_torch.TorchState`: for a type checker,
    `assert isinstance(state, polyamp_torch.TorchState)`."""

    @property
    def backend(self) -> Backend:
        """The backend that created it."""

    @property
    def recipe(self) -> Recipe:
        """The recipe it was created with."""

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
    def watch(self) -> StuckScaleMonitor:
        """The host-side count of this state's steps (S17), shared with the state that a step returns."""

    @property
    def groups(self) -> GroupMembers | None:
        """The hyperparameters of every parameter (S27); None while a model is not built. If a backend's states have no
        groups, because it predates them, `init` rejects a recipe with groups."""


ValueAndGrad = Callable[[Sequence[Any], Any], tuple[Any, list[Gradients]]]
"""`(states, batch) -> (value, one Gradients per state)`; `value` is the result of `loss_fn`, its loss in float32."""


class LossFunctions(Protocol):
    """Framework functions for the formulas of `polyamp.losses` (S24), in float32.

    Labels passed in are within the range of the classes. Arrays also support `shape` and the operators of arithmetic,
    comparison and indexing.
    """

    def in_float32(self) -> contextlib.AbstractContextManager[Any]:
        """Return a scope in which arithmetic on float32 arrays stays in float32 under any autocast (S4)."""

    def wide(self, values: Any, like: Any) -> Any:
        """Convert native or NumPy numbers to a float32 array on the device of `like`, differentiably."""

    def constant(self, values: Any, like: Any) -> Any:
        """Convert as `wide` does, but without a gradient, for counts."""

    def indices(self, labels: Any, like: Any) -> Any:
        """Convert native or NumPy labels to an array of signed integers on the device of `like`."""

    def on_host(self, labels: Any) -> np.ndarray[Any, Any] | None:
        """Return the labels as a NumPy array if that needs no device sync; None otherwise and while tracing."""

    def classes(self, logits: Any) -> Any:
        """Return the length of the last axis: an int, or an integer scalar if a compiler does not know it."""

    def mean_squared_error(self, predictions: Any, targets: Any) -> Any:
        """Return the elementwise squared error, float32."""

    def softmax_cross_entropy(self, logits: Any, labels: Any, reduction: str) -> Any:
        """Return cross-entropy with integer labels, float32, reduced over rows or not; the fastest native version."""

    def sigmoid_cross_entropy(self, logits: Any, targets: Any) -> Any:
        """Return the elementwise binary cross-entropy, float32."""

    def huber(self, predictions: Any, targets: Any, delta: float) -> Any:
        """Return the elementwise Huber loss, float32."""

    def log_softmax(self, logits: Any) -> Any:
        """Return the log-softmax along the last axis, float32."""

    def pick(self, values: Any, labels: Any) -> Any:
        """Return `values[..., labels]`: one element per row, shape (...) from values of shape (..., classes)."""

    def take(self, values: Any, labels: Any) -> Any:
        """Return `values[labels]` from values of shape (classes,)."""

    def exp(self, values: Any) -> Any:
        """Return e to the power of the values, float32."""

    def log(self, values: Any) -> Any:
        """Return the natural logarithm, float32."""

    def diagonal(self, values: Any) -> Any:
        """Return the diagonal of a square matrix."""

    def positions(self, values: Any, axis: int) -> Any:
        """Return 0, 1, ... for the elements of an axis, float32; its length may be unknown to a compiler."""

    def ctc(self, logits: Any, labels: Any, logit_lengths: Any, label_lengths: Any, blank: int) -> Any:
        """Return the CTC loss of each sequence, float32, shape (batch,).

        Args:
            logits: float32, shape (batch, frames, classes), before the softmax.
            labels: integers, shape (batch, length), classes other than the blank, also where they do not count.
            logit_lengths: float32, shape (batch,).
            label_lengths: float32, shape (batch,). An alignment exists.
            blank: the class of the blank.
        """

    def linear(self, x: Any, weight: Any, bias: Any, dtype: str | None) -> Any:
        """Return `x @ weight.T + bias` with x of shape (..., in), weight (out, in) and bias (out,) or None.

        The product runs in `dtype` under any autocast. None: as a product that the program writes here, in the compute
        dtype inside a region of autocast, else in the dtype of `x`.
        """

    def map_chunks(
        self, function: Callable[..., Any], arrays: Sequence[Any], shared: Sequence[Any], axis: int, chunks: int
    ) -> Any:
        """Return `function(*arrays, *shared)`, computed for one part of the arrays after the other.

        The backward pass computes each part again and keeps nothing of it. The gradients of 16-bit `shared` arrays are
        summed over the parts in float32.

        Args:
            function: maps a part of each array, and the shared arrays, to an array whose axis `axis` is that of the
                part. Its inputs may be wider than those given here.
            arrays: arrays of one length along `axis`: a floating one, then integers, which have no gradient.
            shared: floating arrays that each part uses whole.
            axis: the axis to cut, counted from the front.
            chunks: number of parts, or fewer if the axis is shorter. The last part may be shorter or padded with zeros.
        """

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Choose elementwise between arrays or Python numbers, in the array's dtype; float32 for two numbers."""

    def sum(self, values: Any, axis: int | None = None) -> Any:
        """Return the sum of all elements or over one axis, float32."""

    def mean(self, values: Any, axis: int | None = None) -> Any:
        """Return the mean of all elements or over one axis, float32."""


@runtime_checkable
class HasCastingReports(Protocol):
    """Optional protocol: a backend that says in which dtype each operation runs (`polyamp.explain`)."""

    def explain(self, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any) -> CastingReport:
        """Return the casting report of `target(*inputs)`. With `strict`, raise for an operation without a rule.

        `options` are those of `init`, for a loss function with its model.
        """


@runtime_checkable
class HasCompiledCastingReports(Protocol):
    """Optional protocol: a backend that says the same of compiled code (`polyamp.explain(compiled=True)`)."""

    def explain_compiled(
        self, target: Any, policy: Policy, *inputs: Any, strict: bool = False, **options: Any
    ) -> CastingReport:
        """Return the casting report of `target(*inputs)` once compiled."""


@runtime_checkable
class HasOperationRules(Protocol):
    """Optional protocol: a backend whose autocast has per-operation rules that `Policy.op_rules` can change."""

    changes_op_rules: bool
    """Whether it can; True."""


@runtime_checkable
class HasFloat8Products(Protocol):
    """Optional protocol: a backend that multiplies activations and parameters in 8 bits (S36)."""

    has_float8_products: bool
    """Whether it does; True."""


@runtime_checkable
class HasNativeScaler(Protocol):
    """Optional protocol: a backend with a native loss-scaling object, for users with their own training loop."""

    def native_scaler(self, scaler: LossScaler, **options: Any) -> Any:
        """Return the framework's own object for a scaler, created with its own options."""


@runtime_checkable
class ResumesOptimizers(Protocol):
    """Optional protocol: a backend that describes a native optimizer's hyperparameters and the arrays that store them.

    Without it, `restore` compares only the class of a native optimizer, and takes every array from the file.
    """

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        """Return "type" and hyperparameters of the state's native optimizer at `init`, as plain values by name."""

    def setting_of(self, state: Any, name: str) -> str | None:
        """Return the setting whose current value is in the array `name` of `export_state`, such as
        "optimizer.learning_rate"; None for every other array."""


@runtime_checkable
class ChecksArrays(Protocol):
    """Optional protocol: a backend that checks more of arrays than their names, shapes and dtypes."""

    def check_arrays(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[str]:
        """Return one sentence for each problem that `import_state` would have with the arrays. Changes nothing."""


@runtime_checkable
class KeepsAverages(Protocol):
    """Optional protocol: a backend whose states have moving averages of their parameters (S34)."""

    def averaged(self, state: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields the model with its averages, and then puts the parameters back."""

    def averaged_model(self, state: Any) -> Any:
        """Return a new model with the averages. Raises `UnsupportedError` if the model cannot be copied."""


@runtime_checkable
class MonitorsSteps(Protocol):
    """Optional protocol: a backend whose `train_step` takes `monitor=`, a `polyamp.monitor.slots.MonitorSelection`, and
    returns `StepResult.monitor` (S35)."""

    monitors_steps: bool
    """Always true."""


@runtime_checkable
class ConsumesStates(Protocol):
    """Optional protocol: a backend whose `train_step` may consume the arrays of the state that it is given."""

    def hand_back(self, consumed: Any, state: Any) -> None:
        """Give a consumed state the arrays of the state that its step made, because the step raises (S17)."""


@runtime_checkable
class DescribesStates(Protocol):
    """Optional protocol: a backend that describes its checkpoints, so `polyamp.port` reads them in other frameworks."""

    def describe_state(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Return a JSON description of `arrays`, the result of `export_state` for this state. Raises nothing."""


@runtime_checkable
class ExplainsFailures(Protocol):
    """Optional protocol: a backend that explains certain errors of its framework in a step."""

    def explain_error(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        """Return the error to raise in place of the framework's, with the received value and a fix; None if unknown.

        Args:
            error: the error that a step, or its first half, raised; not a polyamp error.
            states: the states that were passed.
            batch: the batch as the user passed it.
        """


class Backend(Protocol):
    """Framework implementation that polyamp builds on."""

    @property
    def name(self) -> str:
        """Short name as users write it: "torch"."""

    @property
    def xp(self) -> ArrayNamespace:
        """Array namespace for polyamp's framework-independent formulas."""

    @property
    def losses(self) -> LossFunctions:
        """Loss functions."""

    def info(self) -> BackendInfo:
        """Return framework, version and devices."""

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        """Create a 0-dim array, on the device of `like` or on the default one."""

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy an array to the host; bfloat16 becomes `ml_dtypes.bfloat16`."""

    def is_concrete(self, array: Any) -> bool:
        """Return False for an array without a value, because a compiler is tracing."""

    def cast(self, tree: Any, dtype: str, *, float64: bool = False) -> Any:
        """Cast the floating leaves of a tree (S2); float64 leaves only if `float64`."""

    def native_policy(self, policy: Policy) -> Any:
        """Return the framework's own object for a policy."""

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        """Wrap a function or a model in a callable that runs under the policy."""

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        """Return the scalar loss in float32, times `scale` unless that is None (S6). Raises `LossError`."""

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        """Return float32 gradients divided by `scale`, and their finite flag (S10). Raises `GradientError`."""

    def regularization(self, model: Any) -> Any:
        """Return the regularization that a model, bound or native, adds to its loss (S25): float32 scalar, or 0."""

    def parameters(self, model: Any) -> dict[str, Any]:
        """Return path -> master weight of every trainable parameter of a model, bound or native (S29). In `loss_fn`
        gradients are taken with respect to them, even if the model computes with casts of them."""

    def init(self, model: Any, recipe: Recipe, **options: Any) -> State:
        """Create a fresh state. Raises the errors of S20 before the first step."""

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        """Return the whole step, S6 to S14, without host synchronisation if the framework's optimizer allows it."""

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        """Return the first half. `loss_fn` receives one model, or a tuple of models for several states."""

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        """Run the second half for one or several states that share a scaler (S14): flag, clip, optimizer, scale."""

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        """Return (parameter path, gradient) pairs, for reports."""

    def export_state(self, state: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Return every array of the state on the host, by `/`-separated name; the loss scale under `loss_scale/`."""

    def import_state(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> State:
        """Return `state` with its arrays replaced. The caller has checked that names, shapes and dtypes equal those of
        `export_state(state)`, that counters are not negative, and that `check_arrays`, if any, reports nothing."""

    def refresh(self, state: Any, model: Any, plan: RefreshPlan) -> State:
        """Return the state that continues after a change of the model (S28): that of `init`, with scale, counters and
        steps, and with optimizer state and count of the parameters in `plan.surviving_parameters`.

        `model` is None if the user passed none. An old state that shares arrays with the new one then refuses to step.
        """

    def testing(self) -> Harness:
        """Return models of this framework for the conformance suite, the demo and the parity runner."""
