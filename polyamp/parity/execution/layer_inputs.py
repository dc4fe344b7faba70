"""Order of the rows of dense layers next to a flatten, from what the layers of both sides take in one pass (S21).

The first side's samples go to the other process, where the second side runs with the first's weights until the orders
no longer change (`polyamp.porting.flatten_trace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from polyamp.porting.check import ChannelOrderAdapter
from polyamp.porting.flatten_trace import FlattenTrace
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.matching.flatten_order import ChannelOrder, OrderQuestion
from polyamp.porting.transfer_plan import TransferPlan

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

    RunInOrders = Callable[[Mapping[str, ChannelOrder]], Evaluation]
    """Function that runs the second side with the first's weights in some orders of rows."""

_MAX_SAMPLES: Final = 16


def may_flatten(inventory: Inventory) -> bool:
    """Return whether a model has both convolutions and dense layers, so that one may take flattened channels."""
    kinds = [layer.forms[0].kind for layer in inventory.layers]
    return "dense" in kinds and any(find_kind(kind).is_convolution for kind in kinds)


def first_samples(found: Evaluation) -> Evaluation:
    """Return an evaluation with the inputs of a few samples, to be handed to another process."""
    inputs = {path: np.array(array[:_MAX_SAMPLES]) if array.ndim else array for path, array in found.inputs.items()}
    return Evaluation(found.outputs, {}, {}, inputs)


def find_row_orders(
    plan: TransferPlan,
    source: Inventory,
    target: Inventory,
    ours: Callable[[], Evaluation | None],
    run: RunInOrders,
) -> tuple[TransferPlan, list[str]]:
    """Return the plan with an order for every layer, and a note for each that the runs do not show.

    A layer whose inputs differ between the sides, so that no order fits, has the nearer of the two orders: the first
    side's, or that of flattened channels.

    Args:
        plan: the plan, with its questions.
        source, target: layers of the first and of the second side.
        ours: returns what the first side's layers took; None if that was not observed.
        run: runs the second side.
    """
    if not plan.questions and not plan.traced:
        return plan, []
    found = ours()
    if not plan.questions and found is None:
        return plan, []
    adapter = ChannelOrderAdapter(source, target)
    trace = FlattenTrace(source, target, plan.pairs, plan.channel_orders, plan.questions, plan.traced, adapter.array)
    one = Evaluation([], {}, {}) if found is None else found
    two = first_samples(run(trace.orders))
    for _ in range(len(trace.paths[1]) + 2):  # each run settles at least the next layer
        if not trace.update(one, two):
            break
        two = first_samples(run(trace.orders))
    left, orders = trace.unsettled(), dict(trace.orders)
    reasons, notes = trace.reasons(one, two), []
    for question in left:
        guess = question.guess if _is_flattened(question, plan, one, two) else None
        old = orders.pop(question.path, ChannelOrder())
        if question.rows:
            new = dataclasses.replace(old, rows=() if guess is None else guess.rows)
        else:
            new = dataclasses.replace(old, columns=() if guess is None else guess.columns)
        if new.rows or new.columns:
            orders[question.path] = new
        taken = "the first side's" if guess is None else "that of flattened channels"
        notes.append(
            f"the order of {'rows' if question.rows else 'columns'} of {question.path} is not shown by a run of both "
            f"sides ({reasons[question.path]}). It is compared in {taken}; rows= says it: "
            f'rows={{"{question.path}": None}} or "channels"'
        )
    return plan._replace(channel_orders=orders, questions=()), notes


def _is_flattened(question: OrderQuestion, plan: TransferPlan, one: Evaluation, two: Evaluation) -> bool:
    """Return whether flattened channels are nearer to what the second side took than the first side's order."""
    if question.guess is None:
        return False
    path = question.path if question.rows else question.following
    match = next((each for each in plan.pairs if each.target.path == path), None)
    ours = None if match is None else one.inputs.get(match.source.path)
    theirs = two.inputs.get(path)
    if not question.rows or ours is None or theirs is None or ours.size != theirs.size or not ours.size:
        return True
    length = match.fit.source.shapes(match.source.arrays)["kernel"][0] if match is not None else 1
    if ours.size % length:
        return True
    one_side, other = (np.asarray(array, np.float64).reshape(-1, length) for array in (ours, theirs))
    index: Any = np.arange(length)
    for segment in question.guess.rows:
        index = segment.permute(index)
    return float(np.linalg.norm(one_side[:, index] - other)) < float(np.linalg.norm(one_side - other))
