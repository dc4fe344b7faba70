"""`settled`: two inventories beside each other, matched, compared, and refused where they do not fit. What moving a
model and moving a training state have in common; called by `port` and `port_state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.matching import ties
from polyamp.porting.matching.differences import Compared, compare
from polyamp.porting.matching.flatten import Order, orders, unknown
from polyamp.porting.matching.matching import Match
from polyamp.porting.matching.renaming import checked
from polyamp.porting.refusals import check_whole
from polyamp.porting.report import Moved


class Settled(NamedTuple):
    """What moves from one model to the other.

    Attributes:
        pairs: the layers that move.
        turned: path of a target's dense layer -> what has to be reordered in it.
        compared: what weights do not carry.
        kept: what has to hold of ties once the values are known.
        missing: paths of the target's layers that stay as they are; none in a strict port.
        unused: paths of the source's layers that go nowhere; none in a strict port.
    """

    pairs: Sequence[Match]
    turned: Mapping[str, Order]
    compared: Compared
    kept: ties.Kept
    missing: Sequence[str]
    unused: Sequence[str]

    @property
    def moved(self) -> list[Moved]:
        """The pairs, for a report."""
        return [Moved(each.source.path, each.target.path, each.fit.target.kind, each.told) for each in self.pairs]


def settled(source: Inventory, target: Inventory, names: Mapping[str, str] | None, *, strict: bool) -> Settled:
    """What moves, and what does not.

    Raises:
        PortError: `names` is none; with `strict`, something does not move.
    """
    found, kept = ties.matched(source, target, checked(names))
    compared = compare(source, target, found.pairs)
    turned = orders(source, target, found.pairs)
    refused = check_whole(found, compared, source, target, strict=strict)
    if strict and (error := unknown(turned)) is not None:
        raise error
    blind = {path for path, order in turned.items() if order.first is None}
    pairs = [each for each in found.pairs if id(each) not in refused and each.target.path not in blind]
    moved = {id(each) for each in pairs}
    left = [each for each in found.pairs if id(each) not in moved]
    alike = [[layer.path for group in found.alike for layer in group[side]] for side in (0, 1)]
    return Settled(
        pairs,
        {path: order for path, order in turned.items() if path not in blind},
        compared,
        kept,
        [*(layer.path for layer in found.alone[1]), *alike[1], *(each.target.path for each in left)],
        [*(layer.path for layer in found.alone[0]), *alike[0], *(each.source.path for each in left)],
    )
