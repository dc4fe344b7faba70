"""`PortReport`: what `port` did and what it noticed, and the tables of its errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.differences import Difference, listed

if TYPE_CHECKING:
    from polyamp.porting.check import Checked


@dataclasses.dataclass(frozen=True)
class Moved:
    """A layer that was moved.

    Attributes:
        source: its path in the source.
        target: its path in the target.
        kind: its kind, such as "dense".
        told: what told: "names=", "name", "number", "alone" (nothing else fits), "neighbour" or "order".
    """

    source: str
    target: str
    kind: str
    told: str


@dataclasses.dataclass(frozen=True)
class PortReport:
    """What `polyamp.port` returns beside the model; `str` shows it.

    Attributes:
        moved: every layer of the target that got its values, in the target's order.
        differences: what the weights do not carry and is not alike, with the line that would make it so.
        merges: what the target cannot hold apart, a sentence each.
        notes: what else was done or is to be known, a sentence each.
        missing: with `strict=False`: paths of the target's layers that were left as they are.
        unused: with `strict=False`: paths of the source's layers that went nowhere.
        unseen: attribute -> number of layers that show it on one side alone, so that it was not compared.
        checked: what `check=` measured; None without it.
    """

    moved: Sequence[Moved]
    differences: Sequence[Difference] = ()
    merges: Sequence[str] = ()
    notes: Sequence[str] = ()
    missing: Sequence[str] = ()
    unused: Sequence[str] = ()
    unseen: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checked: Checked | None = None

    @property
    def clean(self) -> bool:
        """Whether every layer was moved whole and nothing differs."""
        return not (self.differences or self.merges or self.missing or self.unused)

    def __str__(self) -> str:
        lines = [f"{len(self.moved)} layer{'s' * (len(self.moved) != 1)} moved"]
        by_order = [each for each in self.moved if each.told == "order"]
        if by_order:
            lines[0] += f", {len(by_order)} of them told apart by their order alone (check=batch proves it)"
        for title, entries in (
            ("differences: the weights do not carry these", listed(self.differences)),
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


def sides(
    ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer], heading: tuple[str, str], *, limit: int = 12
) -> str:
    """Two columns of layers, for a message.

    Args:
        ours: layers of the source.
        theirs: layers of the target.
        heading: what the columns are called.
        limit: rows of each; the rest is counted.
    """
    columns = []
    for layers, title in zip((ours, theirs), heading, strict=True):
        rows = [title, *(shown(layer) for layer in layers[:limit])]
        rows += [f"... and {len(layers) - limit} more"] if len(layers) > limit else []
        columns.append(rows or [title])
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    width = max(map(len, padded[0]))
    return "\n".join(f"  {one:<{width}}  |  {two}".rstrip() for one, two in zip(*padded, strict=True))


def shown(layer: NativeLayer) -> str:
    """One layer in a line: its path, kind and shapes.

    >>> import numpy as np
    >>> from polyamp.porting.layouts.forms import Form, same
    >>> from polyamp.porting.layouts.inventory import Leaf
    >>> from polyamp.porting.layouts.lazy import Lazy
    >>> kernel = Leaf("head/kernel", Lazy.of(np.zeros((2, 3))))
    >>> shown(NativeLayer("head", {"kernel": kernel}, (Form("dense", same("kernel")),)))
    'head: dense, kernel (2, 3)'
    """
    form = layer.forms[0]
    try:
        shapes = form.shapes(layer.arrays)
    except (ValueError, KeyError):
        shapes = {name: array.shape for name, array in layer.arrays.items()}
    kinds = " or ".join(dict.fromkeys(each.kind.replace("_", " ") for each in layer.forms))
    return f"{layer.path}: {kinds}, " + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
