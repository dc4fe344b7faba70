"""The first half of the reference step: scaled loss, gradients, and their sums over micro-batches (S6 to S8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from polyamp.errors import GradientError
from polyamp.recipe.recipe import Recipe
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import XP, Array, dtype_name
from polyamp.reference.models import BoundMLP
from polyamp.reference.tensor import Tensor
from polyamp.results import Gradients, LossFunction
from polyamp.rules import refusals, weights
from polyamp.rules.batches import check_has_rows, host_array
from polyamp.rules.weights import Elements, Loss, Totals, WeightFunction
from polyamp.rules.window import Window, joins
from polyamp.trees import leaves, map_tree, map_trees


class Pass(NamedTuple):
    """One forward and backward pass over several models.

    Attributes:
        loss: the loss, float32, and what it is a mean over.
        values: per model, the gradients of the scaled loss; None for a parameter that it does not depend on (S23).
        running: per model, its running statistics afterwards.
    """

    loss: Loss
    values: list[dict[str, Array | None]]
    running: list[Any]


def entered(batch: Any, recipe: Recipe) -> Any:
    """The batch as it goes into a step: not empty (S24), and NumPy's float64 as float32 (S26)."""
    check_has_rows(len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, np.ndarray) and leaf.ndim)
    numbers = (np.ndarray, np.generic)
    return map_tree(lambda x: host_array(x, recipe.policy.param) if isinstance(x, numbers) else x, batch)


def separate(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, weight: WeightFunction | None
) -> tuple[Array, Any, list[Gradients]]:
    """The loss, aux and unscaled gradients of one batch, for one or several states (S6, S7)."""
    done = _differentiated(loss_fn, states, batch, weight=weights.of_batch(weight, batch))
    loss, found = _counted(done.loss), _weight(done.loss.weight)
    pairs = zip(done.values, done.running, strict=True)  # the loss was multiplied by the first state's scale
    return loss, done.loss.aux, [Gradients(_unscaled(own, states[0]), after, loss, found) for own, after in pairs]


def accumulate(
    loss_fn: LossFunction, state: Any, batches: list[Any], window: Window, weight: WeightFunction | None
) -> tuple[Array, Any, Gradients]:
    """Mean loss, stacked aux and unscaled gradients over micro-batches, each by its weight (S8)."""
    if state.recipe.accumulate_steps == 1:
        loss, aux, (gradients,) = separate(loss_fn, [state], batches[0], weight)
        return loss, aux, gradients
    given = [weights.of_batch(weight, batch) for batch in batches]
    totals, passes = None, _passes(loss_fn, state, batches, window, given)
    if passes is None:  # a sum of means: what each is divided by has to be known before there are gradients
        losses = [_forward(loss_fn, [state], batch)[0] for batch in batches]
        totals = weights.totals_of([weights.counts_of(*pair) for pair in zip(losses, window.sizes, strict=True)])
        passes = _passes(loss_fn, state, batches, window, given, totals)
        assert passes is not None
    losses = [done.loss for done in passes]
    own: Sequence[Any] = window.sizes
    if totals is not None:
        own = (1,) * len(batches)
    elif weights.consistent(losses):
        own = [loss.weight for loss in losses]
    else:
        elements = weights.Elements()
        own = [
            elements.share(*each) for each in zip((x.size for x in losses), window.sizes, window.shares, strict=True)
        ]
    whole = float(np.sum(np.asarray(own, np.float64)))
    factors = [float(each) / (whole or 1.0) for each in own]
    total: dict[str, Array | None] = {}
    for done, factor in zip(passes, factors, strict=True):
        total = {k: _sum(total.get(k), _times(v, factor)) for k, v in done.values[0].items()}
    parts = [_counted(one) * factor for one, factor in zip(losses, factors, strict=True) if factor]
    loss = np.asarray(sum(parts), np.float32)
    auxes = [one.aux for one in losses]
    found = None
    if totals is not None or weights.consistent(losses) or not whole:
        found = _weight(whole if totals is None else sum(totals.counts))
    aux = None if auxes[0] is None else map_trees(_stack, auxes)
    return loss, aux, Gradients(_unscaled(total, state), passes[-1].running[0], loss, found)


def _passes(
    loss_fn: LossFunction,
    state: Any,
    batches: list[Any],
    window: Window,
    given: Sequence[Any],
    totals: Totals | None = None,
) -> list[Pass] | None:
    """The passes of a window, through which running statistics flow; None where they ask for `totals`."""
    passes: list[Pass] = []
    elements = weights.Elements()
    for batch, rows, own in zip(batches, window.sizes, given, strict=True):
        done = _differentiated(loss_fn, [state], batch, elements, weight=own, totals=totals, rows=rows)
        if done.loss.terms and totals is None and len(batches) > 1:
            return None
        passes.append(done)
        state = msgspec.structs.replace(state, model=state.model.with_arrays(state.model.parameters, *done.running))
    return passes


def _forward(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, elements: Elements | None = None, **how: Any
) -> tuple[Loss, list[Any], list[Any]]:
    """The loss as a tensor, and per model the parameters' tensors and the running statistics; `how` is for
    `weights.read`, `elements` of the window."""
    inputs = [{name: Tensor(value) for name, value in state.model.parameters.items()} for state in states]
    models = [s.model.with_arrays(tensors, s.model.running) for s, tensors in zip(states, inputs, strict=True)]
    bound = [BoundMLP(model, state.plan) for model, state in zip(models, states, strict=True)]
    result, found = weights.call(loss_fn, bound[0] if len(bound) == 1 else tuple(bound), batch)
    loss = weights.read(result, found, XP, selects=elements is not None, **how)
    selects = elements is not None and loss.own is None and not loss.terms and elements.differ(found, how["rows"])
    if selects or ("rows" in how and weights.is_unclear(loss, found)):
        weights.warn_unclear(loss_fn, weights.line_of(found))
    return loss, inputs, [model.running for model in models]


def _differentiated(
    loss_fn: LossFunction, states: Sequence[Any], batch: Any, elements: Elements | None = None, **how: Any
) -> Pass:
    """One forward and backward pass; the gradients hold the scale (S6), and not yet what the batch weighs."""
    loss, inputs, running = _forward(loss_fn, states, batch, elements, **how)
    if not isinstance(loss.value, Tensor):
        raise GradientError("loss_fn returned a loss that does not depend on the model.")
    refusals.check_loss(loss.value.shape, dtype_name(loss.value.dtype))
    wide = ops.cast(loss.value, "float32")
    scaled = wide * states[0].scale_state.scale if states[0].recipe.loss_scaler.scales else wide
    flat = iter(ops.gradients(scaled, [value for tensors in inputs for value in tensors.values()]))
    values = [{name: next(flat) for name in tensors} for tensors in inputs]
    return Pass(loss._replace(value=wide.data.reshape(()), aux=map_tree(_value, loss.aux)), values, running)


def _unscaled(values: dict[str, Array | None], state: Any) -> dict[str, Array | None]:
    """Gradients divided by the scale that produced them, float32 (S7)."""
    if not state.recipe.loss_scaler.scales:
        return values
    return {name: None if value is None else value / state.scale_state.scale for name, value in values.items()}


def _weight(weight: Any) -> Array | None:
    return None if weight is None else np.asarray(weight, np.float32)


def _counted(loss: Loss) -> Array:
    """The loss of a batch; 0 where nothing of it counts."""
    value: Array = loss.value
    return np.zeros_like(value) if loss.weight is not None and not loss.weight > 0.0 else value


def _times(value: Array | None, factor: float) -> Array | None:
    """A gradient times what its micro-batch counts, in float32 at least; zeros where that is 0, whatever the gradient
    holds."""
    if value is None:
        return None
    wide = np.promote_types(value.dtype, np.float32)
    return value.astype(wide) * wide.type(factor) if factor > 0.0 else np.zeros_like(value, wide)


def _sum(one: Array | None, other: Array | None) -> Array | None:
    """The sum over micro-batches; one that does not depend on the parameter adds nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _value(leaf: Any) -> Any:
    return leaf.data if isinstance(leaf, Tensor) else leaf


def _stack(leaves: list[Any]) -> Array:
    arrays = [np.asarray(leaf) for leaf in leaves]
    return np.concatenate(arrays) if joins([array.shape for array in arrays]) else np.stack(arrays)
