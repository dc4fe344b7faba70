"""Matching of models with tied arrays, such as a head tied to an embedding, also if only one side ties them.

The matching leaves out layers without arrays of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.matching import LayerMatch, Matching, match_layers


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


def match_with_ties(source: Inventory, target: Inventory, names: Mapping[str, str]) -> tuple[Matching, TieConstraints]:
    """Return the layers in pairs, whether a head is tied on both sides, on one side or on none."""
    first = match_layers(source, target, names)
    found = first
    for tied in ((True, False), (False, True)):
        if found.is_complete or not _has_ties((source, target)[tied.index(True)]):
            continue
        again = match_layers(source, target, names, tied=tied)
        found = again if again.is_complete else found
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
    return found, TieConstraints(equal, notes)


def _has_ties(inventory: Inventory) -> bool:
    return any(_tie_owners(layer) for layer in inventory.layers)


def _tie_owners(layer: NativeLayer) -> list[str]:
    """Return the names of the arrays to which a layer is tied."""
    return [leaf.tied for leaf in layer.leaves.values() if leaf.tied is not None]
