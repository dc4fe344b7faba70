"""First half of the reference step: scaled loss, gradients, and their sums over micro-batches (S6 to S8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from polyamp.errors import GradientError
from polyamp.recipe.recipe import Recipe
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import XP, Array, dtype_name
from polyamp.reference.models import PolicyMLP
from polyamp.reference.tensor import Tensor
from polyamp.results import Gradients, LossFunction
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.accumulation import Accumulation, is_concatenated
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.rules.loss_weights import ElementCounts, LossOutput, TermTotals, WeightFunction
from polyamp.trees import leaves, map_tree


class ReferencePass(NamedTuple):
    """One forward and backward pass over several models.

    Attributes:
        loss: the loss, float32, and the count of which it is a mean.
        values: per model, the gradients of the scaled loss; None for a parameter on which it does not depend (S23).
        running: per model, its running statistics afterwards.
    """

    loss: LossOutput
    values: list[dict[str, Array | None]]
    running: list[Any]


def prepare_batch(batch: Any, recipe: Recipe) -> Any:
    """Check that a batch is not empty (S24) and cast its float64 arrays to float32 (S26)."""
    check_has_rows(len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, np.ndarray) and leaf.ndim)
    numbers = (np.ndarray, np.generic)
    return map_tree(lambda x: host_array(x, recipe.policy.param) if isinstance(x, numbers) else x, batch)


def single_batch_gradients(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, weight: WeightFunction | None
) -> tuple[Array, Any, list[Gradients]]:
    """Return the loss, aux and unscaled gradients of one batch, for one or several states (S6, S7)."""
    done = _forward_backward(loss_fn, states, batch, weight=loss_weights.batch_loss_weight(weight, batch))
    loss, found = _counted_loss(done.loss), _weight_scalar(done.loss.weight)
    pairs = zip(done.values, done.running, strict=True)  # the loss is multiplied by the first state's scale
    return loss, done.loss.aux, [Gradients(_unscale(own, states[0]), after, loss, found) for own, after in pairs]


def accumulate_gradients(
    loss_fn: LossFunction, state: Any, batches: list[Any], window: Accumulation, weight: WeightFunction | None
) -> tuple[Array, Any, Gradients]:
    """Return the mean loss, stacked aux and unscaled gradients of micro-batches, each by its weight (S8)."""
    if state.recipe.accumulate_steps == 1:
        loss, aux, (gradients,) = single_batch_gradients(loss_fn, [state], batches[0], weight)
        return loss, aux, gradients
    given = [loss_weights.batch_loss_weight(weight, batch) for batch in batches]
    totals, passes = None, _run_passes(loss_fn, state, batches, window, given)
    if passes is None:  # a sum of means: its divisors must be known before the backward pass
        losses = [_forward(loss_fn, [state], batch)[0] for batch in batches]
        totals = loss_weights.term_totals(
            [loss_weights.term_counts(*pair) for pair in zip(losses, window.sizes, strict=True)]
        )
        passes = _run_passes(loss_fn, state, batches, window, given, totals)
        assert passes is not None
    losses = [done.loss for done in passes]
    own: Sequence[Any] = window.sizes
    if totals is not None:
        own = (1,) * len(batches)
    elif loss_weights.has_own_weights(losses):
        own = [loss.weight for loss in losses]
    else:
        elements = loss_weights.ElementCounts()
        own = [
            elements.share(*each) for each in zip((x.size for x in losses), window.sizes, window.weights, strict=True)
        ]
    whole = float(np.sum(np.asarray(own, np.float64)))
    factors = [float(each) / (whole or 1.0) for each in own]
    total: dict[str, Array | None] = {}
    for done, factor in zip(passes, factors, strict=True):
        total = {k: _add_gradients(total.get(k), _scale_gradient(v, factor)) for k, v in done.values[0].items()}
    parts = [_counted_loss(one) * factor for one, factor in zip(losses, factors, strict=True) if factor]
    loss = np.asarray(sum(parts), np.float32)
    auxes = [one.aux for one in losses]
    found = None
    if totals is not None or loss_weights.has_own_weights(losses) or not whole:
        found = _weight_scalar(whole if totals is None else sum(totals.counts))
    aux = None if auxes[0] is None else map_tree(_stack_leaves, *auxes)
    return loss, aux, Gradients(_unscale(total, state), passes[-1].running[0], loss, found)


def _run_passes(
    loss_fn: LossFunction,
    state: Any,
    batches: list[Any],
    window: Accumulation,
    given: Sequence[Any],
    totals: TermTotals | None = None,
) -> list[ReferencePass] | None:
    """Run the micro-batches in order, passing on running statistics; None if they need `totals` first."""
    passes: list[ReferencePass] = []
    elements = loss_weights.ElementCounts()
    for batch, rows, own in zip(batches, window.sizes, given, strict=True):
        done = _forward_backward(loss_fn, [state], batch, elements, weight=own, totals=totals, rows=rows)
        if done.loss.terms and totals is None and len(batches) > 1:
            return None
        passes.append(done)
        state = msgspec.structs.replace(state, model=state.model.with_arrays(state.model.parameters, *done.running))
    return passes


def _forward(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, elements: ElementCounts | None = None, **how: Any
) -> tuple[LossOutput, list[Any], list[Any]]:
    """Return the loss as a tensor, and per model the parameters' tensors and the running statistics.

    `how` is for `loss_weights.parse_loss_output`; `elements` are those of the accumulation.
    """
    inputs = [{name: Tensor(value) for name, value in state.model.parameters.items()} for state in states]
    models = [s.model.with_arrays(tensors, s.model.running) for s, tensors in zip(states, inputs, strict=True)]
    bound = [PolicyMLP(model, state.plan) for model, state in zip(models, states, strict=True)]
    result, found = loss_weights.call_loss_fn(loss_fn, bound[0] if len(bound) == 1 else tuple(bound), batch)
    loss = loss_weights.parse_loss_output(result, found, XP, selects=elements is not None, **how)
    selects = elements is not None and loss.own is None and not loss.terms and elements.differ(found, how["rows"])
    if selects or ("rows" in how and loss_weights.has_unclear_count(loss, found)):
        loss_weights.warn_unclear_count(loss_fn, loss_weights.count_line(found))
    return loss, inputs, [model.running for model in models]


def _forward_backward(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, elements: ElementCounts | None = None, **how: Any
) -> ReferencePass:
    """Run one forward and backward pass; the gradients include the scale (S6), but not the batch's weight."""
    loss, inputs, running = _forward(loss_fn, states, batch, elements, **how)
    if not isinstance(loss.value, Tensor):
        raise GradientError("loss_fn returned a loss that does not depend on the model.")
    step_checks.check_loss(loss.value.shape, dtype_name(loss.value.dtype))
    wide = ops.cast(loss.value, "float32")
    scaled = wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide
    flat = iter(ops.gradients(scaled, [value for tensors in inputs for value in tensors.values()]))
    values = [{name: next(flat) for name in tensors} for tensors in inputs]
    return ReferencePass(
        loss._replace(value=wide.data.reshape(()), aux=map_tree(_array_value, loss.aux)), values, running
    )


def _unscale(values: dict[str, Array | None], state: Any) -> dict[str, Array | None]:
    """Divide gradients by the scale that produced them, in float32 (S7)."""
    if not state.recipe.loss_scaler.scales:
        return values
    return {name: None if value is None else value / state.scale_state.scale for name, value in values.items()}


def _weight_scalar(weight: Any) -> Array | None:
    return None if weight is None else np.asarray(weight, np.float32)


def _counted_loss(loss: LossOutput) -> Array:
    """Return the loss of a batch; 0 if nothing of it counts."""
    value: Array = loss.value
    return np.zeros_like(value) if loss.weight is not None and not loss.weight > 0.0 else value


def _scale_gradient(value: Array | None, factor: float) -> Array | None:
    """Multiply a gradient by its micro-batch's weight, in float32 at least; zeros if that is 0, even for inf or NaN."""
    if value is None:
        return None
    wide = np.promote_types(value.dtype, np.float32)
    return value.astype(wide) * wide.type(factor) if factor > 0.0 else np.zeros_like(value, wide)


def _add_gradients(one: Array | None, other: Array | None) -> Array | None:
    """Add gradients of micro-batches; None, of a loss that does not depend on the parameter, adds nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _array_value(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, Tensor) else leaf


def _stack_leaves(*leaves: Any) -> Array:
    arrays = [np.asarray(leaf) for leaf in leaves]
    return np.concatenate(arrays) if is_concatenated([array.shape for array in arrays]) else np.stack(arrays)
