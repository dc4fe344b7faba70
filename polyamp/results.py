"""Inputs and outputs of a step, in every framework's own arrays: `StepResult`, `Gradients`, the type of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from polyamp.display import html_table

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")


class StepResult(NamedTuple, Generic[ArrayT]):
    """Result of one step, as device scalars, so that reading one synchronises. `StepResult[torch.Tensor]` states their
    type to a type checker.

    The step itself does not synchronise, except for S17's check and native torch optimizers without fused kernels.

    Attributes:
        loss: the unscaled loss, float32 scalar; the mean over micro-batches and replicas by their weights (S8, S9).
            None from `apply_gradients`.
        aux: the auxiliary output of `loss_fn`, or None; stacked along a new leading axis when accumulating.
        grad_norm: global L2 norm of the unscaled gradients before clipping (S11), float32 scalar.
        scale: the loss scale after this step's adjustment, float32 scalar.
        skipped: True when nothing was applied (S12), boolean scalar: the gradients were not finite, or `weight` is 0.
        step: number of updates applied so far (S13), int32 scalar.
        weight: divisor of the mean loss, summed over micro-batches and replicas, float32 scalar, if it depends on
            values: labels that are not ignored, class weights, or the value of `train_step(weight=...)`. If it is 0,
            the step is skipped, and the loss is 0. None for a mean over the rows.
        monitor: figures for `Monitor.read`, from a step with a monitor inside of a compiled function of your own (S35);
            else None.
    """

    loss: ArrayT
    aux: Any
    grad_norm: ArrayT
    scale: ArrayT
    skipped: ArrayT
    step: ArrayT
    weight: ArrayT | None = None
    monitor: Any = None

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if value is not None}
        return html_table("StepResult", (), shown.items())


class Gradients(NamedTuple):
    """Result of `value_and_grad` for `apply_gradients`; a pytree in every framework.

    Attributes:
        values: gradients of the *unscaled* loss, in the parameters' dtype and structure (S7); inf or NaN where the
            scaled gradient overflowed; None for a parameter that the loss does not depend on (S23). Replace them with
            `gradients._replace(values=...)`.
        running: the model's running statistics after this forward pass. They are stored in the model when the update is
            applied, and dropped when it is skipped (S12). In JAX it also contains the parameters that the pass wrote
            and the model's random-number streams, which advance in both cases. In other frameworks the streams have
            already advanced.
        loss: the unscaled loss of these gradients, float32 scalar, for optimizers that need its value (optax's
            `value=`); None if it is unknown, as in `Gradients` made by hand.
        weight: see `StepResult.weight`; gradients whose weight is 0 are not applied.
    """

    values: Any
    running: Any
    loss: Any = None
    weight: Any = None


LossFunction = Callable[[Any, Any], Any]
"""`loss_fn(model, batch) -> loss` or `(loss, aux)`."""
StepFunction = Callable[[Any, Any], tuple[Any, StepResult]]
"""`(state, batch) -> (state, result)`."""
