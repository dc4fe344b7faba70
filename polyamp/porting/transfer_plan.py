"""`make_transfer_plan`, which matches two inventories, compares their attributes, and raises if they are incompatible.

The plan is common to moving a model and moving a training state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.matching import tied_weights
from polyamp.porting.matching.attribute_differences import AttributeComparison, compare_attributes
from polyamp.porting.matching.flatten_order import ChannelOrder, find_channel_orders, unknown_order_error
from polyamp.porting.matching.matching import LayerMatch
from polyamp.porting.matching.rename_rules import check_rename_rules
from polyamp.porting.port_errors import check_complete
from polyamp.porting.port_report import PortedLayer


class TransferPlan(NamedTuple):
    """Plan of the layers that move from one model to the other.

    Attributes:
        pairs: the layers that move.
        channel_orders: path of a target's dense layer -> its reordering.
        comparison: comparison of settings that weights do not carry.
        tie_constraints: constraints on ties, checked once the values are known.
        missing: paths of the target's layers that stay unchanged; empty in a strict port.
        unused: paths of the source's layers that are not moved; empty in a strict port.
    """

    pairs: Sequence[LayerMatch]
    channel_orders: Mapping[str, ChannelOrder]
    comparison: AttributeComparison
    tie_constraints: tied_weights.TieConstraints
    missing: Sequence[str]
    unused: Sequence[str]

    @property
    def moved(self) -> list[PortedLayer]:
        """The pairs, for a report."""
        return [
            PortedLayer(each.source.path, each.target.path, each.fit.target.kind, each.evidence) for each in self.pairs
        ]


def make_transfer_plan(
    source: Inventory, target: Inventory, names: Mapping[str, str] | None, *, strict: bool
) -> TransferPlan:
    """Return the plan of a transfer.

    Raises:
        PortError: `names` is invalid; with `strict`, a layer cannot be moved.
    """
    found, tie_constraints = tied_weights.match_with_ties(source, target, check_rename_rules(names))
    comparison = compare_attributes(source, target, found.pairs)
    orders = find_channel_orders(source, target, found.pairs)
    excluded = check_complete(found, comparison, source, target, strict=strict)
    if strict and (error := unknown_order_error(orders)) is not None:
        raise error
    unknown = {path for path, order in orders.items() if order.first is None}
    pairs = [each for each in found.pairs if id(each) not in excluded and each.target.path not in unknown]
    moved = {id(each) for each in pairs}
    left = [each for each in found.pairs if id(each) not in moved]
    indistinguishable = [[layer.path for group in found.indistinguishable for layer in group[side]] for side in (0, 1)]
    return TransferPlan(
        pairs,
        {path: order for path, order in orders.items() if path not in unknown},
        comparison,
        tie_constraints,
        [*(layer.path for layer in found.unmatched[1]), *indistinguishable[1], *(each.target.path for each in left)],
        [*(layer.path for layer in found.unmatched[0]), *indistinguishable[0], *(each.source.path for each in left)],
    )
