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
        turned: path of a target's dense layer -> its reordering.
        compared: comparison of settings that weights do not carry.
        kept: constraints on ties, checked once the values are known.
        missing: paths of the target's layers that stay unchanged; empty in a strict port.
        unused: paths of the source's layers that are not moved; empty in a strict port.
    """

    pairs: Sequence[LayerMatch]
    turned: Mapping[str, ChannelOrder]
    compared: AttributeComparison
    kept: tied_weights.TieConstraints
    missing: Sequence[str]
    unused: Sequence[str]

    @property
    def moved(self) -> list[PortedLayer]:
        """The pairs, for a report."""
        return [PortedLayer(each.source.path, each.target.path, each.fit.target.kind, each.told) for each in self.pairs]


def make_transfer_plan(
    source: Inventory, target: Inventory, names: Mapping[str, str] | None, *, strict: bool
) -> TransferPlan:
    """Return the plan of a transfer.

    Raises:
        PortError: `names` is invalid; with `strict`, a layer cannot be moved.
    """
    found, kept = tied_weights.match_with_ties(source, target, check_rename_rules(names))
    compared = compare_attributes(source, target, found.pairs)
    turned = find_channel_orders(source, target, found.pairs)
    refused = check_complete(found, compared, source, target, strict=strict)
    if strict and (error := unknown_order_error(turned)) is not None:
        raise error
    blind = {path for path, order in turned.items() if order.first is None}
    pairs = [each for each in found.pairs if id(each) not in refused and each.target.path not in blind]
    moved = {id(each) for each in pairs}
    left = [each for each in found.pairs if id(each) not in moved]
    alike = [[layer.path for group in found.alike for layer in group[side]] for side in (0, 1)]
    return TransferPlan(
        pairs,
        {path: order for path, order in turned.items() if path not in blind},
        compared,
        kept,
        [*(layer.path for layer in found.alone[1]), *alike[1], *(each.target.path for each in left)],
        [*(layer.path for layer in found.alone[0]), *alike[0], *(each.source.path for each in left)],
    )
