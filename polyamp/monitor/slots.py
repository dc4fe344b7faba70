"""`MonitorSlots`: what a step collects for a monitor, as arrays of fixed shape on the device (S35).

Per module it is a histogram of binary exponents: the number of elements whose float32 exponent field is 0, 1, ..., 255.
Field 0 is zero (or below 2^-126), field 255 inf and NaN, field e in between a magnitude from 2^(e - 127) on. So one
array of counts says what underflows, is subnormal or overflows in any dtype and at any loss scale.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from polyamp.errors import ArgumentError
from polyamp.float_formats import FORMATS

EXPONENT_FIELDS: Final = 256
"""Values of the exponent field of a float32 number."""


class MonitorSelection(NamedTuple):
    """What a step collects. It is a constant of a compiled step.

    Attributes:
        gradients, weights, updates: whether statistics of these are collected.
        modules: None for one entry per module that has parameters; a depth, to which paths are cut; or glob patterns,
            for modules that match one.
        every: inside of a compiled function of the user's own, the statistics are computed in attempts whose number is
            a multiple of it. The host chooses the steps itself and has 1 here.
        activations: globs of the modules whose outputs are measured; empty for none.
        compute: the policy's compute dtype, in which outputs are judged; "" without activations.
        products: whether the rounding of the operands of products in 8 bits is measured (S36).
    """

    gradients: bool
    weights: bool
    updates: bool
    modules: int | tuple[str, ...] | None
    every: int
    activations: tuple[str, ...] = ()
    compute: str = ""
    products: bool = False

    def measures_output_of(self, module: str) -> bool:
        """Return whether the outputs of the module with this path are measured.

        >>> MonitorSelection(True, True, True, None, 1, ("encoder/**",)).measures_output_of("encoder/layers/0")
        True
        """
        return any(fnmatch.fnmatchcase(module, each) for each in self.activations)

    def module_of(self, parameter: str) -> str | None:
        """Return the module that a parameter counts for; None if it is not selected.

        >>> MonitorSelection(True, True, True, 1, 1).module_of("layers/0/mlp/kernel")
        'layers'
        """
        module = parameter.rpartition("/")[0]
        if isinstance(self.modules, int):
            return "/".join(module.split("/")[: self.modules])
        if self.modules is not None and not any(fnmatch.fnmatchcase(module, each) for each in self.modules):
            return None
        return module

    def modules_of(self, parameters: Sequence[str]) -> tuple[str, ...]:
        """Return the modules of a model's parameters, in the parameters' order."""
        return tuple(dict.fromkeys(found for name in parameters if (found := self.module_of(name)) is not None))


class OutputFigures(NamedTuple):
    """Figures of the outputs of one module, over all its calls in a step; each scalar or of one dtype.

    Attributes:
        sums: elements, zeros, underflows, subnormal numbers, overflows, and the sum of squares; shape (6,).
        largest: the largest absolute value, scalar; inf if one is not finite.
    """

    sums: Any
    largest: Any


class OutputLimits(NamedTuple):
    """Limits that an absolute value is compared with, for the shares of outputs in a dtype.

    Attributes:
        zero: up to it a value that is not zero becomes zero.
        normal: the smallest normal number.
        overflow: from it on a value becomes inf; inf for float32 and wider dtypes, whose arrays are judged as they are.
    """

    zero: float
    normal: float
    overflow: float


def output_limits(compute: str) -> OutputLimits:
    """Return the limits of a dtype, for values that are rounded to nearest.

    >>> output_limits("float16")
    OutputLimits(zero=2.9802322387695312e-08, normal=6.103515625e-05, overflow=65520.0)
    """
    form = FORMATS[compute]
    if form.bits > 32:  # figures are computed in float32
        return OutputLimits(0.0, 2.0**-149, math.inf)
    smallest = form.smallest_normal * 2.0**-form.fraction_bits
    half_a_digit = 2.0 ** (math.frexp(form.largest)[1] - form.fraction_bits - 2)
    return OutputLimits(
        smallest / 2.0, form.smallest_normal, math.inf if form.bits == 32 else form.largest + half_a_digit
    )


def check_selected_outputs(selection: MonitorSelection, paths: Iterable[str]) -> None:
    """Raise if no path of a model's modules is selected by `activations`.

    Raises:
        ArgumentError: names modules that there are.
    """
    known = list(dict.fromkeys(paths))
    if not any(map(selection.measures_output_of, known)):
        shown = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ArgumentError(
            f"activations={list(selection.activations)} matches none of the modules whose outputs can be read here. "
            f"They are: {shown or 'none'}. Use one of these paths, a glob such as 'encoder/**', or True for all."
        )


class MonitorSlots(NamedTuple):
    """What a step collected; a pytree in every framework.

    Attributes:
        read: whether the statistics were computed, boolean scalar; without them all counts are 0.
        scale: the scale of this step's loss, float32 scalar.
        carried: the factor that the gradients below still contain, float32 scalar.
        gradients: counts of exponent fields, int32, shape (modules, 256); None if not selected. A parameter without a
            gradient counts nowhere.
        gradient_norms: L2 norms, float32, shape (modules,).
        weights, weight_norms: the same of the parameters before the update.
        update_norms: L2 norms of the differences that the update made.
        activations: path -> figures of the outputs of each selected module that was called; None if not selected.
        products: path of a module -> figures of its products in 8 bits, float, shape (3, 4); None if not selected. A
            row each for activations, parameters and gradients: the number of elements, that of elements which are not
            zero and whose 8-bit number is, the sum of squares, and that of squares of what the rounding changed.
    """

    read: Any
    scale: Any
    carried: Any
    gradients: Any = None
    gradient_norms: Any = None
    weights: Any = None
    weight_norms: Any = None
    update_norms: Any = None
    activations: dict[str, OutputFigures] | None = None
    products: dict[str, Any] | None = None


class SlotFunctions(Protocol):
    """A framework's functions for `collect_slots`."""

    def exponent_counts(self, name: str, array: Any) -> Any:
        """Return how many elements of a parameter's array have each float32 exponent field, int32, shape (256,)."""

    def squares(self, name: str, array: Any) -> Any:
        """Return the sum of the squares of a parameter's array, float32 scalar."""

    def stack(self, values: Sequence[Any]) -> Any:
        """Stack arrays of one shape along a new axis."""

    def square_root(self, values: Any) -> Any:
        """Return the elementwise square root."""


def collect_slots(
    selection: MonitorSelection,
    functions: SlotFunctions,
    gradients: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    read: Any,
    scale: Any,
    carried: Any,
) -> MonitorSlots:
    """Return the slots of a step.

    Args:
        selection: what is collected.
        functions: the framework's.
        gradients: path -> gradient, without parameters that have none.
        before, after: path -> parameter around the update; `after` may be empty without `updates`.
        read, scale, carried: as in the slots.
    """
    modules = selection.modules_of(list(before))
    if not modules:  # no path matches
        selection = selection._replace(gradients=False, weights=False, updates=False)
    counts: list[Any] = []
    squares: list[Any] = []
    if selection.gradients:
        counts.append(_module_sums(selection, functions, functions.exponent_counts, modules, gradients, before))
        squares.append(_module_sums(selection, functions, functions.squares, modules, gradients, before))
    if selection.weights:
        counts.append(_module_sums(selection, functions, functions.exponent_counts, modules, before, before))
    if selection.weights or selection.updates:
        squares.append(_module_sums(selection, functions, functions.squares, modules, before, before))
    if selection.updates:
        moved = {name: after[name] - old for name, old in before.items() if selection.module_of(name) is not None}
        squares.append(_module_sums(selection, functions, functions.squares, modules, moved, before))
    found, norms = iter(counts), iter([functions.square_root(each) for each in squares])
    return MonitorSlots(
        read=read,
        scale=scale,
        carried=carried,
        gradients=next(found) if selection.gradients else None,
        gradient_norms=next(norms) if selection.gradients else None,
        weights=next(found) if selection.weights else None,
        weight_norms=next(norms) if selection.weights or selection.updates else None,
        update_norms=next(norms) if selection.updates else None,
    )


def add_update_norms(
    slots: MonitorSlots,
    selection: MonitorSelection,
    functions: SlotFunctions,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> MonitorSlots:
    """Return slots that were collected before an update with the norms of the weights and of the update.

    Args:
        slots: those of `collect_slots` with a selection without updates.
        selection: what is collected, with updates.
        functions: the framework's.
        before, after: path -> parameter around the update.
    """
    only = selection._replace(gradients=False, weights=False)
    rest = collect_slots(only, functions, {}, before, after, read=None, scale=None, carried=None)
    return slots._replace(weight_norms=rest.weight_norms, update_norms=rest.update_norms)


def _module_sums(
    selection: MonitorSelection,
    functions: SlotFunctions,
    measure: Callable[[str, Any], Any],
    modules: Sequence[str],
    arrays: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> Any:
    """Return the sum of a measure over the arrays of each module, stacked; of a module without arrays, that of none."""
    own = _by_module(selection, modules, arrays)
    like = next(iter(parameters.values()))
    nothing = None if all(own) else measure("", like[:0] if like.shape else like.reshape(1)[:0])
    return functions.stack([_total([measure(*each) for each in members]) if members else nothing for members in own])


def _by_module(
    selection: MonitorSelection, modules: Sequence[str], arrays: Mapping[str, Any]
) -> list[list[tuple[str, Any]]]:
    found: dict[str, list[tuple[str, Any]]] = {module: [] for module in modules}
    for name, array in arrays.items():
        module = selection.module_of(name)
        if module is not None:
            found[module].append((name, array))
    return list(found.values())


def _total(values: Sequence[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
