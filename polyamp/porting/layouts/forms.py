"""`Form`: how the arrays of a layer as a framework keeps them lead to the canonical ones of its kind, and back.

A backend gives a form for each layer that it finds; a third party gives one for a layer of its own (`register`). Data
alone: `arrays` runs the operations forward, `leaves` runs the same ones backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.operations import Moves, Operation, Shape

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Native arrays of a layer, by their names in it, and the canonical arrays that they are.

    Args:
        native: names of the framework's arrays, such as ("weight",).
        canonical: names of the canonical arrays, such as ("kernel",).
        operations: from native to canonical, in this order; none where both are the same array.

    Example:
        >>> from polyamp.porting.layouts.operations import Transpose
        >>> Rule(("weight",), ("kernel",), (Transpose((1, 0)),)).canonical
        ('kernel',)
    """

    native: tuple[str, ...]
    canonical: tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    def shapes(self, native: list[Shape]) -> list[Shape]:
        """Canonical shapes of native ones."""
        for operation in self.operations:
            native = operation.shapes(native)
        return native

    def forward(self, arrays: list[Array]) -> list[Array]:
        """Canonical arrays of native ones."""
        for operation in self.operations:
            arrays = operation.forward(arrays)
        return arrays

    def backward(self, arrays: list[Array]) -> list[Array]:
        """Native arrays of canonical ones."""
        for operation in reversed(self.operations):
            arrays = operation.backward(arrays)
        return arrays

    def gradients(self, arrays: list[Array]) -> list[Array]:
        """Canonical gradients of native ones."""
        for operation in self.operations:
            arrays = operation.gradients(arrays)
        return arrays

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Native moments of an optimizer, of canonical ones."""
        for operation in reversed(self.operations):
            arrays = operation.moments(arrays)
        return arrays

    def losses(self, arrays: list[Array]) -> list[str]:
        """What `backward` loses of these canonical arrays, a phrase each."""
        lost = []
        for operation in reversed(self.operations):
            lost += [phrase] if (phrase := operation.loses(arrays)) else []
            arrays = operation.backward(arrays)
        return lost


def same(*names: str) -> tuple[Rule, ...]:
    """Rules of arrays that are canonical as they are, under their own names.

    >>> same("scale", "bias")[1].canonical
    ('bias',)
    """
    return tuple(Rule((name,), (name,)) for name in names)


@dataclasses.dataclass(frozen=True)
class Form:
    """A layer's kind, the rules of its arrays, and what beside them makes it what it is.

    Args:
        kind: one of `kinds.KINDS`, or a name of a third party's.
        rules: how its arrays lead to the canonical ones. Together they name every array of the layer once.
        attributes: what the weights do not carry, under the names of the kind's table; plain JSON data. One that
            cannot be read is left out: it is then not compared.

    Example:
        >>> from polyamp.porting.layouts.operations import Transpose
        >>> import numpy as np
        >>> form = Form("dense", (Rule(("weight",), ("kernel",), (Transpose((1, 0)),)), *same("bias")))
        >>> native = {"weight": Lazy.of(np.zeros((2, 3))), "bias": Lazy.of(np.zeros(2))}
        >>> form.arrays(native)
        {'kernel': Lazy(float64[3, 2]), 'bias': Lazy(float64[2])}
    """

    kind: str
    rules: tuple[Rule, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def shapes(self, leaves: Mapping[str, Lazy]) -> dict[str, Shape]:
        """The shapes of the canonical arrays.

        Raises:
            ValueError: the arrays are none of this form.
        """
        found: dict[str, Shape] = {}
        for rule in self.rules:
            found.update(zip(rule.canonical, rule.shapes([leaves[name].shape for name in rule.native]), strict=True))
        return found

    def arrays(self, leaves: Mapping[str, Lazy], *, gradients: bool = False) -> dict[str, Lazy]:
        """The canonical arrays, of the native ones by their names in the layer.

        Args:
            leaves: the native arrays.
            gradients: they are gradients with respect to them.
        """
        found: dict[str, Lazy] = {}
        for rule in self.rules:
            native = [leaves[name] for name in rule.native]
            if not rule.operations:
                found.update(zip(rule.canonical, native, strict=True))
                continue
            run = rule.gradients if gradients else rule.forward
            shapes = rule.shapes([array.shape for array in native])
            made = _deferred(rule.canonical, shapes, native[0].dtype, run, native)
            found.update(made if gradients else _derived(made, rule, native))
        return found

    def leaves(self, arrays: Mapping[str, Lazy], like: Mapping[str, Lazy], *, moments: bool = False) -> dict[str, Lazy]:
        """The native arrays, of the canonical ones; `like` holds the native arrays that are there now.

        Their shapes are those of `like`, their dtypes those of the canonical arrays.

        Args:
            arrays: the canonical arrays.
            like: native arrays, or anything with their shapes.
            moments: they are an optimizer's moments, which lie as gradients do.
        """
        found: dict[str, Lazy] = {}
        for rule in self.rules:
            canonical = [arrays[name] for name in rule.canonical]
            shapes = [like[name].shape for name in rule.native]
            if not moments and (native := _native(rule, canonical, shapes)):
                found.update(zip(rule.native, native, strict=True))
                continue
            run = rule.moments if moments else rule.backward
            found.update(_deferred(rule.native, shapes, canonical[0].dtype, run, canonical))
        return found

    def losses(self, arrays: Mapping[str, Lazy]) -> list[str]:
        """What the layer cannot hold of canonical arrays, a phrase each; reads only those that may lose something."""
        lost = []
        for rule in self.rules:
            canonical = [arrays[name] for name in rule.canonical]
            if all(isinstance(operation, Moves) for operation in rule.operations) or _native(rule, canonical):
                continue
            lost += rule.losses([array.read() for array in canonical])
        return lost


class _Derived(Lazy):
    """A canonical array that knows what it was made of: where the other side has the same operations, the native arrays
    themselves are what it gets, without a copy and to the last bit."""

    __slots__ = ("native", "number", "operations")

    native: list[Lazy]
    number: int
    operations: tuple[Operation, ...]


def _derived(made: dict[str, Lazy], rule: Rule, native: list[Lazy]) -> dict[str, Lazy]:
    found: dict[str, Lazy] = {}
    for number, (name, array) in enumerate(made.items()):
        found[name] = known = _Derived(array.shape, array.dtype, array.read)
        known.native, known.number, known.operations = native, number, rule.operations
    return found


def _native(rule: Rule, canonical: list[Lazy], shapes: list[Shape] | None = None) -> list[Lazy] | None:
    """The native arrays of which these canonical ones were made by the same operations; None if they were not."""
    first = canonical[0]
    if not isinstance(first, _Derived) or first.operations != rule.operations:
        return None
    for number, array in enumerate(canonical):
        if not isinstance(array, _Derived) or array.native is not first.native or array.number != number:
            return None
    whole = len(first.native) == len(rule.native) and (
        shapes is None or [array.shape for array in first.native] == shapes
    )
    return first.native if whole else None


def _deferred(
    names: tuple[str, ...],
    shapes: list[Shape],
    dtype: Any,
    run: Callable[[list[Array]], list[Array]],
    arrays: list[Lazy],
) -> dict[str, Lazy]:
    def reader(number: int) -> Callable[[], Array]:
        return lambda: run([array.read() for array in arrays])[number]

    return {
        name: Lazy(shape, dtype, reader(number)) for number, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
