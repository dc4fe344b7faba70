"""`make_transfer_plan`, which matches two inventories, compares their attributes, and raises if they are incompatible,
and `new_leaf_values`, the values that it gives the target.

The plan is common to moving a model and moving a training state. Models may have tied arrays, such as a head tied to an
embedding, also if only one side ties them; the matching leaves out layers without arrays of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.array_layouts import check_forms, with_forms
from polyamp.porting.matching.attribute_differences import AttributeComparison, compare_attributes
from polyamp.porting.matching.flatten_order import (
    ChannelOrder,
    OrderQuestion,
    Rows,
    find_flatten_orders,
    question_error,
)
from polyamp.porting.matching.matching import LayerMatch, Matching, match_layers
from polyamp.porting.matching.part_joins import join_parts
from polyamp.porting.matching.rename_rules import check_rename_rules
from polyamp.porting.port_errors import check_complete, check_equality, dtype_error
from polyamp.porting.port_report import PortedLayer


class TieConstraints:
    """Conditions on ties that are checked once the new values are known.

    Args:
        equal: layers of the source that must equal the layers to which the target ties them.
        notes: notes for the report.
    """

    def __init__(self, equal: list[LayerMatch], notes: list[str]) -> None:
        self._equal = equal
        self._notes = notes

    def check(self, leaves: Mapping[str, Lazy]) -> list[str]:
        """Return the notes, after comparing values if a tie requires it.

        Raises:
            PortError: the target ties arrays that have different values in the source.
        """
        for each in self._equal:
            arrays = each.fit.target.leaves(each.fit.source.arrays(each.source.arrays), each.target.arrays)
            for name, value in arrays.items():
                owner = each.target.leaves[name].tied
                if owner is not None and owner in leaves and not np.array_equal(leaves[owner].read(), value.read()):
                    raise PortError(
                        f"the target ties {each.target.leaves[name].name!r} to {owner!r}, and the source has other "
                        f"values in {each.source.path!r}. Build the target without the tie."
                    )
        return self._notes


class TransferPlan(NamedTuple):
    """Plan of the layers that move from one model to the other.

    Attributes:
        pairs: the layers that move.
        channel_orders: path of a target's dense layer -> its reordering.
        questions: dense layers whose order is not known; a run of both models answers them.
        traced: paths of the target's dense layers whose inputs may be flattened channels.
        comparison: comparison of settings that weights do not carry.
        tie_constraints: constraints on ties, checked once the values are known.
        missing: paths of the target's layers that stay unchanged; empty in a strict port.
        unused: paths of the source's layers that are not moved; empty in a strict port.
    """

    pairs: Sequence[LayerMatch]
    channel_orders: Mapping[str, ChannelOrder]
    questions: Sequence[OrderQuestion]
    traced: Sequence[str]
    comparison: AttributeComparison
    tie_constraints: TieConstraints
    missing: Sequence[str]
    unused: Sequence[str]

    @property
    def moved(self) -> list[PortedLayer]:
        """The pairs, for a report."""
        return [
            PortedLayer(each.source.path, each.target.path, each.fit.target.kind, each.evidence) for each in self.pairs
        ]

    def without_questions(self, *, strict: bool, why: Mapping[str, str] = {}) -> TransferPlan:
        """Return the plan without the layers whose order is not known.

        Args:
            strict: whether such layers are an error.
            why: path of a layer -> why a batch does not show its order.

        Raises:
            PortError: there are such layers, with `strict`.
        """
        if self.questions and strict:
            raise question_error(self.questions, why)
        unknown = {each.path for each in self.questions}
        left = [each for each in self.pairs if each.target.path in unknown]
        return self._replace(
            pairs=[each for each in self.pairs if each.target.path not in unknown],
            channel_orders={path: order for path, order in self.channel_orders.items() if path not in unknown},
            questions=(),
            missing=[*self.missing, *(each.target.path for each in left)],
            unused=[*self.unused, *(each.source.path for each in left)],
        )


class PortOptions(NamedTuple):
    """Arguments of `polyamp.port` that say how the layers of both sides correspond; see there."""

    names: Mapping[str, str] | None = None
    strict: bool = True
    rows: Rows | None = None
    forms: Mapping[str, str | Form] | None = None


PlanMatching = Callable[[Matching], TransferPlan]
"""Function from a matching to its plan, with `strict=False`."""
Settler = Callable[[Matching, PlanMatching], Matching | str]
"""Function that pairs the alike layers of a matching, or returns why it cannot."""


def make_transfer_plan(
    source: Inventory,
    target: Inventory,
    names: Mapping[str, str] | None,
    *,
    strict: bool,
    rows: Rows | None = None,
    settle: Settler | None = None,
    absent_bias: bool = False,
    forms: Mapping[str, str | Form] | None = None,
) -> TransferPlan:
    """Return the plan of a transfer. Its questions are to be answered: by a run of both models, or by
    `without_questions`.

    Args:
        source: the source's layers.
        target: the target's layers.
        names: see `polyamp.port`.
        strict: see `polyamp.port`.
        rows: see `polyamp.port`.
        settle: function that finds which of several alike layers is which; None if there is no batch for it.
        absent_bias: whether a dense layer or convolution may have a bias that its counterpart lacks.
        forms: see `polyamp.port`.

    Raises:
        PortError: `names`, `rows` or `forms` is invalid; with `strict`, a layer cannot be moved.
    """
    rules = check_rename_rules(names)
    source, target, parts = with_forms(source, target, check_forms(forms))

    def rematch(more: Mapping[str, str]) -> Matching:
        return _match_with_ties(source, target, {**rules, **more}, absent_bias=absent_bias)

    found = rematch({})
    why = ""
    if settle is not None and found.indistinguishable and found.is_complete:

        def plan_matching(matching: Matching) -> TransferPlan:
            return _plan(join_parts(matching, parts), source, target, rows=rows)

        settled = settle(found, plan_matching)
        found, why = (found, settled) if isinstance(settled, str) else (settled, "")
    if strict:
        check_complete(found, source, target, rematch, why)
    return _plan(join_parts(found, parts), source, target, rows=rows, strict=strict)


def _plan(
    found: Matching,
    source: Inventory,
    target: Inventory,
    *,
    rows: Rows | None,
    strict: bool = False,
) -> TransferPlan:
    comparison = compare_attributes(source, target, found.pairs)
    excluded = check_equality(found, comparison, strict=strict)
    pairs = [each for each in found.pairs if id(each) not in excluded]
    orders = find_flatten_orders(source, target, pairs, rows)
    moved = {id(each) for each in pairs}
    left = [each for each in found.pairs if id(each) not in moved]
    indistinguishable = [[layer.path for group in found.indistinguishable for layer in group[side]] for side in (0, 1)]
    return TransferPlan(
        pairs,
        orders.known,
        orders.questions,
        orders.traced,
        comparison,
        _tie_constraints(found),
        [*(layer.path for layer in found.unmatched[1]), *indistinguishable[1], *(each.target.path for each in left)],
        [*(layer.path for layer in found.unmatched[0]), *indistinguishable[0], *(each.source.path for each in left)],
    )


def new_leaf_values(plan: TransferPlan, target: Inventory, *, strict: bool) -> tuple[dict[str, Lazy], list[str]]:
    """Return the new value of every leaf of the target by name, and notes about merged arrays."""
    leaves: dict[str, Lazy] = {}
    merges: list[str] = []
    wrong: list[str] = []
    for each in plan.pairs:
        arrays = each.fit.source.arrays(each.source.arrays)
        if each.target.path in plan.channel_orders:
            arrays = plan.channel_orders[each.target.path].apply(arrays)
        merges += [f"{each.target.path}: {phrase}" for phrase in each.fit.target.losses(arrays)]
        for name, value in each.fit.target.leaves(arrays, each.target.arrays).items():
            leaf = each.target.leaves[name]
            if leaf.tied is not None:
                continue
            if value.dtype != leaf.array.dtype:
                if strict:
                    wrong.append(f"{leaf.name}: {leaf.array.dtype} here, {value.dtype} in the source")
                value = _lazy_cast(value, leaf.array.dtype)
            leaves[leaf.name] = value
    if wrong:
        raise dtype_error(wrong, target)
    return leaves, merges


def _lazy_cast(value: Lazy, dtype: Any) -> Lazy:
    return Lazy(value.shape, dtype, lambda: value.read().astype(dtype))


def _match_with_ties(source: Inventory, target: Inventory, names: Mapping[str, str], *, absent_bias: bool) -> Matching:
    """Return the layers in pairs, whether a head is tied on both sides, on one side or on none. Biases that one side
    lacks are allowed only if there is no complete matching without."""
    first = match_layers(source, target, names)
    found = first
    for tied, once in itertools.product(((True, False), (False, True)), (False, True)):
        if found.is_complete or not _has_ties((source, target)[tied.index(True)]):
            continue
        again = match_layers(source, target, names, tied=tied, once=once)
        found = again if again.is_complete else found
    if absent_bias and not found.is_complete:
        again = match_layers(source, target, names, absent_bias=True)
        found = again if again.is_complete else found
    return found


def _tie_constraints(found: Matching) -> TieConstraints:
    notes, equal = [], []
    for each in found.pairs:
        owners = [_tie_owners(layer) for layer in (each.source, each.target)]
        if owners[0] and not owners[1]:
            notes.append(
                f"{each.target.path} has the values of {owners[0][0]} in the source, where both are one array; here "
                "they part as soon as they are trained"
            )
        elif owners[1] and not owners[0]:
            equal.append(each)
            notes.append(f"{each.target.path} is tied to {owners[1][0]} here, and has values of its own in the source")
    return TieConstraints(equal, notes)


def _has_ties(inventory: Inventory) -> bool:
    return any(_tie_owners(layer) for layer in inventory.layers)


def _tie_owners(layer: NativeLayer) -> list[str]:
    """Return the names of the arrays to which a layer is tied."""
    return [leaf.tied for leaf in layer.leaves.values() if leaf.tied is not None]
