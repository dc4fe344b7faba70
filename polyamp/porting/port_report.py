"""`PortReport`, the result and notes of a `port`, `CheckResult` in it, and the tables in its errors."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

from polyamp.display import first_lines
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.attribute_differences import Difference, format_differences

_MAX_WARNED: Final = 3
"""Largest number of differences in the warning."""
_MAX_ROWS: Final = 12
"""Largest number of layers of each side in a table."""


@dataclasses.dataclass(frozen=True)
class PortedLayer:
    """A moved layer.

    Attributes:
        source: its path in the source.
        target: its path in the target.
        kind: its kind, such as "dense".
        told: evidence of the match: "names=", "name", "number", "alone" (nothing else fits), "neighbour", "batch" or
            "order".
    """

    source: str
    target: str
    kind: str
    told: str


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Errors measured by a check.

    Attributes:
        outputs: largest relative error of the outputs: the largest difference over the largest output.
        gradients: "path/array" of the target -> relative error of its gradient.
        modules: path of a layer of the target -> relative error of its output, if both sides report it.
    """

    outputs: float
    gradients: Mapping[str, float]
    modules: Mapping[str, float]

    def __str__(self) -> str:
        worst = max(self.gradients, key=self.gradients.__getitem__, default=None)
        said = f"checked in float32: outputs within {self.outputs:.1e}"
        if worst is None:
            return said
        return f"{said}, gradients of {len(self.gradients)} parameters within {self.gradients[worst]:.1e} ({worst})"


@dataclasses.dataclass(frozen=True, repr=False)
class PortReport:
    """Report that `polyamp.port` returns with the model; `str` formats it.

    Attributes:
        moved: every layer of the target that received values, in the target's order.
        differences: settings that the weights do not carry and that differ, with the line of code that equalises them.
        merges: arrays that the target cannot store separately, a sentence each.
        notes: other actions and remarks, a sentence each.
        missing: with `strict=False`: paths of the target's layers that were left unchanged.
        unused: with `strict=False`: paths of the source's layers that were not moved.
        unseen: attribute -> number of layers that report it on only one side, so that it was not compared.
        checked: errors measured by `check=`; None without it.
    """

    moved: Sequence[PortedLayer]
    differences: Sequence[Difference] = ()
    merges: Sequence[str] = ()
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    unused: Sequence[str] = ()
    unseen: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checked: CheckResult | None = None

    @property
    def clean(self) -> bool:
        """Whether every layer was moved completely, nothing differs, and both sides show the epsilon of each norm.

        A norm without an epsilon does not exist, so one that is not shown is not known. A setting of another kind may
        be one that the other side does not have.
        """
        return not ("epsilon" in self.unseen or self.differences or self.merges or self.missing or self.unused)

    def __str__(self) -> str:
        lines = [f"{len(self.moved)} layer{'s' * (len(self.moved) != 1)} moved"]
        by_order = [each for each in self.moved if each.told == "order"]
        if by_order:
            lines[0] += f", {len(by_order)} of them told apart by their order alone (check=batch proves it)"
        for title, entries in (
            ("differences: the weights do not carry these", format_differences(self.differences)),
            ("merged: the target cannot hold these apart", self.merges),
            ("left as they are in the target", self.missing),
            ("not used of the source", self.unused),
            ("notes", self.notes),
        ):
            if entries:
                lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
        if self.unseen:
            shown = ", ".join(f"{name} of {count}" for name, count in sorted(self.unseen.items()))
            lines.append(f"not compared, for only one side shows it: {shown}")
        if self.checked is not None:
            lines.append(str(self.checked))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return first_lines(str(self))


def warn_of_differences(report: PortReport, stacklevel: int) -> None:
    """Warn of settings that differ, because a caller who does not print the report would not notice.

    Args:
        report: the report.
        stacklevel: level of the user's call, as in `warnings.warn`.
    """
    lines = format_differences(report.differences)
    if lines:
        more = f"; and {len(lines) - _MAX_WARNED} more, print(report) shows them" if len(lines) > _MAX_WARNED else ""
        said = "; ".join(lines[:_MAX_WARNED])
        warnings.warn(f"what the weights do not carry differs: {said}{more}", UserWarning, stacklevel=stacklevel + 1)


def format_sides(ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer], heading: tuple[str, str]) -> str:
    """Return two columns of layers for a message; what does not fit is counted.

    Args:
        ours: layers of the source.
        theirs: layers of the target.
        heading: titles of the columns.
    """
    columns = []
    for layers, title in zip((ours, theirs), heading, strict=True):
        rows = [title, *(format_layer(layer) for layer in layers[:_MAX_ROWS])]
        rows += [f"... and {len(layers) - _MAX_ROWS} more"] if len(layers) > _MAX_ROWS else []
        columns.append(rows)
    width = max(map(len, columns[0]))
    both = itertools.zip_longest(*columns, fillvalue="")
    return "\n".join(f"  {one:<{width}}  |  {two}".rstrip() for one, two in both)


def format_layer(layer: NativeLayer) -> str:
    """Return one line for a layer: its path, kind and shapes.

    >>> import numpy as np
    >>> from polyamp.porting.layouts.layer_layout import Form, same
    >>> from polyamp.porting.layouts.inventory import InventoryLeaf
    >>> from polyamp.porting.layouts.lazy_array import Lazy
    >>> kernel = InventoryLeaf("head/kernel", Lazy.of(np.zeros((2, 3))))
    >>> format_layer(NativeLayer("head", {"kernel": kernel}, (Form("dense", same("kernel")),)))
    'head: dense, kernel (2, 3)'
    """
    form = layer.forms[0]
    try:
        shapes = form.shapes(layer.arrays)
    except (ValueError, KeyError):
        shapes = {name: array.shape for name, array in layer.arrays.items()}
    kinds = " or ".join(dict.fromkeys(each.kind.replace("_", " ") for each in layer.forms))
    return f"{layer.path}: {kinds}, " + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
