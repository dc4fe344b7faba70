"""`Form` and `Rule`: conversion between a layer's native arrays and the canonical arrays of its kind, in both
directions.

A backend returns a form for each layer that it finds; a third party registers one for a custom layer (`register`). A
form is data alone: `arrays` runs the operations forward, `leaves` runs the same operations backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.layouts.operations import Chain, Moves, Operation, Shape


@dataclasses.dataclass(frozen=True)
class Rule:
    """Conversion between native arrays of a layer, by their names in it, and their canonical arrays.

    Args:
        native: names of the framework's arrays, such as ("weight",).
        canonical: names of the canonical arrays, such as ("kernel",).
        operations: from native to canonical, in this order; empty if both are the same array.

    Example:
        >>> from polyamp.porting.layouts.operations import Transpose
        >>> Rule(("weight",), ("kernel",), (Transpose((1, 0)),)).canonical
        ('kernel',)
    """

    native: tuple[str, ...]
    canonical: tuple[str, ...]
    operations: tuple[Operation, ...] = ()

    def shapes(self, native: list[Shape]) -> list[Shape]:
        """Return the canonical shapes for native shapes."""
        return Chain(self.operations).shapes(native)

    def forward(self, arrays: list[Array]) -> list[Array]:
        """Return the canonical arrays for native arrays."""
        return Chain(self.operations).forward(arrays)

    def backward(self, arrays: list[Array]) -> list[Array]:
        """Return the native arrays for canonical arrays."""
        return Chain(self.operations).backward(arrays)

    def gradients(self, arrays: list[Array]) -> list[Array]:
        """Return the canonical gradients for native gradients."""
        for operation in self.operations:
            arrays = operation.gradients(arrays)
        return arrays

    def moments(self, arrays: list[Array]) -> list[Array]:
        """Return an optimizer's native moments for canonical moments."""
        for operation in reversed(self.operations):
            arrays = operation.moments(arrays)
        return arrays

    def losses(self, arrays: list[Array]) -> list[str]:
        """Return what `backward` loses of these canonical arrays, a phrase each."""
        lost = []
        for operation in reversed(self.operations):
            lost += [phrase] if (phrase := operation.loses(arrays)) else []
            arrays = operation.backward(arrays)
        return lost


def same(*names: str) -> tuple[Rule, ...]:
    """Return rules for arrays that are canonical as they are, under their own names.

    >>> same("scale", "bias")[1].canonical
    ('bias',)
    """
    return tuple(Rule((name,), (name,)) for name in names)


@dataclasses.dataclass(frozen=True)
class Form:
    """Kind of a layer, the rules of its arrays, and the attributes that complete its definition.

    Args:
        kind: one of `layer_kinds.KINDS`, or a third party's name.
        rules: conversions to the canonical arrays. Together they name every array of the layer once.
        attributes: settings that the weights do not carry, under the names of the kind's table; plain JSON data.
            An unreadable attribute is left out, and then not compared.

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
        """Return the shapes of the canonical arrays.

        Raises:
            ValueError: the arrays do not fit this form.
        """
        return self.canonical_shapes({name: array.shape for name, array in leaves.items()})

    def canonical_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of the canonical arrays for those of the native arrays, by their names in the layer.

        Raises:
            ValueError: the arrays do not fit this form.
        """
        found: dict[str, Shape] = {}
        for rule in self.rules:
            found.update(zip(rule.canonical, rule.shapes([shapes[name] for name in rule.native]), strict=True))
        return found

    def with_native_names(self, names: Mapping[str, str]) -> Form:
        """Return the same form with other names of the native arrays, old name -> new name."""
        rules = (dataclasses.replace(rule, native=tuple(names[name] for name in rule.native)) for rule in self.rules)
        return dataclasses.replace(self, rules=tuple(rules))

    def arrays(self, leaves: Mapping[str, Lazy], *, gradients: bool = False) -> dict[str, Lazy]:
        """Return the canonical arrays for native arrays, which are given by their names in the layer.

        Args:
            leaves: the native arrays.
            gradients: whether the values are gradients with respect to the native arrays.
        """
        found: dict[str, Lazy] = {}
        for rule in self.rules:
            native = [leaves[name] for name in rule.native]
            if not rule.operations:
                found.update(zip(rule.canonical, native, strict=True))
                continue
            run = rule.gradients if gradients else rule.forward
            shapes = rule.shapes([array.shape for array in native])
            made = _lazy_arrays(rule.canonical, shapes, native[0].dtype, run, native)
            found.update(made if gradients else _derive_arrays(made, rule, native))
        return found

    def leaves(self, arrays: Mapping[str, Lazy], like: Mapping[str, Lazy], *, moments: bool = False) -> dict[str, Lazy]:
        """Return the native arrays for canonical arrays.

        Their shapes are those of `like`, the current native arrays. Their dtypes are those of the canonical arrays.

        Args:
            arrays: the canonical arrays.
            like: native arrays, or anything with their shapes.
            moments: whether the values are an optimizer's moments, which have the layout of gradients.
        """
        found: dict[str, Lazy] = {}
        for rule in self.rules:
            canonical = [arrays[name] for name in rule.canonical]
            shapes = [like[name].shape for name in rule.native]
            if not moments and (native := _original_arrays(rule, canonical, shapes)):
                found.update(zip(rule.native, native, strict=True))
                continue
            run = rule.moments if moments else rule.backward
            found.update(_lazy_arrays(rule.native, shapes, canonical[0].dtype, run, canonical))
        return found

    def losses(self, arrays: Mapping[str, Lazy]) -> list[str]:
        """Return what the layer cannot represent of canonical arrays, a phrase each. Reads only arrays that may lose
        something."""
        lost = []
        for rule in self.rules:
            canonical = [arrays[name] for name in rule.canonical]
            if all(isinstance(operation, Moves) for operation in rule.operations) or _original_arrays(rule, canonical):
                continue
            lost += rule.losses([array.read() for array in canonical])
        return lost


def parameter_form(name: str = "value") -> Form:
    """Return the form of a parameter of no layer, by its name in the module."""
    return Form("parameter", (Rule((name,), ("value",)),))


class _DerivedArray(Lazy):
    """Canonical array that records its native arrays. If the other side has the same operations, it gets the native
    arrays themselves, without a copy and bit for bit."""

    __slots__ = ("native", "number", "operations")

    native: list[Lazy]
    number: int
    operations: tuple[Operation, ...]


def _derive_arrays(made: dict[str, Lazy], rule: Rule, native: list[Lazy]) -> dict[str, Lazy]:
    found: dict[str, Lazy] = {}
    for number, (name, array) in enumerate(made.items()):
        found[name] = known = _DerivedArray(array.shape, array.dtype, array.read)
        known.native, known.number, known.operations = native, number, rule.operations
    return found


def _original_arrays(rule: Rule, canonical: list[Lazy], shapes: list[Shape] | None = None) -> list[Lazy] | None:
    """Return the native arrays from which the same operations derived these canonical ones; None if there are none."""
    first = canonical[0]
    if not isinstance(first, _DerivedArray) or first.operations != rule.operations:
        return None
    for number, array in enumerate(canonical):
        if not isinstance(array, _DerivedArray) or array.native is not first.native or array.number != number:
            return None
    whole = len(first.native) == len(rule.native) and (
        shapes is None or [array.shape for array in first.native] == shapes
    )
    return first.native if whole else None


def _lazy_arrays(
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
