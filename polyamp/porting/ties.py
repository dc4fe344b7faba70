"""Arrays that are used twice, a head tied to an embedding above all: tied on one side and not on the other. Called by
`port`, after `matching`, which leaves out layers that have no array of their own."""

from __future__ import annotations

from collections.abc import Mapping

from polyamp.errors import PortError
from polyamp.porting.fits import fit
from polyamp.porting.inventory import Inventory, NativeLayer
from polyamp.porting.lazy import Lazy
from polyamp.porting.matching import Match, Matching
from polyamp.porting.names import name_of


class Kept:
    """What has to hold of ties once the new values are known.

    Args:
        equal: layers of the source that must equal what the target ties them to.
        notes: what is to be said.
    """

    def __init__(self, equal: list[Match], notes: list[str]) -> None:
        self._equal = equal
        self._notes = notes

    def check(self, leaves: Mapping[str, Lazy]) -> list[str]:
        """The notes, after looking at values where a tie asks for it.

        Raises:
            PortError: the target ties what has values of its own in the source.
        """
        import numpy as np

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


def settled(found: Matching, source: Inventory, target: Inventory) -> Kept:
    """Give layers that have no partner one that is tied; changes `found`."""
    equal: list[Match] = []
    notes: list[str] = []
    tied_ours, tied_theirs = _tied(source), _tied(target)
    for layer in list(found.alone[1]):  # a head of its own here, tied in the source
        partner = _partner(layer, [each for each in tied_ours if fit(each, layer) is not None])
        if partner is not None and (way := fit(partner, layer)) is not None:
            found.alone[1].remove(layer)
            found.pairs.append(Match(partner, layer, way, "name"))
            owner = next(leaf.tied for leaf in partner.leaves.values() if leaf.tied is not None)
            notes.append(
                f"{layer.path} has the values of {owner} in the source, where both are one array; here they part as "
                "soon as they are trained"
            )
    for layer in list(found.alone[0]):  # a head of its own in the source, tied here
        partner = _partner(layer, [each for each in tied_theirs if fit(layer, each) is not None])
        if partner is not None and (way := fit(layer, partner)) is not None:
            found.alone[0].remove(layer)
            equal.append(Match(layer, partner, way, "name"))
            notes.append(f"{partner.path} is tied here; in the source {layer.path} has the same values of its own")
    return Kept(equal, notes)


def _tied(inventory: Inventory) -> list[NativeLayer]:
    return [layer for layer in inventory.layers if any(leaf.tied is not None for leaf in layer.leaves.values())]


def _partner(layer: NativeLayer, tied: list[NativeLayer]) -> NativeLayer | None:
    if len(tied) == 1:
        return tied[0]
    named = [each for each in tied if name_of(each.path) == name_of(layer.path)]
    return named[0] if len(named) == 1 else None
