"""What a step takes and gives back, in every framework's own arrays: `StepResult`, `Gradients`, the shape of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from polyamp.shown import html_table

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    ArrayT = TypeVar("ArrayT", default=Any)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT")


class StepResult(NamedTuple, Generic[ArrayT]):
    """What one step reports; device scalars, so that reading one synchronises. `StepResult[torch.Tensor]` says of which
    kind to a type checker.

    The step itself does not, but for the look of S17 and native torch optimizers without fused kernels.

    Attributes:
        loss: the unscaled loss, float32 scalar; the mean over micro-batches and replicas by their weights (S8, S9).
            None from `apply_gradients`.
        aux: what `loss_fn` returned beside the loss, or None; stacked along a new leading axis when accumulating.
        grad_norm: global L2 norm of the unscaled gradients before clipping (S11), float32 scalar.
        scale: the loss scale after this step's adjustment, float32 scalar.
        skipped: True when nothing was applied (S12), boolean scalar: the gradients were not finite, or `weight` is 0.
        step: number of updates applied so far (S13), int32 scalar.
        weight: what the mean of the loss is over, summed over micro-batches and replicas, float32 scalar, where that
            depends on values: labels that are not ignored, class weights, or what `train_step(weight=...)` gave. At 0
            there is nothing to learn: the step is skipped, and the loss is 0. None for a mean over the rows.
    """

    loss: ArrayT
    aux: Any
    grad_norm: ArrayT
    scale: ArrayT
    skipped: ArrayT
    step: ArrayT
    weight: ArrayT | None = None

    def _repr_html_(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if value is not None}
        return html_table("StepResult", (), shown.items())


class Gradients(NamedTuple):
    """What `value_and_grad` hands to `apply_gradients`; a pytree in every framework.

    Attributes:
        values: gradients of the *unscaled* loss, in the parameters' dtype and structure (S7); inf or NaN where the
            scaled gradient overflowed; None for a parameter that the loss does not depend on (S23). Replace them with
            `gradients._replace(values=...)`.
        running: the model's running statistics after this forward pass. They become the model's when the
            update is applied and are dropped when it is skipped (S12). In JAX the parameters that the pass wrote travel
            here too, and so do the model's random-number streams, which move on in both cases; elsewhere these have
            moved on already.
        loss: the unscaled loss that they are the gradients of, float32 scalar, for optimizers that ask for its value
            (optax's `value=`); None where it is not known, as in `Gradients` made by hand.
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
