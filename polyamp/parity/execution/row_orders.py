"""`settle_orders`, which finds the order of dense layers' rows next to a flatten from the first pass of both sides.

The second side runs with the first one's values (`polyamp.porting.flatten_trace`). Only orders that a flatten of
channels can have count: another one is a difference of the models, which the comparison has to show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from polyamp.porting.check import ChannelOrderAdapter
from polyamp.porting.flatten_trace import FlattenTrace, is_close
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Array
from polyamp.porting.matching.flatten_order import ChannelOrder, OrderQuestion
from polyamp.porting.transfer_plan import TransferPlan

MAX_SAMPLES: Final = 16
"""Largest length of the first axis of what a pass shows."""
_CLEAR: Final = 0.5
"""Share of another order's distance below which an order is the nearer one, where neither is close."""

RunPlan = Callable[[TransferPlan], Evaluation]
"""Function that runs the second side with the first one's values by a plan."""


def settle_orders(
    plan: TransferPlan, source: Inventory, target: Inventory, one: Evaluation, run: RunPlan
) -> tuple[TransferPlan, list[str]]:
    """Return the plan without questions, and notes on the layers whose order the pass does not show.

    A layer that takes other numbers on both sides, because a layer before it differs, has the order that is nearer.

    Args:
        plan: the plan.
        source: the first side's layers.
        target: the second side's layers.
        one: the first side's pass.
        run: runs the second side.
    """
    adapt = ChannelOrderAdapter(source, target).array
    rows = [each.path for each in plan.questions if each.rows]
    trace = FlattenTrace(
        source, target, plan.pairs, plan.channel_orders, plan.questions, rows, adapt, is_flatten_only=True
    )
    two = run(plan._replace(channel_orders=trace.orders))
    for _ in range(len(trace.paths[1]) + 2):  # each run settles at least the next layer
        if not trace.update(one, two):
            break
        two = run(plan._replace(channel_orders=trace.orders))
    found, left = trace.orders, []
    partner = {each.target.path: each.source.path for each in plan.pairs}
    for question in trace.unsettled():
        if question.rows:
            ours, theirs = one.inputs.get(partner[question.path]), two.inputs.get(question.path)
            order, is_clear = _nearer_order(question, ours, theirs)
            found = _with_rows(found, question.path, order)
            left += [] if is_clear else [question]
        else:
            ours, theirs = one.inputs.get(partner.get(question.following, "")), two.inputs.get(question.following)
            is_shown = ours is not None and theirs is not None and is_close(adapt(ours), theirs)
            left += [] if is_shown else [question]
    if left and not any(each.path in two.inputs for each in left):  # no call of a compiled model can be seen
        chosen = [orders for orders in (found, _without(found, left)) if _agrees(one, run, plan, orders, adapt)]
        if len(chosen) == 1:
            found, left = chosen[0], []
    reasons = trace.reasons(one, two)
    return plan._replace(channel_orders=found, questions=()), [
        order_note(each, reasons.get(each.path, ""), each.path in found) for each in left
    ]


def likeliest_orders(plan: TransferPlan, reason: str) -> tuple[TransferPlan, list[str]]:
    """Return the plan with the likeliest orders, and notes that say so, where no pass of both sides is there.

    Args:
        plan: the plan.
        reason: why there is none.
    """
    orders = dict(plan.channel_orders)
    for each in plan.questions:
        if each.guess is not None:
            old = orders.get(each.path, ChannelOrder())
            orders[each.path] = ChannelOrder(each.guess.rows or old.rows, each.guess.columns or old.columns)
    notes = [order_note(each, reason, each.path in orders) for each in plan.questions]
    return plan._replace(channel_orders=orders, questions=()), notes


def order_note(question: OrderQuestion, reason: str, is_reordered: bool) -> str:
    """Return the note on a layer whose order is not known."""
    what = "rows" if question.rows else "columns"
    taken = "in the order of flattened channels" if is_reordered else "as they are"
    return (
        f"the first batch does not show the order of {question.path}'s {what}"
        f'{f" ({reason})" if reason else ""}; they were taken {taken}. rows={{"{question.path}": None}} says that it '
        'takes no flattened channels, "channels" that it does'
    )


def _nearer_order(question: OrderQuestion, ours: Array | None, theirs: Array | None) -> tuple[ChannelOrder, bool]:
    """Return the nearer one of the likeliest order and none, and whether it is clearly nearer."""
    guess = question.guess or ChannelOrder()
    length = sum(segment.major * segment.minor for segment in guess.rows)
    if ours is None or theirs is None or ours.size != theirs.size or not length or ours.size % length:
        return guess, False
    values = ours.reshape(-1, length)
    index = np.arange(length)
    for segment in guess.rows:
        index = segment.permute(index)
    distances = [_distance(values, theirs), _distance(values[:, index], theirs)]
    is_guess = not distances[0] < distances[1]
    return guess if is_guess else ChannelOrder(), min(distances) <= _CLEAR * max(distances) and max(distances) > 0.0


def _distance(ours: Array, theirs: Array) -> float:
    """Return 1 minus the correlation of two arrays; 1 if there is none."""
    one, two = (np.ravel(each).astype(np.float64) for each in (ours, theirs))
    one, two = one - one.mean(), two - two.mean()
    size = float(np.sqrt((one @ one) * (two @ two)))
    return 1.0 - float(one @ two) / size if np.isfinite(size) and size > 0.0 else 1.0


def _with_rows(orders: dict[str, ChannelOrder], path: str, order: ChannelOrder) -> dict[str, ChannelOrder]:
    old = orders.get(path, ChannelOrder())
    new = ChannelOrder(order.rows, old.columns, order.evidence)
    rest = {name: each for name, each in orders.items() if name != path}
    return {**rest, path: new} if new.rows or new.columns else rest


def _without(orders: dict[str, ChannelOrder], questions: Sequence[OrderQuestion]) -> dict[str, ChannelOrder]:
    paths = {each.path for each in questions}
    return {path: order for path, order in orders.items() if path not in paths}


def _agrees(
    one: Evaluation, run: RunPlan, plan: TransferPlan, orders: dict[str, ChannelOrder], adapt: Callable[[Array], Array]
) -> bool:
    """Return whether both sides return the same numbers with some orders."""
    two = run(plan._replace(channel_orders=orders))
    pairs = list(zip(one.outputs, two.outputs, strict=False))
    return bool(pairs) and all(is_close(adapt(ours), theirs, 1e-3) for ours, theirs in pairs)
